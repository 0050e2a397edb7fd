"""What is read of a device through NVML: on a double of the module pynvml, and its errors on the real one."""

from __future__ import annotations

import sys

import pynvml
import pytest

from nvmldouble import GIB, Driver
from stepfast.errors import AnatomyError
from stepfast.torch.anatomy import nvml


def test_double_has_the_functions_of_the_real_package() -> None:
    functions = [name for name in vars(Driver) if name.startswith("nvml")]
    assert functions
    assert [name for name in functions if not callable(getattr(pynvml, name, None))] == []
    assert {"total", "used", "free"} <= {name for name, _ in pynvml.c_nvmlMemory_t._fields_}
    assert {"gpu", "memory"} <= {name for name, _ in pynvml.c_nvmlUtilization_t._fields_}
    assert {"pid", "usedGpuMemory"} <= {name for name, _ in pynvml.c_nvmlProcessInfo_v2_t._fields_}


def test_device_is_read_with_its_memory_utilisation_and_processes(driver: Driver) -> None:
    use = nvml.read()
    assert (use.index, use.name) == (0, "Tesla V100-SXM2-16GB")
    assert (use.used_bytes, use.total_bytes, use.utilisation) == (1343 << 20, 16 * GIB, 0.37)
    assert use.processes == (nvml.ProcessUse(pid=3721, used_bytes=1341 << 20),)


def test_device_is_read_by_its_uuid_which_torch_knows_too(driver: Driver) -> None:
    assert nvml.read(uuid="GPU-of-the-second").index == 1


def test_name_in_bytes_as_older_packages_hand_it_out_is_text(driver: Driver) -> None:
    driver.names[0] = b"Tesla T4"
    assert nvml.read().name == "Tesla T4"


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION])
def test_what_a_partitioned_device_does_not_tell_is_left_open(driver: Driver, code: int) -> None:
    driver.refused = {"nvmlDeviceGetUtilizationRates": code, "nvmlDeviceGetComputeRunningProcesses": code}
    use = nvml.read()
    assert use.utilisation is None
    assert use.processes == ()
    assert use.used_bytes == 1343 << 20


def test_process_without_a_figure_has_none(driver: Driver) -> None:
    driver.processes[0][0].usedGpuMemory = None
    assert nvml.read().processes[0].used_bytes is None


@pytest.mark.parametrize(
    ("function", "code", "words"),
    [
        pytest.param("nvmlInit", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver", id="no driver"),
        pytest.param("nvmlInit", pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "no NVIDIA driver", id="driver not loaded"),
        pytest.param("nvmlDeviceGetMemoryInfo", pynvml.NVML_ERROR_GPU_IS_LOST, "index 0: GPU is lost", id="lost"),
    ],
)
def test_error_of_the_driver_is_told_with_its_words(driver: Driver, function: str, code: int, words: str) -> None:
    driver.refused = {function: code}
    with pytest.raises(AnatomyError, match=words):
        nvml.read()


def test_device_that_is_not_there_is_named(driver: Driver) -> None:
    with pytest.raises(AnatomyError, match="knows no device with index 2"):
        nvml.read(2)
    with pytest.raises(AnatomyError, match="knows no device with GPU-none"):
        nvml.read(uuid="GPU-none")


def test_missing_package_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(AnatomyError, match=r"pip install stepfast\[gpu\]"):
        nvml.read()


def test_real_package_reads_a_real_device_or_says_that_there_is_no_driver() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        with pytest.raises(AnatomyError, match="no NVIDIA driver on this machine"):
            nvml.read()
    else:
        use = nvml.read()
        assert 0 < use.used_bytes <= use.total_bytes
