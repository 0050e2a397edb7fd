"""What devices can hold and do. Figures of the manufacturers' data sheets: dense, without sparsity. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stepfast.errors import AnatomyError
from stepfast.gpumodels import MODELS, is_like, model_called

_MIB = 1 << 20
_TERA = 10**12
_GIGA = 10**9
_CUBLAS = 2 * 4096 * 1024 + 8 * 16 * 1024  # CUBLAS_WORKSPACE_CONFIG as torch sets it: :4096:2:16:8 …
_CUBLAS_HOPPER = 8 * 4096 * 1024  # … and from compute capability 9.0 on


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that trains.

    `memory_bytes`: what nvidia-smi shows as total (None: not limited). `context_bytes`: what a process takes for CUDA
    itself before it has a tensor. Peaks in FLOP/s: `fp32_flops` outside of tensor cores, `matmul_fp32_flops` where fp32
    products may use them (TF32), `half_flops` for fp16 and bf16. `bandwidth`: bytes/s of its memory.
    `cublas_workspace_bytes`: what torch gives cuBLAS for each thread that multiplies.
    """

    name: str
    is_cuda: bool
    memory_bytes: int | None
    context_bytes: int
    fp32_flops: float
    tf32_flops: float
    half_flops: float
    bandwidth: float
    cublas_workspace_bytes: int = 0


def _cuda(  # noqa: PLR0917 - a row of the table below
    name: str,
    fp32: float,
    tf32: float,
    half: float,
    gigabytes_s: float,
    context_mib: int = 520,
    *,
    is_hopper: bool = False,
) -> Device:
    return Device(
        name=name, is_cuda=True, memory_bytes=MODELS[name].memory_bytes, context_bytes=context_mib * _MIB,
        fp32_flops=fp32 * _TERA, tf32_flops=tf32 * _TERA, half_flops=half * _TERA, bandwidth=gigabytes_s * _GIGA,
        cublas_workspace_bytes=_CUBLAS_HOPPER if is_hopper else _CUBLAS,
    )  # fmt: skip


CPU = Device(
    name="cpu", is_cuda=False, memory_bytes=None, context_bytes=0,
    fp32_flops=0.1 * _TERA, tf32_flops=0.1 * _TERA, half_flops=0.1 * _TERA, bandwidth=20 * _GIGA,
)  # fmt: skip

# Memory is the model's. The document's V100 had a context of 1,343 MB with the CUDA 11.2 of its day.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        CPU,
        _cuda("v100-16gb", 15.7, 15.7, 125, 900, context_mib=1343),
        _cuda("v100-32gb", 15.7, 15.7, 125, 900, context_mib=1343),
        _cuda("t4", 8.1, 8.1, 65, 320),
        _cuda("a10", 31.2, 62.5, 125, 600),
        _cuda("l4", 30.3, 60, 121, 300),
        _cuda("l40s", 91.6, 183, 362, 864),
        _cuda("rtx-4090", 82.6, 82.6, 165, 1008),
        _cuda("a100-40gb", 19.5, 156, 312, 1555),
        _cuda("a100-80gb", 19.5, 156, 312, 2039),
        _cuda("h100-80gb", 67, 494, 989, 3350, is_hopper=True),
        _cuda("h100-pcie-80gb", 51, 378, 756, 2000, is_hopper=True),
        _cuda("h100-nvl-94gb", 60, 418, 835, 3900, is_hopper=True),
        _cuda("h200-141gb", 67, 494, 989, 4800, is_hopper=True),
        _cuda("b200-180gb", 80, 1100, 2250, 8000, is_hopper=True),
    )
}


def device_named(name: str) -> Device:
    """The device of this name. Raises AnatomyError, with the names that there are."""
    found = DEVICES.get(name.lower())
    if found is None:
        raise AnatomyError(f"no device is known as {name!r}; known: {', '.join(DEVICES)}")
    return found


def device_called(name: str, memory_bytes: int) -> Device:
    """The device that the driver calls by this name, as "NVIDIA A100-SXM4-80GB", and that has so much memory.

    Any other, a MIG slice or a share of a known one among them, is taken for CUDA's slowest here, by its own name: its
    times mean little, its memory all.
    """
    model = model_called(name)
    if model is None or not is_like(model, memory_bytes):
        return replace(DEVICES["t4"], name=name, memory_bytes=memory_bytes)
    return DEVICES[model.name]
