"""Optimizer states moved from one number of ranks to another: what the other would have saved, by a plain reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepfast.errors import CheckpointMismatch, StateUnsupported
from stepfast.integrations.deepspeedranks import (
    Group,
    Layout,
    RankFile,
    Split,
    check_movable,
    moved,
    moved_frozen,
    needed_ranks,
    old_layout,
    saved_ranks,
)  # fmt: skip

ALIGNMENT = 2


def parts(tensor: torch.Tensor, count: int, multiple: int) -> list[torch.Tensor]:
    """The tensor filled up to a multiple, in equal parts."""
    size = -(-tensor.numel() // multiple) * multiple
    return list(torch.cat([tensor, torch.zeros(size - tensor.numel())]).chunk(count)) if size else [tensor] * count


def saved_12(groups: Sequence[torch.Tensor], ranks: int) -> list[dict[str, Any]]:
    """What each rank of that number saves with ZeRO 1 or 2."""
    split = [parts(group, ranks, ALIGNMENT * ranks) for group in groups]
    states = []
    for rank in range(ranks):
        own = [of_group[rank] for of_group in split]
        paddings = [
            part.numel() - max(0, min(group.numel() - rank * part.numel(), part.numel()))
            for group, part in zip(groups, own, strict=True)
        ]
        states.append({
            "single_partition_of_fp32_groups": [
                part[: part.numel() - padding] for part, padding in zip(own, paddings, strict=True)
            ],
            "group_paddings": paddings, "partition_count": [ranks] * len(groups), "overflow": False,
            "base_optimizer_state": {
                "state": {i: {"exp_avg": -part, "step": torch.tensor(7.0)} for i, part in enumerate(own)},
                "param_groups": [{"params": [i]} for i in range(len(groups))],
            },
        })  # fmt: skip
    return states


def saved_3(groups: Sequence[Sequence[torch.Tensor]], ranks: int) -> list[dict[str, Any]]:
    """With ZeRO 3: each parameter by itself."""
    states = []
    for rank in range(ranks):
        flats = [torch.cat([parts(tensor, ranks, ranks)[rank] for tensor in group]) for group in groups]
        states.append({
            "fp32_flat_groups": flats, "partition_count": ranks,
            "optimizer_state_dict": {
                "state": {i: {"exp_avg": -flat, "step": 7} for i, flat in enumerate(flats)},
                "param_groups": [{"params": list(range(len(groups)))}],
            },
        })  # fmt: skip
    return states


def layout_12(groups: Sequence[torch.Tensor], ranks: int) -> Layout:
    splits = [Split(group.numel(), parts(group, ranks, ALIGNMENT * ranks)[0].numel()) for group in groups]
    return Layout(stage=2, ranks=ranks, groups=tuple(Group((split,)) for split in splits))


def layout_3(groups: Sequence[Sequence[torch.Tensor]], ranks: int) -> Layout:
    evens = [Group.even([tensor.numel() for tensor in group], ranks) for group in groups]
    return Layout(stage=3, ranks=ranks, groups=tuple(evens))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.equal(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


counts = st.integers(1, 7)
numels = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@given(sizes=numels, before=counts, after=counts)
def test_groups_of_stages_one_and_two_move(sizes: list[int], before: int, after: int) -> None:
    groups = [torch.rand(size) + index for index, size in enumerate(sizes)]
    saved, new = saved_12(groups, before), layout_12(groups, after)
    old = old_layout(new, before, saved[0])
    for rank, expected in enumerate(saved_12(groups, after)):
        assert same(moved(old, new, rank, saved.__getitem__), expected)


@given(sizes=st.lists(numels, min_size=1, max_size=3), before=counts, after=counts)
def test_parameters_of_stage_three_move(sizes: list[list[int]], before: int, after: int) -> None:
    groups = [[torch.rand(size) for size in of_group] for of_group in sizes]
    saved, new = saved_3(groups, before), layout_3(groups, after)
    old = old_layout(new, before, saved[0])
    for rank, expected in enumerate(saved_3(groups, after)):
        assert same(moved(old, new, rank, saved.__getitem__), expected)


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4), before=counts, after=counts)
def test_frozen_parameters_of_stage_three_move(sizes: list[int], before: int, after: int) -> None:
    frozen = {f"frozen{index}": torch.rand(size) for index, size in enumerate(sizes)}

    def saved(ranks: int, rank: int) -> dict[str, torch.Tensor]:
        return {name: parts(tensor, ranks, ranks)[rank] for name, tensor in frozen.items()}

    numels = {name: tensor.numel() for name, tensor in frozen.items()}
    for rank in range(after):
        found = moved_frozen(numels, (before, after), rank, lambda old: saved(before, old))
        assert same(found, saved(after, rank))


def test_no_more_is_read_than_overlaps() -> None:
    tensor = torch.rand(800)
    old, new = layout_12([tensor], 8), layout_12([tensor], 4)
    assert [needed_ranks(old, new, rank) for rank in range(4)] == [[0, 1], [0, 2, 3], [0, 4, 5], [0, 6, 7]]


def test_what_is_not_this_models_is_said() -> None:
    groups = [[torch.rand(10)]]
    with pytest.raises(CheckpointMismatch, match="sub_group_size"):
        old_layout(layout_3([[torch.rand(20)]], 2), 3, saved_3(groups, 3)[0])
    with pytest.raises(CheckpointMismatch, match="not those of this model"):
        old_layout(layout_12([torch.rand(90)], 2), 3, saved_12([torch.rand(10)], 3)[0])
    elastic = {**saved_12([torch.rand(10)], 2)[0], "base_optimizer_state": []}
    with pytest.raises(StateUnsupported, match="elastic_checkpoint"):
        old_layout(layout_12([torch.rand(10)], 3), 2, elastic)


def test_what_is_divided_in_other_ways_too_is_refused() -> None:
    check_movable(["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"])
    for name in (
        "mp_rank_01_model_states.pt",
        "zero_pp_rank_0_mp_rank_10_optim_states.pt",
        "layer_00-model_states.pt",
        "layer_0_expert_3_mp_rank_00_model_states.pt",
    ):
        with pytest.raises(StateUnsupported, match="as many ranks"):
            check_movable([name])


def test_names_say_how_many_ranks_there_were() -> None:
    names = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(11)]
    assert saved_ranks([*names, "mp_rank_00_model_states.pt", "stepfast.rng"]) == 11
    assert saved_ranks(["mp_rank_00_model_states.pt"]) == 0
    parsed = RankFile.parse(names[10])
    assert parsed is not None
    assert (parsed.rank, parsed.of(3)) == (10, names[3])


@pytest.mark.parametrize(
    ("own", "group"),
    [
        pytest.param({"absmax1": torch.tensor([1.0, 2.0])}, {}, id="scales of blocks"),
        pytest.param({"norm": torch.tensor(5.0)}, {}, id="a number of each rank"),
        pytest.param({"pieces": [torch.ones(3)]}, {}, id="a list of tensors"),
        pytest.param({}, {"d": 0.5}, id="a number of the group"),
    ],
)
def test_state_that_is_neither_of_elements_nor_alike_is_refused(own: dict[str, Any], group: dict[str, Any]) -> None:
    """8-bit Adam, NovoGrad, Prodigy: rank 0's is not everybody's."""

    def state(rank: int) -> dict[str, Any]:
        def of_rank(values: dict[str, Any]) -> dict[str, Any]:
            return {name: value if isinstance(value, list) else value + rank for name, value in values.items()}

        return {
            "single_partition_of_fp32_groups": [torch.arange(512.0) + 512 * rank],
            "group_paddings": [0], "partition_count": [2],
            "base_optimizer_state": {
                "state": {0: {"state1": torch.full((512,), 10 + rank, dtype=torch.uint8), **of_rank(own)}},
                "param_groups": [{"params": [0], **of_rank(group)}],
            },
        }  # fmt: skip

    new = Layout(stage=2, ranks=4, groups=(Group((Split(1024, 256),)),))
    with pytest.raises(StateUnsupported, match="as many ranks"):
        moved(old_layout(new, 2, state(0)), new, 3, state)
