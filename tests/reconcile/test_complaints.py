"""What users of other training operators complain about, as tests of ours. Each names the issues that tell of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from stepfast_operator.document import decode, encode
from stepfast_operator.observed import Intent, WorkerPhase
from stepfast_operator.record import Cause, ConditionType, FailedReason, State, Status

MakeWorld = Callable[..., Any]
THREE = {"command": ["torchrun", "t.py"], "numNodes": 3}


def restart_operator(world: Any) -> None:
    world.status = decode(Status, json.loads(json.dumps(encode(world.status))), "status")


def test_one_pod_that_dies_restarts_the_whole_gang(make_world: MakeWorld) -> None:
    """The others never rejoin, or hang in the rendezvous: kubeflow/trainer 2269, 2000, 2300."""
    world = make_world(trainer=THREE)
    world.start(staged=10)
    world.gang.phases[1] = WorkerPhase.FAILED
    assert world.gang.phases[2] is WorkerPhase.RUNNING
    world.relaunched()
    assert not world.gangs["uid-1"].lives
    assert (world.launch_of(2).resume_step, len(world.gang.phases)) == (10, 3)


@pytest.mark.parametrize("limit", [0, 1, 4])
def test_limit_counts_restarts_of_the_gang_and_not_of_its_pods(make_world: MakeWorld, limit: int) -> None:
    """kubeflow/trainer 1589, 2342; pytorch-operator 270 (backoffLimit must be (1 + n) * k)."""
    world = make_world(trainer=THREE, failurePolicy={"maxRestarts": limit, "maxRestartsWithoutProgress": 9})
    world.start()
    while not world.status.is_terminal:
        world.gang.phases = dict.fromkeys(world.gang.phases, WorkerPhase.FAILED)
        world.relaunched()
        restart_operator(world)
    assert len(world.launches) == 1 + limit
    assert world.status.condition(ConditionType.FAILED).reason == FailedReason.MAX_RESTARTS_REACHED


def test_preempted_pod_neither_fails_the_job_nor_is_counted(make_world: MakeWorld) -> None:
    """kubeflow/trainer 999, 1570; ray 50640; mpi-operator 647."""
    world = make_world(trainer=THREE, failurePolicy={"maxRestarts": 0})
    world.start(staged=10)
    world.take_away(Cause.POD_EVICTED, node=2)
    world.relaunched()
    assert (world.status.state, world.status.restarts_count_towards_max) == (State.STARTING, 0)


def test_each_kind_of_restart_has_a_counter_of_its_own(make_world: MakeWorld) -> None:
    """jobset 976, 1129."""
    world = make_world(failurePolicy={"maxRestarts": 1})
    world.start(staged=1)
    for step, act in enumerate((world.fail, lambda: world.take_away(Cause.POD_DELETED)), 2):
        act()
        world.relaunched()
        world.join()
        world.settle()
        world.make_step(step)
        world.stage(step)
        world.settle()
    assert (world.status.restarts, world.status.restarts_count_towards_max) == (2, 1)
    assert [recovery.counted for recovery in world.status.recoveries] == [True, False]


def test_pod_that_is_being_deleted_ends_the_attempt_before_it_is_gone(make_world: MakeWorld) -> None:
    """A pod that takes its grace period to end delays the restart by it: jobset 574, 576."""
    world = make_world()
    world.start(staged=10)
    world.take_away(Cause.POD_DELETED)
    assert world.gang.phases[0] is WorkerPhase.RUNNING
    began = world.now
    world.relaunched()
    assert len(world.launches) == 2
    assert world.now - began < 1


def test_hang_is_not_found_again_in_the_attempt_after_it(make_world: MakeWorld) -> None:
    """The detector remembers the old attempt and kills the new one again and again: dlrover 1727, 1749."""
    world = make_world(progressPolicy={"progressDeadlineSeconds": 600})
    world.start(staged=10)
    world.settle()
    world.advance(601)
    world.relaunched()
    assert world.status.last_failure.reason is Cause.HANG_DETECTED
    world.advance(590)  # pulling the image, importing, restoring
    world.look()
    world.join()
    for _ in range(3):
        world.advance(550)
        world.look()
        restart_operator(world)
        world.make_step(world.status.current.start_step + len(world.passes))
    assert len(world.launches) == 2


def test_job_that_failed_is_not_run_again_when_its_pods_are_deleted(make_world: MakeWorld) -> None:
    """A child that is gone is made anew and the counters begin again, for ever: kubeflow/trainer 3737, 3779."""
    world = make_world(failurePolicy={"maxRestarts": 0})
    world.start()
    world.fail()
    world.settle()
    restart_operator(world)
    before = world.status
    world.gangs.clear()
    for _ in range(3):
        world.advance(3600)
        restart_operator(world)
        world.settle()
    assert len(world.launches) == 1
    assert world.status == before


def test_job_that_is_over_is_deleted_when_asked_for(make_world: MakeWorld) -> None:
    """kubeflow/trainer 4052, 2899."""
    world = make_world(ttlSecondsAfterFinished=0)
    world.start()
    world.succeed()
    world.settle()
    assert world.is_deleted


def test_state_is_told_at_every_moment_and_right_after_a_resume(make_world: MakeWorld) -> None:
    """No Running, no Pending, wrong after a resume, undefined: kubeflow/trainer 2713, 3666, 1711; sdk 803."""
    world = make_world()
    world.status = Status()
    world.start(staged=5)
    world.intent = Intent.SUSPEND
    while not world.final:
        world.turn()
    world.persist("uid-1")
    world.settle()
    world.intent = Intent.RUN
    world.relaunched()
    world.join()
    world.settle()
    world.fail()
    world.relaunched()
    world.join()
    world.settle()
    world.succeed()
    world.settle()
    states = [str(seen.after.state) for seen in world.passes]
    assert [state for index, state in enumerate(states) if states[index - 1] != state or index == 0] == [
        "Starting",
        "Running",
        "Suspending",
        "Suspended",
        "Pending",
        "Starting",
        "Running",
        "Restarting",
        "Starting",
        "Running",
        "Complete",
    ]
