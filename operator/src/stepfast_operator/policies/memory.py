"""Whether the job fits its memory, by the prediction that its manifest carries, with the arithmetic in words. Pure.

Only what is known to be too small is: what nobody knows refuses nothing. Slots that are too small never do either: a
larger checkpoint is streamed through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from stepfast.errors import MemoryBudgetTooSmall, SpecError
from stepfast.footprint import Footprint, footprint_from_json
from stepfast.sizes import size_text
from stepfast.slotplan import LEAST_SHARE_BYTES, MAX_SLOTS, least_file_bytes, plan_slots, rank_share, slot_bytes
from stepfast_operator.observed import Gang, NodeMemory, Observed, Room
from stepfast_operator.record import ConditionType, Status
from stepfast_operator.spec import MemoryAction

_TOLD_PARTS = 8
_GPU_ADVICE = (
    "train with a smaller batch, activation checkpointing or sharding (FSDP, ZeRO) and predict anew, or choose nodes "
    "with larger GPUs (spec.template.spec.nodeSelector)"
)
_NODE_ADVICE = "train with a smaller batch or fewer ranks a node and predict anew, or give the ranks more memory"


class FitReason(StrEnum):
    """Why the condition FitsMemory is what it is."""

    FITS = "Fits"
    DEVICE_TOO_SMALL = "DeviceTooSmall"
    NODE_TOO_SMALL = "NodeTooSmall"
    DEPENDS_ON_NODE = "DependsOnNode"  # it fits some of the nodes that it may run on
    MEMORY_UNKNOWN = "MemoryUnknown"  # nobody says how much there is
    OTHER_DEVICE = "OtherDevice"  # predicted for GPUs, and the ranks have none, or the reverse
    OTHER_WORLD_SIZE = "OtherWorldSize"  # predicted for another number of ranks
    PREDICTION_UNREADABLE = "PredictionUnreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The verdict. `fits`: None when it is not known. `message` has the arithmetic, and what to do."""

    fits: bool | None
    reason: FitReason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Capacity:
    """What there is in one place, and the words for that. `is_most`: there may be less."""

    size_bytes: int
    text: str
    is_most: bool = False


def is_due(status: Status, gang: Gang | None) -> bool:
    """Whether the verdict is to be taken now. That of a gang that was launched stays what it was then: nodes that come
    and go change nothing about that.
    """
    is_launched = status.open_attempt is not None and gang is not None
    return not is_launched or status.condition(ConditionType.FITS_MEMORY) is None


def fit_of(observed: Observed) -> Fit | None:
    """The verdict; None where the manifest carries no prediction."""
    if observed.anatomy is None:
        return None
    try:
        footprint = footprint_from_json(observed.anatomy)
    except SpecError as error:
        return _unknown(FitReason.PREDICTION_UNREADABLE, f"{error}; write it anew: stepfast anatomy predict --annotate")
    fit = _mismatch(footprint, observed.room)
    if fit is None:
        fit = _node_fit(footprint, observed.room) if footprint.is_cpu else _device_fit(footprint, observed)
    if fit.fits is False and observed.spec.memory_policy.action is MemoryAction.REFUSE:
        what = "nothing is started" if observed.is_on_one_machine else "no pods are made until it fits"
        fit = replace(fit, message=f"{fit.message}; {what} (memoryPolicy.action: Refuse)")
    slots = _slots(footprint, observed)
    return fit if slots is None else replace(fit, message=f"{fit.message}; {slots}")


def refusal(observed: Observed) -> str | None:
    """Why nothing is to be launched; None when it may be. Unknown refuses nothing."""
    if observed.spec.memory_policy.action is not MemoryAction.REFUSE:
        return None
    fit = fit_of(observed)
    return fit.message if fit is not None and fit.fits is False else None


def _unknown(reason: FitReason, message: str) -> Fit:
    return Fit(fits=None, reason=reason, message=message)


def _mismatch(footprint: Footprint, room: Room) -> Fit | None:
    """A prediction of something else than what is going to run."""
    if footprint.world_size not in (None, room.world_size):
        return _unknown(
            FitReason.OTHER_WORLD_SIZE,
            f"predicted for {footprint.world_size} ranks, and the job has {room.world_size}: predict anew",
        )
    if footprint.is_cpu and room.gpus:
        return _unknown(
            FitReason.OTHER_DEVICE, "predicted for ranks without a GPU, and the job's have one: predict anew"
        )
    if not footprint.is_cpu and not room.gpus:
        return _unknown(
            FitReason.OTHER_DEVICE,
            f"predicted for {footprint.device}, and no GPU is known of that the job's ranks have: predict anew for "
            "the device cpu, or ask for GPUs (spec.trainer.resourcesPerNode.limits)",
        )
    return None


def _device_fit(footprint: Footprint, observed: Observed) -> Fit:
    room = observed.room
    sharing = -(-room.ranks // room.gpus)
    needed = sharing * footprint.occupied_bytes
    reserved, context = size_text(footprint.reserved_bytes), size_text(footprint.context_bytes)
    told = f"one rank takes {size_text(footprint.occupied_bytes)} ({reserved} reserved + {context} CUDA context"
    told = f"{told}{_components(footprint)})"
    if sharing > 1:
        told = f"{told}; {sharing} ranks share a GPU and take {size_text(needed)}"
    capacities = _devices(footprint, observed)
    if not capacities:
        what = f"{told}; nobody says what a GPU has: label the nodes (nvidia.com/gpu.memory), or set"
        return _unknown(FitReason.MEMORY_UNKNOWN, f"{what} spec.memoryPolicy.deviceMemory")
    return _compared(needed, told, capacities, FitReason.DEVICE_TOO_SMALL, _GPU_ADVICE)


def _devices(footprint: Footprint, observed: Observed) -> list[_Capacity]:
    """What a GPU has: as the nodes say, else the spec, else the profile that is asked for, else the prediction."""
    room, declared = observed.room, observed.spec.memory_policy.device_memory
    nodes = [_device_of(node, node.device_bytes) for node in _by_name(room.nodes) if node.device_bytes is not None]
    sure = [one for one in nodes if not one.is_most]
    if declared is not None and len(sure) < max(1, len(nodes)):
        what = f"a GPU has {size_text(declared)} (memoryPolicy.deviceMemory)"
        return [*sure, _Capacity(size_bytes=declared, text=what)]
    if nodes:
        return nodes
    if room.slice_bytes is not None:
        what = f"a slice of the MIG profile that is asked for has at most {size_text(room.slice_bytes)}"
        return [_Capacity(size_bytes=room.slice_bytes, text=what, is_most=True)]
    size = footprint.device_memory_bytes
    if size is None:
        return []
    return [_Capacity(size_bytes=size, text=f"{footprint.device}, which that is predicted for, has {size_text(size)}")]


def _device_of(node: NodeMemory, size_bytes: int) -> _Capacity:
    most, name = "at most " if node.is_device_most else "", f" ({node.device_name})" if node.device_name else ""
    text = f"a GPU of {node.name} has {most}{size_text(size_bytes)}{name}"
    return _Capacity(size_bytes=size_bytes, text=text, is_most=node.is_device_most)


def _node_fit(footprint: Footprint, room: Room) -> Fit:
    needed = room.ranks * footprint.peak_bytes
    told = f"one rank takes {size_text(footprint.peak_bytes)}"
    parts = _components(footprint).removeprefix(": ")
    told = f"{told} ({parts})" if parts else told
    if room.ranks > 1:
        told = f"{told}; the {room.ranks} ranks of a node take {size_text(needed)}"
    if room.limit_bytes is not None:
        text = f"their limit is {size_text(room.limit_bytes)} (limits.memory)"
        capacities = [_Capacity(size_bytes=room.limit_bytes, text=text)]
    else:
        capacities = [
            _Capacity(size_bytes=node.memory_bytes, text=f"{node.name} has {size_text(node.memory_bytes)}")
            for node in _by_name(room.nodes)
            if node.memory_bytes is not None
        ]
    if not capacities:
        what = f"{told}; nobody says what a node has: set limits.memory in spec.trainer.resourcesPerNode"
        return _unknown(FitReason.MEMORY_UNKNOWN, what)
    return _compared(needed, told, capacities, FitReason.NODE_TOO_SMALL, _NODE_ADVICE)


def _compared(needed: int, told: str, capacities: Sequence[_Capacity], too_small: FitReason, advice: str) -> Fit:
    """With the smallest place where it fits all of them, and the largest where it fits none."""
    smallest = min(capacities, key=lambda one: one.size_bytes)
    largest = max(capacities, key=lambda one: one.size_bytes)
    unsure = next((one for one in capacities if one.is_most), None)
    if needed <= smallest.size_bytes and unsure is not None:
        what = (
            f"{told}; {unsure.text}, and nobody says how much: set spec.memoryPolicy.deviceMemory to what a rank gets"
        )
        return _unknown(FitReason.MEMORY_UNKNOWN, what)
    if needed <= smallest.size_bytes:
        return Fit(fits=True, reason=FitReason.FITS, message=f"{told}; {smallest.text}")
    if needed > largest.size_bytes:
        most = "" if smallest.size_bytes == largest.size_bytes else ", and no other more"
        return Fit(fits=False, reason=too_small, message=f"{told}; {largest.text}{most}: {advice}")
    return _unknown(
        FitReason.DEPENDS_ON_NODE,
        f"{told}; {largest.text}, but {smallest.text}: keep the pods off nodes that are too small "
        "(spec.template.spec.nodeSelector)",
    )


def _components(footprint: Footprint) -> str:
    """The parts of the peak, largest first; those that are not told one by one together."""
    parts = sorted(footprint.components.items(), key=lambda part: (-part[1], part[0]))
    if len(parts) > _TOLD_PARTS:
        parts = [*parts[: _TOLD_PARTS - 1], ("others", sum(size for _, size in parts[_TOLD_PARTS - 1 :]))]
    told = ", ".join(f"{name} {size_text(size)}" for name, size in parts if size)
    return f": {told}" if told else ""


def _slots(footprint: Footprint, observed: Observed) -> str | None:
    """What comes of memory for fewer slots than there might be; None when it is enough, or nobody knows. As the agent
    plans them while no other job lives on the node: two that want all of its GPUs do not.
    """
    room, declared = observed.room, observed.spec.checkpoint.memory.size_limit
    limits = [
        _Capacity(size_bytes=node.slot_bytes, text=f"the agent of {node.name} may take {size_text(node.slot_bytes)}")
        for node in _by_name(room.nodes)
        if node.slot_bytes is not None
    ]
    if declared is not None:
        limits.insert(0, _Capacity(size_bytes=declared, text=f"checkpoint.memory.sizeLimit is {size_text(declared)}"))
    least = min(limits, key=lambda one: one.size_bytes, default=None)
    if least is None:
        return None
    file_bytes = least_file_bytes(footprint.checkpoint_bytes)
    share = rank_share(least.size_bytes, jobs=1, job_limit_bytes=declared, ranks=room.ranks)
    outcome = _slot_outcome(share, file_bytes)
    if outcome is None:
        return None
    wanted = MAX_SLOTS * room.ranks * slot_bytes(file_bytes)
    ranks = f"{room.ranks} ranks × " if room.ranks > 1 else ""
    return (
        f"checkpoints would take {MAX_SLOTS} slots × {ranks}{size_text(slot_bytes(file_bytes))} = {size_text(wanted)} "
        f"of a node, and {least.text}, {size_text(wanted - least.size_bytes)} less: {outcome}"
    )


def _slot_outcome(share_bytes: int, file_bytes: int) -> str | None:
    """What the agent makes of a rank's share, in words; None when it is all that a rank may have."""
    try:
        plan = plan_slots(share_bytes, file_bytes)
    except MemoryBudgetTooSmall:
        return f"a rank's share is less than the {size_text(LEAST_SHARE_BYTES)} that it needs, and every save will fail"
    if plan.streamed:
        windows = "two windows" if plan.slots > 1 else "one window"
        size = size_text(plan.capacity_bytes)
        return f"they are streamed through {windows} of {size} a rank, and training waits for the storage"
    if plan.slots == MAX_SLOTS:
        return None
    slots = "two slots" if plan.slots > 1 else "one slot"
    return f"{slots} a rank, so that a save may wait for the upload of the one before"


def _by_name(nodes: Sequence[NodeMemory]) -> list[NodeMemory]:
    """In an order that does not change from look to look, nor the words with it."""
    return sorted(nodes, key=lambda node: node.name)
