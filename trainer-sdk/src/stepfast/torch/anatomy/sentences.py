"""What a report says in words, the same in a terminal and on a page. Pure."""

from __future__ import annotations

from stepfast.sizes import size_text
from stepfast.torch.anatomy.report import MemoryReport, Report

ITSELF = "(itself)"  # what a module holds beside its submodules
NO_SUBMODULE = "(no submodule)"  # what the model holds itself, or nobody within it
ALL_OTHERS = "(others)"

_PHASES = {
    "setup": "before the forward pass",
    "forward": "forward pass",
    "backward": "backward pass",
    "optimizer": "optimizer's step",
}


def headline(report: Report) -> str:
    """What was looked at, how, and on what."""
    trained = report.trainable_parameters
    share = "all of them trained" if trained == report.parameters else f"{number_text(trained)} of them trained"
    return f"{report.kind} for {report.device}; {number_text(report.parameters)} parameters, {share}"


def fit(report: Report) -> str:
    """Whether it fits its device."""
    memory = report.memory
    occupied = size_text(memory.occupied_bytes)
    if memory.limit_bytes is None:
        return f"{occupied} are occupied at most; the device has no known limit"
    limit = size_text(memory.limit_bytes)
    free = memory.limit_bytes - memory.occupied_bytes
    if free >= 0:
        return f"It fits: {occupied} of {limit} are occupied at most, {size_text(free)} stay free"
    return f"It does not fit: {occupied} are needed, {size_text(-free)} more than the device's {limit}"


def occupation(memory: MemoryReport) -> tuple[tuple[str, int], ...]:
    """What a device's memory is taken by, in parts that add up to `occupied_bytes`."""
    unused = max(0, memory.reserved_bytes - memory.peak_bytes)
    parts = (
        ("allocated", memory.peak_bytes),
        ("reserved, not in use", unused),
        ("CUDA's context", memory.context_bytes),
    )
    return tuple((name, size) for name, size in parts if size or name == "allocated")


def peak_moment(report: Report) -> str:
    """When most is allocated, and by what."""
    memory = report.memory
    if not memory.curve:
        return "nothing is allocated"
    phase = _PHASES.get(memory.peak_phase, memory.peak_phase)
    return f"step {memory.peak_step}, {phase}, when {memory.peak_operator or 'an operator'} allocates"


def pace(report: Report) -> tuple[tuple[str, str], ...]:
    """Figures of a step's time, each with its name. A roofline's time is the least, so its rates are the most."""
    time = report.time
    least, most = ("at least ", "at most ") if time.is_bound else ("", "")
    figures = [("step", least + seconds_text(time.step_seconds))]
    if time.samples_per_second is not None:
        figures.append(("samples/second", f"{most}{rate_text(time.samples_per_second)}"))
    figures.append(("FLOPs a step", number_text(time.flops_per_step)))
    if time.flops_utilisation is not None:
        figures.append(("FLOPs utilisation", f"{most}{100 * time.flops_utilisation:.2g} %"))
    return tuple(figures)


def source_of_times(report: Report) -> str:
    """What the times are."""
    if report.time.is_bound:
        return "times are the device's roofline: the least that its arithmetic and its memory allow"
    return "times are of the kernels as they ran" if report.kind == "predicted" else "times were measured"


def number_text(number: float) -> str:
    """A count in three digits, as `335 M`."""
    for power, unit in ((15, " P"), (12, " T"), (9, " G"), (6, " M"), (3, " k")):
        if number >= 0.9995 * 10**power:
            return f"{_three_digits(number / 10**power)}{unit}"
    return str(number) if isinstance(number, int) else _three_digits(number)


def rate_text(rate: float) -> str:
    """A rate in at least three digits, as `8.86` and `5,690`."""
    return f"{rate:,.0f}" if rate >= 99.95 else _three_digits(rate)


def ratio_text(ratio: float) -> str:
    """A ratio in three digits, as `0.25` and `151`."""
    return f"{ratio:.3f}" if 0 < ratio < 0.0995 else _three_digits(ratio)


def seconds_text(seconds: float) -> str:
    """A duration in three digits, as `359 ms`."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 0.9995:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds * 1e9)} ns" if seconds > 0 else "0 s"


def share_text(share: float) -> str:
    """A share of 1 in percent."""
    if 0 < share < 0.001:
        return "< 0.1 %"
    return f"{share * 100:.1f} %" if 0 < share < 0.0995 else f"{share * 100:.0f} %"


def _three_digits(number: float) -> str:
    if number >= 99.95:
        return f"{number:.0f}"
    return f"{number:.1f}" if number >= 9.995 else f"{number:.2f}".rstrip("0").rstrip(".")
