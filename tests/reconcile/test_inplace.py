"""`restartStrategy: InPlace`: torchrun starts dead ranks anew inside living pods, in a fake world."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stepfast_operator.document import encode
from stepfast_operator.observed import Intent
from stepfast_operator.record import Cause, ConditionType, FailedReason, State

MakeWorld = Callable[..., Any]


@pytest.fixture
def world(make_world: MakeWorld) -> Any:
    return make_world(
        failurePolicy={"restartStrategy": "InPlace", "maxInPlaceRestarts": 2, "maxRestarts": 0},
        progressPolicy={"progressDeadlineSeconds": 60},
        startupDeadlineSeconds=100,
    )


def trained(world: Any, step: int, *, seconds: float = 10.0) -> None:
    world.advance(seconds)
    world.make_step(step)
    world.settle()


def test_dead_rank_is_no_failure_while_torchrun_may_start_it_anew(world: Any) -> None:
    world.start()
    trained(world, 10)
    world.die()
    world.advance(5)
    world.settle()
    assert (len(world.launches), world.status.last_failure) == (1, None)


def test_in_place_restart_is_recorded_with_its_cause_its_times_and_what_it_lost(world: Any) -> None:
    world.start()
    trained(world, 10)
    died = world.now
    world.die(rank=1)
    world.advance(3)
    world.rejoin(restored_step=7)
    world.settle()
    assert world.status.state is State.RUNNING
    trained(world, 8, seconds=1)
    shown = json.loads(json.dumps(encode(world.status)))["recoveries"]
    assert [(entry["attempt"], entry["inPlaceRestart"], entry["rank"], entry["counted"]) for entry in shown] == [
        (1, 1, 1, False)
    ]
    recovery = world.status.recoveries[0]
    assert (recovery.cause, recovery.failure_time, recovery.detected_time) == (Cause.RANK_FAILED, died, died + 3)
    assert recovery.node == "node-0"
    assert (recovery.step_before, recovery.resumed_from_step, recovery.steps_lost) == (10, 7, 3)
    assert (recovery.pods_ready_time, recovery.restored_time, recovery.resumed_time) == (died + 3, died + 3, died + 4)
    assert (recovery.restored_tier, recovery.duration_seconds) == ("Memory", 4)
    assert (world.status.attempt, world.status.restarts, world.status.steps_lost) == (1, 0, 3)
    assert world.status.trainer_status.global_step == 8


def test_rank_that_dies_when_no_in_place_restart_is_left_ends_the_attempt(world: Any) -> None:
    world.start(staged=10)
    for step in (11, 12):
        world.die()
        world.advance(1)
        world.rejoin(restored_step=10)
        world.settle()
        trained(world, step)
    assert [recovery.in_place_restart for recovery in world.status.recoveries] == [1, 2]
    assert not world.status.is_terminal
    world.die()
    world.relaunched()
    assert world.status.condition(ConditionType.FAILED).reason == FailedReason.MAX_RESTARTS_REACHED
    assert [recovery.in_place_restart for recovery in world.status.recoveries] == [1, 2], "what was survived is kept"


def test_pod_that_fails_ends_the_attempt_as_ever(world: Any) -> None:
    world.start()
    world.fail()
    world.relaunched()
    assert world.status.condition(ConditionType.FAILED).reason == FailedReason.MAX_RESTARTS_REACHED


def test_hang_is_looked_for_anew_after_an_in_place_restart(world: Any) -> None:
    world.start()
    trained(world, 10)
    world.advance(50)
    world.die()
    world.settle()
    world.advance(50)
    world.settle()
    world.rejoin(restored_step=10)
    world.settle()
    world.advance(50)
    world.settle()
    assert not world.status.is_terminal
    world.advance(11)
    world.relaunched()
    assert world.status.last_failure.reason is Cause.HANG_DETECTED


def test_ranks_that_nobody_starts_anew_count_as_hung(world: Any) -> None:
    world.start()
    trained(world, 10)
    world.die()
    world.advance(59)
    assert world.look().decision.requeue_seconds == pytest.approx(1)
    assert not world.status.is_terminal
    world.advance(1)
    world.relaunched()
    assert world.status.last_failure.reason is Cause.HANG_DETECTED


def test_start_deadline_counts_from_the_in_place_restart(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"restartStrategy": "InPlace"}, startupDeadlineSeconds=100)
    world.start()
    for step in range(10, 60, 10):
        trained(world, step, seconds=50)
    world.die()
    world.rejoin(restored_step=50)
    del world.gang.ranks[1]
    world.settle()
    assert world.status.state is State.RESTARTING
    assert world.status.condition(ConditionType.RESTARTING).reason == Cause.RANK_FAILED
    for _ in range(2):
        world.advance(45)
        world.settle()
    assert not world.status.is_terminal
    world.advance(11)
    world.settle()
    failed = world.status.condition(ConditionType.FAILED)
    assert (failed.reason, failed.message.partition(" within")[0]) == (
        FailedReason.STARTUP_DEADLINE_EXCEEDED,
        "only 1 of 2 ranks joined",
    )


def test_what_was_staged_before_an_in_place_restart_is_flushed_too(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"restartStrategy": "InPlace"})
    world.start(staged=10)
    world.die()
    world.rejoin(restored_step=10)
    world.settle()
    world.make_step(15)
    world.stage(15)
    world.settle()
    assert world.staged == {"uid-1": [10], "uid-1.1": [15]}
    world.fail()
    world.relaunched()
    assert not any(world.staged.values())
    assert world.launch_of(2).resume_step == 15


def test_ranks_that_were_started_anew_make_the_last_save(world: Any) -> None:
    world.start()
    trained(world, 10)
    world.die()
    world.rejoin(restored_step=10)
    trained(world, 11)
    world.intent = Intent.SUSPEND
    while not world.final:
        world.turn()
    assert world.final == {"uid-1.1": 11}
    world.persist("uid-1.1")
    world.settle()
    assert (world.status.state, list(world.steps)) == (State.SUSPENDED, [11])


def test_attempt_that_ends_before_its_ranks_restored_anew_lost_what_it_had(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"restartStrategy": "InPlace"})
    world.start()
    trained(world, 30)
    world.steps[20] = world.now
    world.settle()
    world.die()
    world.rejoin(restored_step=20)
    for rank, status in world.gang.ranks.items():
        world.gang.ranks[rank] = type(status)(
            rank=rank, pid=status.pid, alive=True, clean=False, joined_time=status.joined_time
        )
    world.settle()
    world.fail()
    world.relaunched()
    in_place, whole = world.status.recoveries
    assert (in_place.steps_lost, whole.step_before, whole.steps_lost) == (None, 30, 10)
    assert world.status.steps_lost == 10


def test_strategy_recreate_does_not_wait_for_torchrun(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"maxInPlaceRestarts": 3})
    world.start()
    world.die()
    world.relaunched()
    assert len(world.launches) == 2


def test_tries_to_grow_that_failed_are_remembered_after_an_in_place_restart(make_world: MakeWorld) -> None:
    world = make_world(
        trainer={"command": ["torchrun", "t.py"], "numNodes": 2},
        elasticPolicy={"maxNodes": 3},
        failurePolicy={"restartStrategy": "InPlace"},
    )
    world.start()
    trained(world, 10)
    world.status = replace(world.status, current=replace(world.status.current, shrinks=5, shrunk_from=3))
    world.die()
    world.rejoin(restored_step=10)
    trained(world, 11)
    assert (world.status.current.shrinks, world.status.current.shrunk_from) == (5, 3)
    world.fail()
    world.relaunched()
    assert (world.status.current.shrinks, world.status.current.shrunk_from) == (5, 3), "there was no place for more"
