"""Makes a report out of a timeline and the calls that made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stepfast.torch.anatomy.allocator import Reservation
from stepfast.torch.anatomy.devices import Device
from stepfast.torch.anatomy.operations import Costs, OperationClass, costs_by_class
from stepfast.torch.anatomy.prediction import Setting, Simulation
from stepfast.torch.anatomy.recorder import Call
from stepfast.torch.anatomy.report import (
    ClassTime,
    CurvePoint,
    MemoryReport,
    ModuleMemory,
    Report,
    Roof,
    TimeReport,
)
from stepfast.torch.anatomy.timeline import Component, Moment, Timeline

_POINTS = 400  # of the curve: what a screen can show


def predicted_report(simulation: Simulation, setting: Setting, *, title: str | None, batch_size: int | None) -> Report:
    """The report of a simulation."""
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
        kind="predicted",
        title=title or simulation.model_name,
        device=device.name,
        settings=settings,
        parameters=simulation.parameters,
        trainable_parameters=simulation.trainable_parameters,
        memory=memory_report(
            simulation.assembled.timeline, simulation.reservation, device, simulation.module_kinds
        ),
        time=time_report(
            simulation.assembled.calls, simulation.costs, device, step=setting.loop.steps, samples_per_step=samples,
            is_bound=device.is_cuda,
        ),
    )  # fmt: skip


def memory_report(
    timeline: Timeline, reservation: Reservation | None, device: Device, module_kinds: Mapping[str, str]
) -> MemoryReport:
    """Where memory goes at the worst moment of the timeline, between steps, and over time."""
    peak, steady = timeline.peak(), timeline.steady()
    change = timeline.changes[peak.change]
    components = tuple(component for component in Component if _is_used(component, timeline))
    return MemoryReport(
        peak_bytes=peak.total_bytes,
        peak_components=_named(peak, components),
        peak_phase=change.phase.value,
        peak_step=change.step,
        peak_operator=timeline.blocks[change.block].operator,
        component_peaks={component.value: timeline.component_peaks()[component] for component in components},
        steady_bytes=steady.total_bytes,
        steady_components=_named(steady, components),
        reserved_bytes=peak.total_bytes if reservation is None else reservation.peak_reserved_bytes,
        context_bytes=device.context_bytes,
        limit_bytes=device.memory_bytes,
        modules=_modules(timeline, peak, module_kinds),
        curve_components=tuple(component.value for component in components),
        curve=_curve(timeline, reservation, components),
    )


def time_report(
    calls: Sequence[tuple[Call, float]],
    costs: Costs,
    device: Device,
    *,
    step: int,
    samples_per_step: int | None,
    is_bound: bool,
) -> TimeReport:
    """Where time goes in one step."""
    sums = costs_by_class(calls, costs, step=step)
    seconds, flops = sum(each.seconds for each in sums), sum(each.flops for each in sums)
    contracted = [costs.of(call) for call, _ in calls if call.step == step]
    peak_flops = max((cost.peak_flops(device) for cost in contracted if cost.flops), default=device.fp32_flops)
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
        flops_per_step=flops,
        flops_utilisation=flops / seconds / peak_flops if seconds else None,
        classes=classes,
        roof=roof,
    )


def _ridge(kind: OperationClass, roof: Roof) -> float:
    """FLOPs a byte from which on an operation is bound by arithmetic."""
    return (roof.contraction_flops if kind is OperationClass.CONTRACTION else roof.other_flops) / roof.bandwidth


def _is_used(component: Component, timeline: Timeline) -> bool:
    return any(block.component is component and block.size_bytes for block in timeline.blocks)


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
