"""The job's life in a fake world, one behaviour a test."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stepfast_operator.actions import LaunchGang, StartAgent, StopGang, StopMode
from stepfast_operator.backends.fake import FakeGang
from stepfast_operator.document import decode, encode
from stepfast_operator.observed import AgentState, DeadRank, Failure, Observed, WorkerPhase
from stepfast_operator.policies import restart
from stepfast_operator.record import Cause, ConditionType, FailedReason, State, Status

MakeWorld = Callable[..., Any]


def test_first_attempt_starts_the_agent_then_the_gang_from_scratch(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    assert world.agent is AgentState.READY
    assert [(launch.attempt, launch.run, launch.resume_step) for launch in world.launches] == [(1, "uid-1", 0)]


def test_resume_step_is_written_before_the_gang_is_launched(make_world: MakeWorld) -> None:
    world = make_world()
    world.steps = {40: 1.0}
    while not world.launches:
        written = world.saved
        world.turn()
    assert written.current.resume_step == 40
    assert world.launches[0].resume_step == 40


def test_failed_gang_resumes_from_last_committed_step(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.make_step(25)
    world.steps[20] = world.now
    world.settle()
    world.fail(rank=1, exit_code=137)
    world.relaunched()
    assert world.launch_of(2).resume_step == 20
    assert world.status.recoveries[0].steps_lost == 5
    assert world.status.last_failure.exit_code == 137
    assert world.status.restarts_count_towards_max == 1


def test_dead_agent_is_started_without_touching_the_gang(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.agent = AgentState.GONE
    seen = world.look()
    assert any(isinstance(action, StartAgent) for action in seen.decision.actions)
    world.settle()
    assert world.status.state == State.RUNNING
    assert len(world.launches) == 1


def test_rank_that_the_agent_saw_die_ends_the_attempt_when_nobody_tells_its_exit_code(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.start()
    dead = DeadRank(rank=1, node="node-0", ended_time=world.now, run="uid-1")
    observe = world.observe

    async def with_dead(status: Status) -> Observed:
        observed: Observed = await observe(status)
        return replace(observed, dead_ranks=[dead] if len(world.launches) == 1 else [])

    world.observe = with_dead
    world.relaunched()
    recovery = world.status.recoveries[0]
    assert (recovery.rank, recovery.failure_time) == (1, dead.ended_time)
    assert recovery.detected_time - recovery.failure_time >= 2


@pytest.mark.parametrize(
    ("limits", "reason", "attempts"),
    [
        pytest.param(
            {"maxRestarts": 2, "maxRestartsWithoutProgress": 9},
            FailedReason.MAX_RESTARTS_REACHED,
            3,
            id="max",
        ),
        pytest.param(
            {"maxRestarts": 9, "maxRestartsWithoutProgress": 2}, FailedReason.NO_PROGRESS, 3, id="no-progress"
        ),
        pytest.param({"maxRestarts": 0}, FailedReason.MAX_RESTARTS_REACHED, 1, id="none-allowed"),
    ],
)
def test_budget_ends_a_crash_loop(
    make_world: MakeWorld, limits: dict[str, int], reason: FailedReason, attempts: int
) -> None:
    world = make_world(failurePolicy=limits)
    world.start()
    while not world.status.is_terminal:
        world.fail()
        world.relaunched()
    assert world.status.state == State.FAILED
    assert world.status.condition(ConditionType.FAILED).reason == reason
    assert len(world.launches) == attempts


def test_progress_starts_the_count_of_restarts_without_it_again(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"maxRestartsWithoutProgress": 1})
    world.start()
    for step in range(1, 6):
        world.fail()
        world.relaunched()
        world.join()
        world.make_step(step)
        world.stage(step)
        world.settle()
    assert not world.status.is_terminal
    assert world.status.restarts == 5


@pytest.mark.parametrize(
    ("action", "state", "counted"),
    [
        pytest.param("FailJob", State.FAILED, 0, id="fail-job"),
        pytest.param("RestartJob", State.STARTING, 1, id="restart-job"),
        pytest.param("RestartJobAndIgnoreMaxRestarts", State.STARTING, 0, id="ignore-max-restarts"),
    ],
)
def test_failure_rule_decides_by_exit_code(make_world: MakeWorld, action: str, state: State, counted: int) -> None:
    rule = {"name": "bad config", "action": action, "onExitCodes": {"operator": "In", "values": [3]}}
    world = make_world(failurePolicy={"rules": [rule]})
    world.start()
    world.fail(exit_code=3)
    world.relaunched()
    assert world.status.state is state
    assert world.status.restarts_count_towards_max == counted
    assert world.status.last_failure.rule == "bad config"


def test_backoff_doubles_only_without_progress(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"maxRestartsWithoutProgress": 9, "backoff": {"baseSeconds": 4, "maxSeconds": 10}})
    world.start()
    waits = []
    for _ in range(4):
        world.fail()
        failed = world.now
        world.relaunched()
        waits.append(world.now - failed)
    assert waits == pytest.approx([4, 8, 10, 10], abs=0.5)
    world.join()
    world.make_step(7)
    world.stage(7)
    world.fail()
    failed = world.now
    world.relaunched()
    assert world.now - failed < 1


def test_one_worker_that_succeeded_does_not_end_the_others(make_world: MakeWorld) -> None:
    world = make_world(trainer={"command": ["torchrun", "t.py"], "numNodes": 2})
    world.start()
    world.gang.phases[1] = WorkerPhase.SUCCEEDED
    world.settle()
    assert world.status.state == State.RUNNING
    assert world.status.nodes.succeeded == 1


def test_restarted_supervisor_ends_the_old_gang_and_does_not_count_it(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"maxRestarts": 0, "maxRestartsWithoutProgress": 0})
    world.start(staged=4)
    world.lose_supervisor()
    world.status = decode(Status, json.loads(json.dumps(encode(world.status))), "status")
    assert world.gangs["uid-1"].lives
    world.relaunched()
    assert not world.gangs["uid-1"].lives
    assert world.launch_of(2).resume_step == 4
    assert (world.status.restarts, world.status.restarts_count_towards_max) == (1, 0)
    assert world.status.recoveries[0].cause is Cause.SUPERVISOR_RESTARTED


def test_nothing_is_launched_while_a_process_of_any_run_lives(make_world: MakeWorld) -> None:
    world = make_world()
    world.gangs["uid-9"] = FakeGang(run="uid-9", launched_time=0.0, phases={0: WorkerPhase.RUNNING})
    seen = world.look()
    assert seen.decision.actions[0] == StopGang(runs=("uid-9",), mode=StopMode.KILL)
    assert not any(isinstance(action, LaunchGang) for action in seen.decision.actions)


def test_storage_that_never_answers_fails_the_job_at_the_start_deadline(make_world: MakeWorld) -> None:
    world = make_world(startupDeadlineSeconds=60)
    world.is_storage_down = True
    for _ in range(100):
        world.turn()
    assert world.status.condition(ConditionType.FAILED).reason == FailedReason.CHECKPOINT_UNAVAILABLE
    assert world.launches == []


def test_recovery_keeps_the_times_of_its_phases(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.make_step(8)
    world.stage(6)
    world.settle()
    world.fail()
    failed = world.now
    world.advance(0.5)
    world.relaunched()
    world.advance(3)
    world.join()
    world.look()
    world.advance(2)
    world.make_step(7)
    world.settle()
    recovery = world.status.recoveries[0]
    assert recovery.failure_time == failed
    assert recovery.detected_time == failed + 0.5
    assert recovery.flushed_time >= recovery.detected_time
    assert recovery.pods_ready_time == recovery.restored_time > recovery.launched_time
    assert recovery.resumed_time == recovery.restored_time + 2
    assert (recovery.step_before, recovery.resumed_from_step, recovery.steps_lost) == (8, 6, 2)
    assert recovery.duration_seconds == pytest.approx(recovery.resumed_time - failed)
    assert 0 <= (world.status.goodput_ratio or 0) <= 1


@pytest.mark.parametrize("is_told", [True, False], ids=["its-pod-tells", "its-pod-stays-silent"])
def test_cause_is_what_the_first_rank_died_of_though_the_pod_of_another_tells_first(
    make_world: MakeWorld, is_told: bool
) -> None:
    world = make_world(trainer={"command": ["torchrun", "train.py"], "numNodes": 2})
    world.start(staged=10)
    died = world.now
    first = DeadRank(rank=1, node="node-1", ended_time=died, run="uid-1")
    observe = world.observe

    async def with_untold(status: Status) -> Observed:
        return replace(await observe(status), untold_ranks=[first])

    world.observe = with_untold
    world.advance(0.2)
    world.fail(rank=0)
    world.turn()
    assert world.status.last_failure is None
    if is_told:
        world.gang.phases[1] = WorkerPhase.FAILED
        world.gang.failures[1] = Failure(cause=Cause.OOM_KILLED, time=died, node="node-1", rank=1, exit_code=137)
    while world.status.last_failure is None:
        world.turn()
    failure = world.status.last_failure
    assert (failure.reason, failure.rank) == ((Cause.OOM_KILLED, 1) if is_told else (Cause.RANK_FAILED, 0))
    assert world.now - died <= restart.UNTOLD_SECONDS + 0.1
