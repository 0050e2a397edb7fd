"""What devices can hold and do. Figures of the manufacturers' data sheets: dense, without sparsity. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stepfast.errors import AnatomyOptionError
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
    itself before it has a tensor. Peaks in FLOP/s: `fp32_flops` outside of tensor cores, as torch
    multiplies fp32 unless told to use TF32; `half_flops` for fp16 and bf16. `bandwidth`: bytes/s of its memory.
    `capability`: CUDA's, by which kernels are chosen. `cublas_workspace_bytes`: what torch gives cuBLAS for each thread
    that multiplies.
    """

    name: str
    is_cuda: bool
    memory_bytes: int | None
    context_bytes: int
    fp32_flops: float
    half_flops: float
    bandwidth: float
    capability: tuple[int, int] = (8, 0)
    cublas_workspace_bytes: int = 0


def _cuda(
    name: str,
    fp32: float,
    half: float,
    gigabytes_s: float,
    capability: tuple[int, int],
    *,
    context_mib: int = 520,
) -> Device:
    return Device(
        name=name, is_cuda=True, memory_bytes=MODELS[name].memory_bytes, context_bytes=context_mib * _MIB,
        fp32_flops=fp32 * _TERA, half_flops=half * _TERA, bandwidth=gigabytes_s * _GIGA,
        capability=capability, cublas_workspace_bytes=_CUBLAS if capability < (9, 0) else _CUBLAS_HOPPER,
    )  # fmt: skip


CPU = Device(
    name="cpu", is_cuda=False, memory_bytes=None, context_bytes=0,
    fp32_flops=0.1 * _TERA, half_flops=0.1 * _TERA, bandwidth=20 * _GIGA,
)  # fmt: skip

# Memory is the model's. The document's V100 had a context of 1,343 MB with the CUDA 11.2 of its day.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        CPU,
        _cuda("v100-16gb", 15.7, 125, 900, (7, 0), context_mib=1343),
        _cuda("v100-32gb", 15.7, 125, 900, (7, 0), context_mib=1343),
        _cuda("t4", 8.1, 65, 320, (7, 5)),
        _cuda("a10", 31.2, 125, 600, (8, 6)),
        _cuda("l4", 30.3, 121, 300, (8, 9)),
        _cuda("l40s", 91.6, 362, 864, (8, 9)),
        _cuda("rtx-4090", 82.6, 165, 1008, (8, 9)),
        _cuda("a100-40gb", 19.5, 312, 1555, (8, 0)),
        _cuda("a100-80gb", 19.5, 312, 2039, (8, 0)),
        _cuda("h100-80gb", 67, 989, 3350, (9, 0)),
        _cuda("h100-pcie-80gb", 51, 756, 2000, (9, 0)),
        _cuda("h100-nvl-94gb", 60, 835, 3900, (9, 0)),
        _cuda("h200-141gb", 67, 989, 4800, (9, 0)),
        _cuda("b200-180gb", 80, 2250, 8000, (10, 0)),
    )
}


def device_named(name: str) -> Device:
    """The device of this name. Raises AnatomyError, with the names that there are."""
    found = DEVICES.get(name.lower())
    if found is None:
        raise AnatomyOptionError(f"no device is known as {name!r}; known: {', '.join(DEVICES)}")
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
