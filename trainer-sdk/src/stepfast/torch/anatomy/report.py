"""The anatomy of a training job as plain values: what a prediction and a measurement both say. Pure: no torch.

Sizes are bytes, times seconds, work FLOPs. `to_json` and `from_json` are each other's inverse.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from stepfast.footprint import Footprint
from stepfast.torch.anatomy.timeline import Component

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMemory:
    """What one module holds at the peak, its submodules not counted. `components`: bytes by component's name."""

    name: str
    kind: str  # its class
    components: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.components.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """The memory at one time: bytes of each component, in the order of MemoryReport.curve_components."""

    seconds: float
    step: int
    phase: str
    components: Sequence[int]
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Where memory goes. `peak_bytes`: allocated at the worst moment; `steady_bytes`: between steps.

    `component_peaks`: the most of each component, each at a moment of its own.

    `reserved_bytes`: what the allocator takes of the device for it. `context_bytes`: CUDA's own. Their sum,
    `occupied_bytes`, is what nvidia-smi shows. On a CPU nothing is reserved: what is occupied is the peak.
    """

    peak_bytes: int
    peak_components: Mapping[str, int]
    peak_phase: str
    peak_step: int
    peak_operator: str
    component_peaks: Mapping[str, int]
    steady_bytes: int
    steady_components: Mapping[str, int]
    reserved_bytes: int
    context_bytes: int
    limit_bytes: int | None
    modules: Sequence[ModuleMemory]
    curve_components: Sequence[str]
    curve: Sequence[CurvePoint]

    @property
    def occupied_bytes(self) -> int:
        return self.reserved_bytes + self.context_bytes

    @property
    def fits(self) -> bool | None:
        """Whether it fits the device; None where the device has no known limit."""
        return None if self.limit_bytes is None else self.occupied_bytes <= self.limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """What the device does at most: FLOP/s in tensor contractions and in all else, and bytes/s of its memory.

    Williams, Waterman, Patterson, "Roofline" (2009): an operation does at most min(FLOP/s, bytes/s · FLOP/byte).
    """

    contraction_flops: float
    other_flops: float
    bandwidth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTime:
    """One class of operations in one phase of a step. `bound`: "compute" or "memory", its place under the roofline."""

    kind: str
    phase: str
    calls: int
    flops: float
    moved_bytes: int
    seconds: float
    bound: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeReport:
    """Where time goes in one step of one rank.

    `is_bound`: the seconds are the device's roofline, so the least that it can take; else they were measured.
    `flops_utilisation`: model FLOPs a second by what the device does at most (MFU); None where that is not known.
    `roof`: the device's, None where it is not known.
    """

    step_seconds: float
    is_bound: bool
    samples_per_step: int | None
    flops_per_step: float
    flops_utilisation: float | None
    classes: Sequence[ClassTime]
    roof: Roof | None = None

    @property
    def samples_per_second(self) -> float | None:
        if self.samples_per_step is None or self.step_seconds <= 0:
            return None
        return self.samples_per_step / self.step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """`kind`: "predicted" or "measured". `settings`: what was asked, in words, in order of appearance. `ranks`: how
    many train together, of which this is one; `replicas`: how many of them hold the same weights and states.
    """

    kind: str
    title: str
    device: str
    settings: Mapping[str, str]
    parameters: int
    trainable_parameters: int
    memory: MemoryReport
    time: TimeReport
    notes: Sequence[str] = field(default=())
    ranks: int = 1
    replicas: int = 1

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)


def footprint_of(report: Report) -> Footprint:
    """What a manifest carries of a prediction. A save stages what is there between steps: weights, buffers, states. Of
    what several ranks hold each stages its part.
    """
    memory = report.memory
    kept = (Component.WEIGHTS, Component.BUFFERS, Component.OPTIMIZER)
    state_bytes = sum(memory.steady_components.get(component.value, 0) for component in kept)
    return Footprint(
        title=report.title,
        device=report.device,
        device_memory_bytes=memory.limit_bytes,
        occupied_bytes=memory.occupied_bytes,
        reserved_bytes=memory.reserved_bytes,
        context_bytes=memory.context_bytes,
        peak_bytes=memory.peak_bytes,
        components={name: size for name, size in memory.peak_components.items() if size},
        checkpoint_bytes=-(-state_bytes // report.replicas),
        world_size=report.ranks if report.ranks > 1 else None,
    )


def from_json(text: str) -> Report:
    """Raises ValueError, with the place, when the text is no report of this format."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no anatomy report: {error}") from error
    if not isinstance(document, dict) or "format" not in document:
        raise ValueError("no anatomy report: it has no format")
    if document.pop("format") != FORMAT:
        raise ValueError(f"an anatomy report of another release: its format is not {FORMAT}")
    report: Report = _decoded(Report, document, "")
    return report


def _decoded(hint: Any, value: Any, place: str) -> Any:
    """The value as what a field of a report holds. Raises ValueError where it is of another type."""
    if is_dataclass(hint) and isinstance(value, dict):
        return _decoded_fields(hint, value, place)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        kept = next(each for each in arguments if each is not NoneType)
        return None if value is None else _decoded(kept, value, place)
    if origin is Sequence and isinstance(value, list):
        return tuple(_decoded(arguments[0], each, f"{place}[{index}]") for index, each in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        return {name: _decoded(arguments[1], each, f"{place}.{name}") for name, each in value.items()}
    if hint in {int, float}:
        return _decoded_number(hint, value, place)
    if type(value) is hint:
        return value
    raise _misfit(place)


def _decoded_number(hint: Any, value: Any, place: str) -> Any:
    """A size, a count or a time: none of them is less than nothing, and of ranks there is at least one."""
    kinds = {int, float} if hint is float else {int}
    least = 1 if place in {".ranks", ".replicas"} else 0
    if type(value) not in kinds or not least <= value < math.inf:
        raise _misfit(place)
    return hint(value)


def _misfit(place: str) -> ValueError:
    return ValueError(f"no anatomy report: {place.removeprefix('.')} is not what it should be")


def _decoded_fields(kind: Any, document: dict[str, Any], place: str) -> Any:
    hints = get_type_hints(kind)
    unknown = next((name for name in document if name not in hints), None)
    if unknown is not None:
        raise ValueError(f"no anatomy report: {f'{place}.{unknown}'.removeprefix('.')} is no field of it")
    fields = {name: _decoded(hints[name], value, f"{place}.{name}") for name, value in document.items()}
    try:
        return kind(**fields)
    except TypeError as error:  # one without a default is missing
        raise ValueError(f"no anatomy report: {place.removeprefix('.') or 'it'} is not whole: {error}") from error
