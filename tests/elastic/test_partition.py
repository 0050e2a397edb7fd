"""Which layers a stage holds, how short a pipeline becomes, and what moves between shapes."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfast.torch.elastic_pipeline.partition import FROZEN_COST, balance, shortest_length
from stepfast.torch.elastic_pipeline.shape import Shape, moves
from stepfast.torch.order import SampleOrder, shares

SIZES = st.lists(st.integers(0, 50), min_size=1, max_size=9)


def cheapest(sizes: list[int], stages: int, frozen: int) -> float:
    """The dearest stage's cost in the best of all divisions."""
    costs = [float(size) for size in sizes[frozen:]]
    costs[0] += FROZEN_COST * sum(sizes[:frozen])
    return min(
        max(sum(costs[begin:end]) for begin, end in pairwise([0, *cuts, len(costs)]))
        for cuts in combinations(range(1, len(costs)), stages - 1)
    )


@given(SIZES, st.data())
def test_no_division_has_a_cheaper_dearest_stage(sizes: list[int], data: st.DataObject) -> None:
    frozen = data.draw(st.integers(0, len(sizes) - 1))
    stages = data.draw(st.integers(1, len(sizes) - frozen))
    found = balance(sizes, stages, frozen=frozen)
    assert found.largest_cost == pytest.approx(cheapest(sizes, stages, frozen))
    assert [layer for stage in found.stages for layer in stage] == list(range(frozen, len(sizes)))
    assert len(found.stages) == stages
    assert all(found.stages)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="2 active layers cannot fill 3 stages"):
        balance([1, 1, 1], 3, frozen=1)


@pytest.mark.parametrize(
    ("frozen", "limit", "expected"),
    [
        pytest.param(0, 1.0, 8, id="full"),
        pytest.param(4, 1.7, 4, id="half of it"),
        pytest.param(6, 2.2, 2, id="a quarter"),
        pytest.param(7, 2.2, 1, id="one device"),
        pytest.param(4, 1.0, 4, id="fewer layers than devices: it must"),
        pytest.param(4, 100.0, 1, id="room for all"),
    ],
)
def test_a_pipeline_is_halved_while_there_is_room(frozen: int, limit: float, expected: int) -> None:
    assert shortest_length([1] * 8, 8, frozen=frozen, limit=limit) == expected


def test_an_odd_length_is_divided_by_its_smallest_prime() -> None:
    assert shortest_length([1] * 18, 9, frozen=12, limit=4.5) == 3


@st.composite
def shapes(draw: st.DrawFn, layers: int = 9) -> Shape:
    world_size = 8
    length = draw(st.sampled_from([1, 2, 4, 8]))
    frozen = draw(st.integers(0, layers - length))
    most = world_size // length
    replicas = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= most]))
    sizes = draw(st.lists(st.integers(1, 9), min_size=layers, max_size=layers))
    per_device = draw(st.integers(1, (layers - frozen) // length))
    stages = balance(sizes, length * per_device, frozen=frozen).stages
    return Shape(world_size=world_size, replicas=replicas, frozen=frozen, length=length, stages=stages)


@given(shapes())
def test_every_replica_holds_every_layer_once(shape: Shape) -> None:
    for replica in range(shape.replicas):
        held = [layer for rank in shape.ranks_of_replica(replica) for layer in shape.held_by(rank)]
        assert sorted(held) == list(range(shape.layers))
    ranks = [rank for replica in range(shape.replicas) for rank in shape.ranks_of_replica(replica)]
    assert len(set(ranks)) == len(ranks)
    assert {rank for rank in range(shape.world_size) if shape.place(rank) is not None} == set(ranks)
    for layer in range(shape.layers):
        assert all(layer in shape.held_by(rank) for rank in shape.ranks_of_device(shape.device_of(layer)))
    assert Shape.from_document(shape.to_document()) == shape


@given(shapes(), shapes())
def test_what_moves_is_what_is_missing(before: Shape, after: Shape) -> None:
    for has, wants in ((before.held_by, after.held_by), (before.optimized_by, after.optimized_by)):
        arrived = {rank: set(has(rank)) for rank in range(8)}
        travels = moves(before, has, after, wants)
        for move in travels:
            assert move.layer in has(move.source)
            assert move.layer not in arrived[move.target]
            arrived[move.target].add(move.layer)
        assert all(set(wants(rank)) <= arrived[rank] for rank in range(8))
        assert all(move.layer in wants(move.target) for move in travels)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 5), st.booleans(), st.integers(1, 6))
def test_an_epoch_has_every_sample_once_however_many_replicas_there_are(
    samples: int, batch_size: int, seed: int, shuffle: bool, most: int
) -> None:
    order = SampleOrder(samples=samples, batch_size=batch_size, seed=seed, shuffle=shuffle)
    for epoch in range(2):
        everything = order.epoch(epoch)
        seen = []
        for step in range(order.steps_per_epoch):
            batch = order.batch(everything, step).tolist()
            replicas = 1 + step % most  # they change meanwhile
            for share in shares(len(batch), replicas):
                seen += [batch[position] for position in share]
        assert sorted(seen) == list(range(samples))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [
        tuple(SampleOrder(samples=20, batch_size=5, seed=seed).epoch(epoch).tolist())
        for seed in range(3)
        for epoch in range(3)
    ]
    assert len(set(orders)) == len(orders)
