"""A double of the module pynvml for machines without a GPU."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml

GIB = 1 << 30


class Driver(ModuleType):
    """Two devices in the shapes of nvidia-ml-py 13: structures with `used`, `gpu`, `pid`; the real errors."""

    NVMLError = pynvml.NVMLError
    NVMLError_LibraryNotFound = pynvml.NVMLError_LibraryNotFound
    NVMLError_DriverNotLoaded = pynvml.NVMLError_DriverNotLoaded
    NVMLError_InvalidArgument = pynvml.NVMLError_InvalidArgument
    NVMLError_NotFound = pynvml.NVMLError_NotFound
    NVMLError_NotSupported = pynvml.NVMLError_NotSupported
    NVMLError_NoPermission = pynvml.NVMLError_NoPermission

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.is_begun = False
        self.refused: dict[str, int] = {}  # code of the error by function
        self.names: list[str | bytes] = ["Tesla V100-SXM2-16GB", "Tesla V100-SXM2-16GB"]
        self.used = [1343 << 20, 0]
        self.processes = [[SimpleNamespace(pid=3721, usedGpuMemory=1341 << 20)], []]

    def nvmlInit(self) -> None:
        self._check("nvmlInit")
        self.is_begun = True

    def nvmlShutdown(self) -> None:
        self.is_begun = False

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._check("nvmlDeviceGetHandleByIndex")
        if not 0 <= index < len(self.names):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid != "GPU-of-the-second":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return 1

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return self.names[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self._check("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(total=16 * GIB, used=self.used[handle], free=16 * GIB - self.used[handle])

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self._check("nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=37, memory=12)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        self._check("nvmlDeviceGetComputeRunningProcesses")
        return self.processes[handle]

    def _check(self, name: str) -> None:
        if not self.is_begun and name != "nvmlInit":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        if name in self.refused:
            raise pynvml.NVMLError(self.refused[name])
