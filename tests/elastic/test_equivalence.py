"""Whatever its shape, and however often that changes, a gang's training is a single process' training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch import nn

from gangs import run_gang
from stepfast.torch.elastic_pipeline import replica
from trainings import (
    Branching,
    First,
    Masked,
    Outcome,
    Pairs,
    Training,
    blocks,
    distance,
    train_alone,
    train_as_rank,
    train_to,
    turning,
)

TOLERANCE = 1e-12


def pairs() -> nn.ModuleList:
    return nn.ModuleList([*(Masked() for _ in range(5)), First()])


def check(training: Training, world_size: int) -> list[Outcome]:
    expected = train_alone(training)
    outcomes = run_gang(world_size, train_as_rank, training)
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(expected.losses, rel=0, abs=TOLERANCE)
        assert distance(outcome.weights, expected.weights) < TOLERANCE
        assert distance(outcome.moments, expected.moments) < TOLERANCE
    everything = expected.weights.keys()
    assert everything == {name for outcome in outcomes for name in outcome.weights}
    assert outcomes[0].shapes == outcomes[-1].shapes
    return outcomes


# A block has 174 parameters; with these bytes pipelines of 4, 2 and 1 devices have room for what is left.
ROOM = {"length": 8, "device_bytes": int(2.2 * 174 * 8), "micro_batches": 1}


def test_a_pipeline_of_eight_becomes_eight_replicas_and_a_pipeline_again() -> None:
    training = Training(
        model=blocks, steps=17, max_gradient_norm=0.5, changes={3: 4, 5: 6, 8: 7, 12: 0, 14: 7}, options=ROOM
    )
    shapes = check(training, 8)[0].shapes
    after = {step: shapes[step - 1] for step in (1, 3, 5, 8, 12, 14)}
    assert after == {1: (0, 8, 1), 3: (4, 4, 2), 5: (6, 2, 4), 8: (7, 1, 8), 12: (0, 8, 1), 14: (7, 1, 8)}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(blocks, {"length": 4, "schedule": "gpipe", "micro_batches": 1}, id="gpipe"),
        pytest.param(blocks, {"length": 4, "schedule": "1f1b"}, id="1f1b, micro-batches found by trying"),
        pytest.param(
            blocks, {"length": 2, "schedule": "interleaved", "stages_per_device": 2}, id="two replicas, interleaved"
        ),
        pytest.param(Branching, {"length": 2}, id="a traced model"),
        pytest.param(pairs, {"length": 2, "data": Pairs}, id="layers that take and give pairs"),
        pytest.param(turning, {"length": 4, "micro_batches": 1}, id="tensors that are not contiguous"),
        pytest.param(blocks, {"length": 4, "replicates": False, "micro_batches": 1}, id="no replicas: ranks rest"),
        pytest.param(blocks, {"length": 4, "packs": False, "micro_batches": 1}, id="no packing"),
        pytest.param(blocks, {"length": 1, "micro_batches": 1}, id="data parallelism alone"),
        pytest.param(
            blocks,
            {"length": 2, "shuffle": False, "drop_last": True, "workers": 2, "micro_batches": 1},
            id="samples in their own order, in whole batches, loaded ahead",
        ),
    ],
)
def test_every_kind_of_pipeline_trains_as_one_process(
    model: Callable[[], nn.Module], options: Mapping[str, Any]
) -> None:
    given = dict(options)
    data = {"data": given.pop("data")} if "data" in given else {}
    check(Training(model=model, steps=8, changes={2: 4, 4: 5, 7: 1}, options=given, **data), 4)


def test_a_batch_may_have_fewer_samples_than_there_are_replicas() -> None:
    training = Training(model=blocks, batch_size=2, steps=8, changes={3: 7}, options={"length": 4})
    assert check(training, 4)[0].shapes[3] == (7, 1, 4)


def micro_batches_of_a_gang_that_rests() -> int | None:
    training = Training(model=blocks, options={"length": 4, "replicates": False})
    network, optimizer, scheduler = training.make()
    pipeline = training.pipeline(network, optimizer)
    pipeline.take(pipeline.shape_for(6))
    train_to(pipeline, scheduler, training, 1)
    assert (pipeline.shape.length, pipeline.shape.replicas) == (2, 1)
    return pipeline.micro_batches


def test_micro_batches_are_tried_where_ranks_rest() -> None:
    found = run_gang(4, micro_batches_of_a_gang_that_rests)
    assert found[0] in (2, 4, 8, 16)
    assert found == [found[0]] * 4


class OldSchedule:
    """As torch's was: it takes a whole batch."""

    def step(self, *args: Any, target: Any = None, losses: Any = None, **kwargs: Any) -> None: ...


def with_an_old_torch() -> str:
    replica.ScheduleGPipe = OldSchedule  # type: ignore[misc] # this process ends with the test
    with pytest.raises(RuntimeError) as raised:
        train_as_rank(Training(model=blocks, options={"length": 2}))
    return str(raised.value)


def test_a_torch_that_is_too_old_is_said() -> None:
    assert all("needs a newer one" in text for text in run_gang(2, with_an_old_torch))
