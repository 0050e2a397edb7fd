"""What a training tells of its anatomy while it runs: a closed set of names, the same in heartbeats, in a job's status
and, behind `stepfast_`, in Prometheus. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "anatomy_"

METRICS: Mapping[str, str] = {
    "step_seconds": "Seconds of a training step, the median of recent ones.",
    "samples_per_second": "Samples a second of one rank.",
    "flops_utilisation": "Model FLOPs a second by what the device does at most (MFU), 0 to 1.",
    "goodput_ratio": "Time in training steps, saves' stalls left out, by the time since training was set up.",
    "memory_peak_bytes": "The most memory that was allocated at once.",
    "memory_reserved_bytes": "What torch's allocator holds of the GPU.",
    "device_memory_used_bytes": "Memory of the GPU in use, by all processes.",
    "device_utilisation": "The share of the last moment in which the GPU ran a kernel, 0 to 1.",
}


def told(values: Mapping[str, float]) -> dict[str, float]:
    """As a heartbeat carries them."""
    return {f"{PREFIX}{name}": value for name, value in values.items() if name in METRICS}


def heard(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those among a heartbeat's metrics, by their names here."""
    found = {name: metrics.get(f"{PREFIX}{name}") for name in METRICS}
    return {name: value for name, value in found.items() if value is not None}
