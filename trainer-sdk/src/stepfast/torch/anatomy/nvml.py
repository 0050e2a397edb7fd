"""What NVIDIA's driver says about a device now: its memory, how busy it is, and who takes what of it. No torch.

It reads through NVML, as nvidia-smi does, so it sees what is outside of torch's allocator, too: CUDA's context and
other processes. The package nvidia-ml-py is imported when something is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stepfast.errors import AnatomyError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUse:
    """A process on a device. `pid` is the host's; `used_bytes` is None where the driver does not tell it."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """A device at one moment.

    `used_bytes` is all that is taken, by whomever. `utilisation`: the share of the last sample period (up to a second)
    in which a kernel ran, 0 to 1; None where the device does not tell it, as under MIG. `processes`: those that
    compute, as far as the driver shows them: none from within most containers.
    """

    index: int
    name: str
    used_bytes: int
    total_bytes: int
    utilisation: float | None
    processes: tuple[ProcessUse, ...]


def read(index: int = 0, *, uuid: str | None = None) -> DeviceUse:
    """The device with NVML's index, which no CUDA_VISIBLE_DEVICES changes; or the one with this UUID ("GPU-…").

    Raises AnatomyError where there is no such device, no NVIDIA driver, or no nvidia-ml-py.
    """
    nvml = _library()
    try:
        # NVML counts these calls: the first takes up to a tenth of a second, the others nothing. Hence no shutdown.
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(index) if uuid is None else nvml.nvmlDeviceGetHandleByUUID(uuid)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return DeviceUse(
            index=index if uuid is None else int(nvml.nvmlDeviceGetIndex(handle)),
            name=_text(nvml.nvmlDeviceGetName(handle)),
            used_bytes=int(memory.used),
            total_bytes=int(memory.total),
            utilisation=_utilisation(nvml, handle),
            processes=_processes(nvml, handle),
        )
    except nvml.NVMLError as error:
        raise _translated(nvml, error, f"index {index}" if uuid is None else uuid) from error


def _library() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise AnatomyError("reading a GPU needs the package nvidia-ml-py: pip install stepfast[gpu]") from error
    return pynvml


def _utilisation(nvml: Any, handle: object) -> float | None:
    try:
        return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission):
        return None


def _processes(nvml: Any, handle: object) -> tuple[ProcessUse, ...]:
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission):
        return ()
    return tuple(
        ProcessUse(pid=int(each.pid), used_bytes=None if each.usedGpuMemory is None else int(each.usedGpuMemory))
        for each in running
    )


def _translated(nvml: Any, error: Exception, device: str) -> AnatomyError:
    if isinstance(error, nvml.NVMLError_LibraryNotFound | nvml.NVMLError_DriverNotLoaded):
        return AnatomyError(
            f"no NVIDIA driver on this machine ({error}): nothing can be read of a GPU; in a container, ask for one "
            "(resource nvidia.com/gpu, or docker run --gpus)"
        )
    if isinstance(error, nvml.NVMLError_InvalidArgument | nvml.NVMLError_NotFound):
        return AnatomyError(f"the NVIDIA driver knows no device with {device} ({error}): see nvidia-smi -L")
    return AnatomyError(f"the NVIDIA driver does not tell about the device with {device}: {error}")


def _text(name: str | bytes) -> str:
    """Older releases of the package hand out bytes."""
    return name.decode() if isinstance(name, bytes) else name
