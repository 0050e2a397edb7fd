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
from stepfast_operator.local.session import exit_code_of
from stepfast_operator.observed import AgentState, DeadRank, Intent, Observed, WorkerPhase
from stepfast_operator.record import Cause, ConditionType, FailedReason, State, Status
from stepfast_operator.spec import ResumePolicy

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
        world.advance(world.look().decision.requeue_seconds or 0.0)
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


def test_staged_steps_of_the_failed_run_are_flushed_before_the_resume_step_is_fixed(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.start()
    world.make_step(30)
    world.stage(30)
    world.fail()
    world.relaunched()
    assert world.launch_of(2).resume_step == 30
    assert world.status.recoveries[0].steps_lost == 0


def test_step_whose_part_is_written_is_waited_for_until_it_is_committed(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.make_step(30)
    world.stage(30)
    world.is_commit_held = True
    world.fail()
    for _ in range(20):
        world.advance(world.look().decision.requeue_seconds or 0.0)
    assert world.parted == {"uid-1": [30]}
    assert len(world.launches) == 1, "the next attempt did not wait for the manifest"
    world.is_commit_held = False
    world.relaunched()
    assert world.launch_of(2).resume_step == 30
    assert not world.status.recoveries[0].steps_lost


def test_flush_is_bounded_when_the_storage_does_not_take_it(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"flushTimeoutSeconds": 5})
    world.start()
    world.make_step(30)
    world.steps[10] = world.now
    world.stage(30)
    world.is_storage_down = True
    world.fail()
    began = world.now
    while world.status.current.flushed_time is None:
        world.advance(world.look().decision.requeue_seconds or 0.0)
    assert 5 <= world.status.current.flushed_time - began < 6
    assert world.status.current.flush_timed_out
    world.is_storage_down = False
    world.relaunched()
    assert world.launch_of(2).resume_step == 10


def test_agent_killed_with_the_gang_is_started_and_flushed_before_the_next_attempt(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.start()
    world.make_step(30)
    world.stage(30)
    world.agent = AgentState.GONE
    world.fail()
    world.relaunched()
    assert world.launch_of(2).resume_step == 30


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
    dead = DeadRank(rank=1, node="node-0", ended_time=world.now)
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


def test_success_is_flushed_and_terminal(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.make_step(9)
    world.stage(9)
    world.succeed()
    world.settle()
    assert world.status.state == State.COMPLETE
    assert list(world.steps) == [9]
    launches = len(world.launches)
    world.advance(1000)
    world.settle()
    assert world.status.state == State.COMPLETE
    assert len(world.launches) == launches


def test_success_whose_last_step_the_storage_does_not_take_is_no_success(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"flushTimeoutSeconds": 5})
    world.start()
    world.make_step(10)
    world.stage(10)
    world.is_storage_down = True
    world.succeed()
    began = world.now
    world.relaunched()
    failed = world.status.condition(ConditionType.FAILED)
    assert failed.reason == FailedReason.CHECKPOINT_UNAVAILABLE
    assert "step 10 " in failed.message
    assert "same command" in failed.message
    assert 5 <= world.now - began < 6
    assert exit_code_of(world.status) == 1


def test_rank_that_succeeded_without_a_goodbye_has_not_failed_while_its_steps_are_flushed(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.start()
    world.make_step(10)
    world.stage(10)
    world.is_commit_held = True
    world.succeed()
    dead = DeadRank(rank=1, node="node-0", ended_time=world.now)
    observe = world.observe

    async def with_dead(status: Status) -> Observed:
        return replace(await observe(status), dead_ranks=[dead])

    world.observe = with_dead
    for _ in range(20):
        world.advance(world.look().decision.requeue_seconds or 0.0)
    world.is_commit_held = False
    world.relaunched()
    assert (world.status.state, world.status.attempt) == (State.COMPLETE, 1)


def test_success_is_not_trusted_while_no_agent_can_say_what_is_left(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"flushTimeoutSeconds": 5})
    world.start()
    world.make_step(10)
    world.stage(10)
    world.settle()
    world.succeed()
    for _ in range(100):
        world.agent = AgentState.STARTING
        world.advance(world.look().decision.requeue_seconds or 0.0)
    assert world.status.condition(ConditionType.FAILED).reason == FailedReason.CHECKPOINT_UNAVAILABLE


def test_success_of_a_script_that_saved_nothing_needs_no_agent(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"flushTimeoutSeconds": 5})
    world.start()
    world.succeed()
    for _ in range(100):
        world.agent = AgentState.STARTING
        world.advance(world.look().decision.requeue_seconds or 0.0)
    assert world.status.state is State.COMPLETE


def test_flush_is_asked_for_once_even_without_time_for_it(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"flushTimeoutSeconds": 0})
    world.start()
    world.make_step(10)
    world.stage(10)
    world.succeed()
    world.relaunched()
    assert (world.status.state, list(world.steps)) == (State.COMPLETE, [10])


def test_agent_that_was_replaced_during_the_flush_is_asked_again(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.make_step(30)
    world.stage(30)
    world.is_storage_down = True
    world.fail()
    while world.status.current.flush_asked_time is None:
        world.advance(world.look().decision.requeue_seconds or 0.0)
    world.agent = AgentState.GONE
    # To the one after it the step is not due yet: nothing seems to be pending.
    world.staged_not_due, world.staged = world.staged, {}
    world.is_storage_down = False
    world.relaunched()
    assert world.launch_of(2).resume_step == 30


def test_one_worker_that_succeeded_does_not_end_the_others(make_world: MakeWorld) -> None:
    world = make_world(trainer={"command": ["torchrun", "t.py"], "numNodes": 2})
    world.start()
    world.gang.phases[1] = WorkerPhase.SUCCEEDED
    world.settle()
    assert world.status.state == State.RUNNING
    assert world.status.nodes.succeeded == 1


def test_restarted_supervisor_ends_the_old_gang_and_does_not_count_it(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"maxRestarts": 0, "maxRestartsWithoutProgress": 0})
    world.start()
    world.make_step(4)
    world.stage(4)
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
        world.advance(world.look().decision.requeue_seconds or 0.0)
    assert world.status.condition(ConditionType.FAILED).reason == FailedReason.CHECKPOINT_UNAVAILABLE
    assert world.launches == []


@pytest.mark.parametrize(
    ("checkpoint", "resume_step", "left"),
    [
        pytest.param({"resumePolicy": "Latest"}, 30, [10, 20, 30], id="latest"),
        pytest.param({"resumePolicy": "Never"}, 0, [], id="never"),
        pytest.param({"resumePolicy": "Step", "resumeFromStep": 20}, 20, [10, 20], id="step"),
    ],
)
def test_resume_policy_fixes_the_first_step_and_rolls_the_rest_back(
    make_world: MakeWorld, checkpoint: dict[str, Any], resume_step: int, left: list[int]
) -> None:
    world = make_world(checkpoint=checkpoint)
    world.steps = {10: 1.0, 20: 2.0, 30: 3.0}
    world.start()
    assert world.launches[0].resume_step == resume_step
    assert sorted(world.steps) == left


def test_step_policy_resumes_later_attempts_from_the_latest(make_world: MakeWorld) -> None:
    world = make_world(checkpoint={"resumePolicy": "Step", "resumeFromStep": 20})
    world.steps = {20: 2.0, 30: 3.0}
    world.start()
    world.make_step(26)
    world.stage(25)
    world.fail()
    world.relaunched()
    assert world.launch_of(2).resume_step == 25


def resumed_with(world: Any, command: str | None, **checkpoint: Any) -> int:
    """Interrupts the job, and starts it again with that policy; returns the step that it then starts from."""
    world.intent = Intent.STOP_NOW
    world.settle()
    world.intent, world.command = Intent.RUN, command
    world.spec = replace(world.spec, checkpoint=replace(world.spec.checkpoint, **checkpoint))
    world.relaunched()
    step: int = world.launches[-1].resume_step
    world.join()
    world.settle()
    world.make_step(step + 1)
    world.stage(step + 1)
    return step


def test_step_that_a_command_asks_for_is_rolled_back_to_once_by_each_command(make_world: MakeWorld) -> None:
    world = make_world()
    world.steps = {10: 1.0, 20: 2.0, 30: 3.0}
    world.start()
    step = {"resume_policy": ResumePolicy.STEP, "resume_from_step": 20}
    assert resumed_with(world, "first", **step) == 20
    assert sorted(world.steps) == [10, 20]
    assert world.status.checkpoint.latest_persisted_step == 20
    world.fail()
    world.relaunched()
    assert world.launches[-1].resume_step == 21, "within the session the gang goes on"
    assert resumed_with(world, "second", **step) == 20
    assert resumed_with(world, None, resume_policy=ResumePolicy.LATEST, resume_from_step=None) == 21


def test_step_that_the_manifest_asks_for_is_rolled_back_to_once_in_a_jobs_life(make_world: MakeWorld) -> None:
    world = make_world()
    world.steps = {10: 1.0, 20: 2.0, 30: 3.0}
    world.start()
    step = {"resume_policy": ResumePolicy.STEP, "resume_from_step": 20}
    assert resumed_with(world, None, **step) == 20
    assert resumed_with(world, None, **step) == 21
    assert resumed_with(world, None, **{**step, "resume_from_step": 10}) == 10
    assert sorted(world.steps) == [10]


def test_step_asked_for_after_a_kill_between_plan_and_launch_is_not_forgotten(make_world: MakeWorld) -> None:
    world = make_world()
    world.steps = {10: 1.0, 20: 2.0}
    while world.status.current is None:
        world.look()
    world.lose_supervisor()
    world.command = "second"
    step = {"resume_policy": ResumePolicy.STEP, "resume_from_step": 10}
    world.spec = replace(world.spec, checkpoint=replace(world.spec.checkpoint, **step))
    world.relaunched()
    assert [launch.resume_step for launch in world.launches] == [10]


@pytest.mark.parametrize(
    "checkpoint",
    [
        pytest.param({"resumePolicy": "Step", "resumeFromStep": 20}, id="step"),
        pytest.param({"resumePolicy": "Step", "resumeFromStep": 0}, id="scratch"),
        pytest.param({"resumePolicy": "Never"}, id="never"),
    ],
)
def test_crash_loop_after_a_roll_back_is_seen_as_one(make_world: MakeWorld, checkpoint: dict[str, Any]) -> None:
    world = make_world(
        checkpoint=checkpoint,
        failurePolicy={"maxRestarts": 9, "maxRestartsWithoutProgress": 2},
    )
    world.steps = {20: 2.0, 30: 3.0}
    world.start()
    while not world.status.is_terminal:
        world.fail()
        world.relaunched()
    assert world.status.condition(ConditionType.FAILED).reason == FailedReason.NO_PROGRESS


def test_step_policy_without_that_step_fails_and_names_what_there_is(make_world: MakeWorld) -> None:
    world = make_world(checkpoint={"resumePolicy": "Step", "resumeFromStep": 15})
    world.steps = {10: 1.0, 20: 2.0}
    world.settle()
    failed = world.status.condition(ConditionType.FAILED)
    assert failed.reason == FailedReason.CHECKPOINT_UNAVAILABLE
    assert "10, 20" in failed.message
    assert sorted(world.steps) == [10, 20]


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
