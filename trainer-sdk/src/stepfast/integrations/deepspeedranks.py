"""ZeRO's optimizer states, saved by one number of ranks, as another number of ranks would have saved them. Pure.

ZeRO lays tensors end to end and gives each rank an equal part: of all of a group (stages 1 and 2), or of each parameter
by itself (stage 3). The last parts are filled up. A rank of the new number is put together of those parts of the old
that overlap it; no more of them is in memory at once than one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepfast.errors import CheckpointMismatch, StateUnsupported

FP32_12, FP32_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
BASE_12, BASE_3 = "base_optimizer_state", "optimizer_state_dict"


@dataclass(frozen=True, slots=True)
class Split:
    """A tensor of `numel` elements in parts of `part` elements each, the last of them filled up."""

    numel: int
    part: int


@dataclass(frozen=True, slots=True)
class Group:
    """What one flat tensor of a rank is made of: a part of each, one behind the other."""

    splits: tuple[Split, ...]

    @staticmethod
    def even(numels: Sequence[int], ranks: int) -> Group:
        """Stage 3's: each parameter by itself."""
        return Group(tuple(Split(numel, -(-numel // ranks)) for numel in numels))

    @property
    def numel(self) -> int:
        """Of a rank's flat tensor, with what it is filled up with."""
        return sum(split.part for split in self.splits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many ranks, and how each flat tensor is made up for them."""

    stage: int
    ranks: int
    groups: tuple[Group, ...]


_OF_RANK = re.compile(
    r"(?P<head>.*zero_pp_rank_)(?P<rank>[0-9]+)(?P<tail>_mp_rank_[0-9]+_(?P<kind>model|optim)_states\.pt)"
)
_NOT_MOVED = {
    "tensor parallel": re.compile(r"mp_rank_0*[1-9]"), "pipeline": re.compile("layer_"),
    "experts": re.compile("expert_"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankFile:
    """The name of a rank's file."""

    head: str
    rank: int
    tail: str
    kind: str  # model or optim

    @staticmethod
    def parse(name: str) -> RankFile | None:
        """None for a file that is no one rank's."""
        found = _OF_RANK.fullmatch(name)
        return RankFile(found[1], int(found[2]), found[3], found[4]) if found else None

    def of(self, rank: int) -> str:
        """Another rank's."""
        return f"{self.head}{rank}{self.tail}"


def saved_ranks(names: Collection[str]) -> int:
    """How many ranks have saved a part of the optimizer's state; 0: it is in one piece."""
    return len({file.rank for name in names if (file := RankFile.parse(name)) and file.kind == "optim"})


def check_movable(names: Collection[str]) -> None:
    """Raises StateUnsupported for what is divided over ranks in other ways, too."""
    for what, mark in _NOT_MOVED.items():
        if any(mark.search(name) for name in names):
            raise StateUnsupported(f"a checkpoint with {what} is loaded on as many ranks as have saved it")


def layout_of(engine: Any) -> Layout:
    """How the engine's optimizer states lie on its ranks. Raises StateUnsupported."""
    optimizer, stage, ranks = engine.optimizer, int(engine.zero_optimization_stage()), int(engine.seq_dp_world_size)
    if stage == 3:
        groups = [Group.even([parameter.ds_numel for parameter in group], ranks) for group in optimizer.fp16_groups]
    elif getattr(optimizer, "round_robin_gradients", False):
        # Which order the parameters lie in follows from the number of ranks.
        raise StateUnsupported("a state with round_robin_gradients is loaded on as many ranks as have saved it")
    elif hasattr(optimizer, "single_partition_of_fp32_groups") and hasattr(optimizer, "round_robin_bit16_groups"):
        filled = getattr(optimizer, "round_robin_bit16_padding", None) or [[0]] * len(optimizer.bit16_groups)
        numels = [sum(parameter.numel() for parameter in group) for group in optimizer.round_robin_bit16_groups]
        parts = [part.numel() for part in optimizer.single_partition_of_fp32_groups]
        groups = [
            Group((Split(numel + sum(padding), part),))
            for numel, padding, part in zip(numels, filled, parts, strict=True)
        ]
    else:
        raise StateUnsupported(f"the state of a {type(optimizer).__name__} is loaded on as many ranks as have saved it")
    return Layout(stage=stage, ranks=ranks, groups=tuple(groups))


def old_layout(new: Layout, ranks: int, state: Mapping[str, Any]) -> Layout:
    """How it was for the saved number of ranks. `state`: rank 0's. Raises CheckpointMismatch, StateUnsupported."""
    if isinstance(state.get(BASE_12), list):
        raise StateUnsupported("zero_optimization.elastic_checkpoint: only a checkpoint without it is moved")
    numels = [[split.numel for split in group.splits] for group in new.groups]
    if new.stage == 3:
        groups = tuple(Group.even(of_group, ranks) for of_group in numels)
        found = [tensor.numel() for tensor in state[FP32_3]]
        if found != [group.numel for group in groups]:
            raise CheckpointMismatch(
                f"the checkpoint's sub-groups have {found} elements on a rank, where the model would have "
                f"{[group.numel for group in groups]}: save and load with the same sub_group_size, large enough for all"
            )
        return Layout(stage=3, ranks=ranks, groups=groups)
    parts = [lean.numel() + padding for lean, padding in zip(state[FP32_12], state["group_paddings"], strict=True)]
    if len(parts) != len(numels) or any(part * ranks < sum(of) for part, of in zip(parts, numels, strict=True)):
        raise CheckpointMismatch(f"the checkpoint has groups of {parts} elements on a rank, not those of this model")
    groups = tuple(Group((Split(of_group[0], part),)) for of_group, part in zip(numels, parts, strict=True))
    return Layout(stage=new.stage, ranks=ranks, groups=groups)


def needed_ranks(old: Layout, new: Layout, rank: int) -> list[int]:
    """The old ranks that have something of the new one, ascending; rank 0 always, for what all have."""
    found = {0}
    for before, after in zip(old.groups, new.groups, strict=True):
        for was, now in zip(before.splits, after.splits, strict=True):
            begin, end = rank * now.part, min((rank + 1) * now.part, now.numel)
            if begin < end:
                found.update(range(begin // was.part, -(-end // was.part)))
    return sorted(found)


def moved(old: Layout, new: Layout, rank: int, load: Callable[[int], Mapping[str, Any]]) -> dict[str, Any]:
    """The state of that rank of the new number. `load`: that of an old rank, in host memory; not changed.

    Raises StateUnsupported for what is neither an element's nor the same on all ranks: every old rank is read by some
    new one.
    """
    first = load(0)
    result = dict(first)
    fp32, base = (FP32_3, BASE_3) if new.stage == 3 else (FP32_12, BASE_12)
    flats = [torch.zeros(group.numel, dtype=was.dtype) for group, was in zip(new.groups, first[fp32], strict=True)]
    owners = _owners(first[base], len(new.groups))
    common = _common(first[base], old, owners)
    states = {
        key: {
            name: torch.zeros(new.groups[owners[key]].numel, dtype=value.dtype)
            if _is_split(value, old.groups[owners[key]])
            else value
            for name, value in of_key.items()
        }
        for key, of_key in first[base]["state"].items()
    }
    for source in needed_ranks(old, new, rank):
        saved = first if source == 0 else load(source)
        if not _is_same(_common(saved[base], old, owners), common):
            raise StateUnsupported(
                f"the optimizer of rank {source} has state that is not rank 0's and not that of elements: such a "
                "checkpoint is loaded on as many ranks as have saved it"
            )
        for index, flat in enumerate(flats):
            _take(flat, rank, new.groups[index], (saved[fp32][index], source, old.groups[index]))
        for key, of_key in saved[base]["state"].items():
            group = owners[key]
            for name, value in of_key.items():
                if _is_split(value, old.groups[group]):
                    _take(states[key][name], rank, new.groups[group], (value, source, old.groups[group]))
    result[base] = {**first[base], "state": states}
    result["partition_count"] = _counts(first.get("partition_count"), new.ranks)
    if new.stage == 3:
        result[fp32] = flats
        return result
    paddings = [_padding(group, rank) for group in new.groups]
    result["group_paddings"] = paddings
    result[fp32] = [flat[: flat.numel() - padding] for flat, padding in zip(flats, paddings, strict=True)]
    return result


def moved_frozen(
    numels: Mapping[str, int], ranks: tuple[int, int], rank: int, load: Callable[[int], Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """The parts of stage 3's frozen parameters that are that rank's when the second number of ranks has what the first
    has saved. `numels`: of each parameter; `load`: the parts of an old rank, in host memory.
    """
    old, new = (
        Layout(stage=3, ranks=count, groups=tuple(Group.even([numel], count) for numel in numels.values()))
        for count in ranks
    )
    parts: dict[str, torch.Tensor] = {}
    for source in needed_ranks(old, new, rank):
        saved = load(source)
        for name, was, now in zip(numels, old.groups, new.groups, strict=True):
            part = parts.setdefault(name, torch.zeros(now.numel, dtype=saved[name].dtype))
            _take(part, rank, now, (saved[name], source, was))
    return parts


def _owners(base: Mapping[str, Any], groups: int) -> dict[Any, int]:
    """Which flat tensor each key of the optimizer's state belongs to: they are numbered alike."""
    keys = [key for group in base["param_groups"] for key in group["params"]]
    if len(keys) != groups:
        raise StateUnsupported(f"an optimizer of {len(keys)} tensors over {groups} groups of parameters is not moved")
    return {key: index for index, key in enumerate(keys)}


def _common(base: Mapping[str, Any], old: Layout, owners: Mapping[Any, int]) -> dict[str, Any]:
    """What every rank has to have alike. Raises StateUnsupported for tensors that are divided in an unknown way."""
    if base["state"].keys() - owners.keys():
        raise StateUnsupported("an optimizer with state of its own beside its tensors' is not moved")
    state = {
        key: {
            name: "an element's" if _is_split(value, old.groups[owners[key]]) else value
            for name, value in of_key.items()
        }
        for key, of_key in base["state"].items()
    }
    for key, of_key in state.items():
        for name, value in of_key.items():
            if any(tensor.numel() > 1 for tensor in _tensors(value)):
                raise StateUnsupported(
                    f"the optimizer's {name!r} of group {owners[key]} is not of one value an element: such a "
                    "checkpoint is loaded on as many ranks as have saved it"
                )
    return {"state": state, "groups": base["param_groups"]}


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)


def _is_split(value: Any, group: Group) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == group.numel


def _take(target: torch.Tensor, rank: int, new: Group, saved: tuple[torch.Tensor, int, Group]) -> None:
    """Copies what of `saved`, an old rank's flat tensor, is the new rank's."""
    (source, old_rank, old), was_at, is_at = saved, 0, 0
    flat = source.flatten()
    for was, now in zip(old.splits, new.splits, strict=True):
        begin = max(old_rank * was.part, rank * now.part)
        end = min((old_rank + 1) * was.part, (rank + 1) * now.part, now.numel)
        if begin < end:
            first, to = was_at + begin - old_rank * was.part, is_at + begin - rank * now.part
            target[to : to + end - begin].copy_(flat[first : first + end - begin])
        was_at, is_at = was_at + was.part, is_at + now.part


def _padding(group: Group, rank: int) -> int:
    (split,) = group.splits
    return split.part - max(0, min((rank + 1) * split.part, split.numel) - rank * split.part)


def _counts(count: Any, ranks: int) -> Any:
    return [ranks] * len(count) if isinstance(count, list) else ranks


__all__ = [
    "Group", "Layout", "RankFile", "Split", "check_movable", "layout_of", "moved", "moved_frozen", "needed_ranks",
    "old_layout", "saved_ranks",
]  # fmt: skip
