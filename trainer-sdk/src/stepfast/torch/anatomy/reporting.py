"""Makes a report out of a timeline and the calls that made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stepfast.torch.anatomy.allocator import Reservation
from stepfast.torch.anatomy.devices import Device
from stepfast.torch.anatomy.operations import OperationClass, costs_by_class
from stepfast.torch.anatomy.parallel.plan import Sharing
from stepfast.torch.anatomy.report import (
    ClassTime,
    CurvePoint,
    MemoryReport,
    ModuleMemory,
    Report,
    Roof,
    TimeReport,
)
from stepfast.torch.anatomy.setting import Run, Setting
from stepfast.torch.anatomy.timeline import Component, Moment, Timeline

_POINTS = 400  # of the curve: what a screen can show


def report_of(run: Run, setting: Setting, *, kind: str, title: str | None, batch_size: int | None) -> Report:
    """The report of a run. `kind`: "predicted" or "measured"."""
    device = setting.device
    settings = {
        "device": device.name,
        "precision": setting.precision.value,
        "parallel": str(setting.parallel),
        "attention": setting.attention.value if device.is_cuda else "as the CPU chooses",
        "activation checkpointing": "yes" if setting.checkpointing else "no",
        "accumulation steps": str(setting.loop.accumulation_steps),
    }
    if batch_size is not None:
        settings = {"batch size": str(batch_size), **settings}
    samples = None if batch_size is None else batch_size * setting.loop.accumulation_steps
    return Report(
        kind=kind,
        title=title or run.facts.name,
        device=device.name,
        settings=settings,
        parameters=run.facts.parameters,
        trainable_parameters=run.facts.trainable_parameters,
        memory=memory_report(run.assembled.timeline, run.reservation, device, run.facts.module_kinds),
        time=time_report(
            run,
            device,
            step=setting.loop.steps,
            samples_per_step=samples,
            is_bound=kind == "predicted" and device.is_cuda,
        ),
        notes=run.notes,
        ranks=setting.parallel.world_size,
        replicas=setting.parallel.world_size if setting.parallel.sharing is Sharing.DDP else 1,
    )


def memory_report(
    timeline: Timeline, reservation: Reservation | None, device: Device, module_kinds: Mapping[str, str]
) -> MemoryReport:
    """Where memory goes at the worst moment of the timeline, between steps, and over time."""
    peak, steady = timeline.peak(), timeline.steady()
    change = timeline.changes[peak.change]
    used = {block.component for block in timeline.blocks if block.size_bytes}
    components = tuple(component for component in Component if component in used)
    most = timeline.component_peaks()
    return MemoryReport(
        peak_bytes=peak.total_bytes,
        peak_components=_named(peak, components),
        peak_phase=change.phase.value,
        peak_step=change.step,
        peak_operator=timeline.blocks[change.block].operator,
        component_peaks={component.value: most[component] for component in components},
        steady_bytes=steady.total_bytes,
        steady_components=_named(steady, components),
        reserved_bytes=peak.total_bytes if reservation is None else reservation.peak_reserved_bytes,
        context_bytes=device.context_bytes,
        limit_bytes=device.memory_bytes,
        modules=_modules(timeline, peak, module_kinds),
        curve_components=tuple(component.value for component in components),
        curve=_curve(timeline, reservation, components),
    )


def time_report(run: Run, device: Device, *, step: int, samples_per_step: int | None, is_bound: bool) -> TimeReport:
    """Where time goes in one step. Its utilisation counts the model's own FLOPs: none that were computed again."""
    sums = costs_by_class(run.assembled.calls, run.costs, step=step)
    seconds = sum(each.seconds for each in sums) if run.step_seconds is None else run.step_seconds
    costs = [(call, run.costs.of(call)) for call, _ in run.assembled.calls if call.step == step]
    model_flops = sum(cost.flops for call, cost in costs if not call.is_recomputed)
    peak_flops = max((cost.peak_flops(device) for _, cost in costs if cost.flops), default=device.fp32_flops)
    roof = Roof(contraction_flops=peak_flops, other_flops=device.fp32_flops, bandwidth=device.bandwidth)
    classes = tuple(
        ClassTime(
            kind=each.kind.value,
            phase=each.phase.value,
            calls=each.calls,
            flops=each.flops,
            moved_bytes=each.moved_bytes,
            seconds=each.seconds,
            bound="compute" if each.flops / max(each.moved_bytes, 1) > _ridge(each.kind, roof) else "memory",
        )
        for each in sums
    )
    return TimeReport(
        step_seconds=seconds,
        is_bound=is_bound,
        samples_per_step=samples_per_step,
        flops_per_step=sum(each.flops for each in sums),
        flops_utilisation=model_flops / seconds / peak_flops if seconds and device.is_cuda else None,
        classes=classes,
        roof=roof,
    )


def _ridge(kind: OperationClass, roof: Roof) -> float:
    """FLOPs a byte from which on an operation is bound by arithmetic."""
    return (roof.contraction_flops if kind is OperationClass.CONTRACTION else roof.other_flops) / roof.bandwidth


def _named(moment: Moment, components: Sequence[Component]) -> dict[str, int]:
    return {component.value: moment.components[component] for component in components}


def _modules(timeline: Timeline, moment: Moment, kinds: Mapping[str, str]) -> tuple[ModuleMemory, ...]:
    held: dict[str, dict[str, int]] = {}
    for index in moment.live:
        block = timeline.blocks[index]
        if block.size_bytes:
            components = held.setdefault(block.module, {})
            components[block.component.value] = components.get(block.component.value, 0) + block.size_bytes
    order = {name: at for at, name in enumerate(kinds)}
    return tuple(
        ModuleMemory(name=name, kind=kinds.get(name, ""), components=held[name])
        for name in sorted(held, key=lambda name: order.get(name, -1))
    )


def _curve(
    timeline: Timeline, reservation: Reservation | None, components: Sequence[Component]
) -> tuple[CurvePoint, ...]:
    """At most _POINTS points; of the changes between two of them, the one with the most memory is kept."""
    changes = timeline.changes
    if not changes:
        return ()
    stride = max(1, -(-len(changes) // _POINTS))
    held = dict.fromkeys(Component, 0)
    points: list[CurvePoint] = []
    best_total, best = -1, None
    total = 0
    for index, change in enumerate(changes):
        block = timeline.blocks[change.block]
        size = block.size_bytes if change.is_birth else -block.size_bytes
        held[block.component] += size
        total += size
        if total > best_total:
            best_total = total
            best = CurvePoint(
                seconds=change.seconds,
                step=change.step,
                phase=change.phase.value,
                components=tuple(held[component] for component in components),
                reserved_bytes=total if reservation is None else reservation.reserved[index],
            )
        if (index + 1) % stride == 0 or index == len(changes) - 1:
            assert best is not None
            points.append(best)
            best_total, best = -1, None
    return tuple(points)
