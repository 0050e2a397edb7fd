"""The figures that Hugging Face's "Model training anatomy" prints, in its words and units (its MB are MiB).

`print_gpu_utilization` and `print_summary` are the document's own functions; `summary` gives a report's figures in the
same lines.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Protocol

from stepfast.errors import AnatomyError
from stepfast.torch.anatomy import nvml
from stepfast.torch.anatomy.report import Report

_MIB = 1 << 20


class Trained(Protocol):
    """What `transformers.Trainer.train()` returns."""

    @property
    def metrics(self) -> Mapping[str, float]: ...


def print_gpu_utilization(index: int = 0) -> None:
    """Prints what is occupied of the GPU with NVML's index, by whomever.

    Raises AnatomyError where there is no NVIDIA driver, no such GPU, or no nvidia-ml-py.
    """
    _say(_occupied("GPU", nvml.read(index).used_bytes))


def print_summary(result: Trained | Report, index: int = 0) -> None:
    """Prints seconds, samples a second and occupied memory: of a run of Trainer and the GPU now, or of a report.

    Raises AnatomyError as `print_gpu_utilization`, and where the run was not timed.
    """
    if isinstance(result, Report):
        _say(summary(result))
        return
    _say(_timed(_metric(result, "train_runtime"), _metric(result, "train_samples_per_second")))
    print_gpu_utilization(index)


def summary(report: Report, *, samples: int | None = None) -> str:
    """The same lines for a report: the time of `samples` samples (default: of one step), and memory at its most.

    A prediction for a GPU gives the least time, at the device's roofline. Raises AnatomyError for a number of samples
    when the report does not know how many are in a step.
    """
    seconds, rate = report.time.step_seconds, report.time.samples_per_second
    if samples is not None:
        if rate is None:
            raise AnatomyError("the report does not know its batch size, so not the time of samples: leave samples out")
        seconds = samples / rate
    # As nvidia-smi shows it; what a CPU's process takes is of no GPU.
    device = "CPU" if report.device == "cpu" else "GPU"
    return f"{_timed(seconds, rate)}\n{_occupied(device, report.memory.occupied_bytes)}"


def _timed(seconds: float, samples_per_second: float | None) -> str:
    lines = [f"Time: {seconds:.2f}"]
    if samples_per_second is not None:
        lines.append(f"Samples/second: {samples_per_second:.2f}")
    return "\n".join(lines)


def _occupied(device: str, size_bytes: int) -> str:
    return f"{device} memory occupied: {size_bytes // _MIB} MB."


def _metric(result: Trained, name: str) -> float:
    try:
        return float(result.metrics[name])
    except (AttributeError, KeyError) as error:
        raise AnatomyError(f"the result has no {name}: hand over what Trainer.train() returned, or a report") from error


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
