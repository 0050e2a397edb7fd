"""Reports that no small prediction makes: edges of what a report may be."""

from __future__ import annotations

from dataclasses import replace

from stepfast.torch.anatomy import Device, Report
from stepfast.torch.anatomy.report import MemoryReport, ModuleMemory, TimeReport

MIB = 1 << 20

SMALL_GPU = Device(
    name="small-gpu", is_cuda=True, memory_bytes=6 * MIB, context_bytes=1 * MIB, fp32_flops=1e12,
    half_flops=8e12, bandwidth=1e11,
)  # fmt: skip

HOSTILE = (
    "</script><script>window.hacked = true</script><img src=x onerror='window.hacked = true'>{{style}} &amp; \u2028"
)


def without_limit(report: Report) -> Report:
    return replace(report, memory=replace(report.memory, limit_bytes=None), time=replace(report.time, roof=None))


def too_large(report: Report) -> Report:
    return replace(report, memory=replace(report.memory, limit_bytes=report.memory.occupied_bytes * 3 // 4))


def hostile(report: Report) -> Report:
    """Every text of it wants to be markup."""
    memory, time = report.memory, report.time
    first = memory.curve_components[0]
    return replace(
        report,
        title=HOSTILE,
        device=HOSTILE,
        settings={HOSTILE: HOSTILE},
        notes=(HOSTILE,),
        memory=replace(
            memory,
            peak_operator=HOSTILE,
            curve_components=(HOSTILE, *memory.curve_components[1:]),
            component_peaks={HOSTILE: memory.component_peaks[first], **memory.component_peaks},
            peak_components={HOSTILE: memory.peak_components[first], **memory.peak_components},
            curve=tuple(replace(point, phase=HOSTILE) for point in memory.curve),
            modules=tuple(
                replace(each, name=f"{each.name}.{HOSTILE}", kind=HOSTILE, components={HOSTILE: 1 + each.total_bytes})
                for each in memory.modules
            ),
        ),
        time=replace(
            time, classes=tuple(replace(each, kind=HOSTILE, phase=HOSTILE, bound=HOSTILE) for each in time.classes)
        ),
    )  # fmt: skip


def of_one_component(report: Report) -> Report:
    memory = report.memory
    only = {"weights": 4 * MIB}
    return replace(
        report,
        memory=replace(
            memory, peak_bytes=4 * MIB, peak_components=only, component_peaks=only, steady_bytes=4 * MIB,
            steady_components=only, reserved_bytes=4 * MIB, context_bytes=0, curve_components=("weights",),
            curve=(replace(memory.curve[0], components=(4 * MIB,), reserved_bytes=4 * MIB),),
            modules=(ModuleMemory(name="", kind="Linear", components=only),),
        ),
    )  # fmt: skip


def of_nothing(report: Report) -> Report:
    """Empty curve, no modules, no time: what a step that allocates nothing gives."""
    return replace(
        report,
        title="",
        memory=MemoryReport(
            peak_bytes=0, peak_components={}, peak_phase="", peak_step=0, peak_operator="", component_peaks={},
            steady_bytes=0, steady_components={}, reserved_bytes=0, context_bytes=0, limit_bytes=None, modules=(),
            curve_components=(), curve=(),
        ),
        time=TimeReport(
            step_seconds=0.0, is_bound=False, samples_per_step=None, flops_per_step=0.0, flops_utilisation=None,
            classes=(),
        ),
    )  # fmt: skip


def of_zero_bytes(report: Report) -> Report:
    """Everything is there, and holds nothing."""
    memory = report.memory
    none = dict.fromkeys(memory.component_peaks, 0)
    return replace(
        report,
        memory=replace(
            memory, peak_bytes=0, peak_components=none, component_peaks=none, steady_bytes=0, steady_components=none,
            reserved_bytes=0, context_bytes=0, limit_bytes=0,
            modules=tuple(replace(module, components={"weights": 0}) for module in memory.modules),
            curve=tuple(
                replace(point, components=(0,) * len(memory.curve_components), reserved_bytes=0, seconds=0.0)
                for point in memory.curve
            ),
        ),
    )  # fmt: skip


def of_many_modules(report: Report) -> Report:
    """3,000 layers of the same shape and one that is larger."""
    sizes = {"blocks.7.linear": 8 * MIB, **{f"blocks.{index}.linear": 10_000 for index in range(3000) if index != 7}}
    modules = tuple(
        ModuleMemory(name=name, kind="Linear", components={"weights": size // 2, "optimizer": size - size // 2})
        for name, size in sizes.items()
    )
    total = sum(sizes.values())
    parts = {"weights": total // 2, "optimizer": total - total // 2}
    return replace(report, memory=replace(report.memory, modules=modules, peak_bytes=total, peak_components=parts))
