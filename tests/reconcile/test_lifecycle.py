"""Suspension by the spec, deletion, freshness, start-up and refusal of a job in a cluster, in a fake world."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stepfast_operator.actions import DeleteJob, LaunchGang
from stepfast_operator.document import decode, encode
from stepfast_operator.observed import AgentState, Intent, WorkerPhase
from stepfast_operator.record import ConditionType, FailedReason, State, Status
from stepfast_operator.status import refuse

MakeWorld = Callable[..., Any]
STALENESS = {"checkpoint": {"maxStalenessSeconds": 30}}


def forget(world: Any) -> None:
    """The operator is restarted: all that is left is what was written."""
    world.status = decode(Status, json.loads(json.dumps(encode(world.status))), "status")


def test_job_that_is_suspended_from_the_start_gets_no_attempt_until_it_is_resumed(make_world: MakeWorld) -> None:
    world = make_world(activeDeadlineSeconds=100)
    world.status = Status()
    world.intent = Intent.SUSPEND
    world.settle()
    assert (world.status.state, world.status.attempt, world.status.start_time) == (State.SUSPENDED, 0, None)
    assert world.status.condition(ConditionType.SUSPENDED).status == "True"
    world.advance(5000)
    world.intent = Intent.RUN
    world.start()
    assert (world.status.attempt, world.status.restarts) == (1, 0)
    assert world.status.start_time >= 6000


def until_backing_off(world: Any) -> None:
    world.start()
    world.fail()
    for _ in range(100):
        world.look()
        if world.passes[-1].decision.why == "backing off":
            return
        world.advance(world.passes[-1].decision.requeue_seconds)
    raise AssertionError("never")


def until_planned(world: Any) -> None:
    world.agent = AgentState.STARTING
    while world.status.attempt == 0:
        world.look()
    world.agent = AgentState.READY


def until_operator_restarted(world: Any) -> None:
    world.start(staged=10)
    forget(world)


WHEN: dict[str, Callable[[Any], None]] = {
    "planned, not launched": until_planned,
    "starting": lambda world: world.launched(),
    "running": lambda world: world.start(staged=10),
    "backing off": until_backing_off,
    "operator restarted": until_operator_restarted,
}


@pytest.mark.parametrize("when", [pytest.param(when, id=name) for name, when in WHEN.items()])
def test_job_is_suspended_whatever_it_does_and_goes_on_when_resumed(
    make_world: MakeWorld, when: Callable[[Any], None]
) -> None:
    world = make_world(activeDeadlineSeconds=200, failurePolicy={"backoff": {"baseSeconds": 30}})
    world.status = Status()
    when(world)
    restarts, launches = world.status.restarts, len(world.launches)
    world.intent = Intent.SUSPEND
    for _ in range(300):
        world.turn()
        if world.status.state is State.SUSPENDED:
            break
    assert world.status.state is State.SUSPENDED
    assert not any(gang.lives for gang in world.gangs.values())
    assert len(world.launches) == launches
    world.advance(3600)
    world.settle()
    world.intent = Intent.RUN
    resumed = world.now
    world.relaunched()
    world.join()
    world.settle()
    assert world.status.state is State.RUNNING
    assert world.status.condition(ConditionType.SUSPENDED).reason == "Resumed"
    assert (world.status.restarts, world.status.start_time) == (restarts, resumed)
    assert world.launches[-1].resume_step == max(world.steps, default=0)


def test_recovery_that_a_suspension_interrupts_is_not_counted_as_one_of_hours(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"backoff": {"baseSeconds": 30}})
    until_backing_off(world)
    world.intent = Intent.SUSPEND
    world.settle()
    world.advance(3600)
    world.intent = Intent.RUN
    world.relaunched()
    assert world.status.recoveries == ()
    assert world.status.last_failure.attempt == 1


def test_suspending_a_job_that_is_over_changes_nothing(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.succeed()
    world.settle()
    before = world.status
    world.intent = Intent.SUSPEND
    world.settle()
    world.intent = Intent.RUN
    world.settle()
    assert world.status == before


@pytest.mark.parametrize("is_failed", [False, True], ids=["complete", "failed"])
def test_job_is_deleted_exactly_when_its_time_is_over(make_world: MakeWorld, is_failed: bool) -> None:
    world = make_world(ttlSecondsAfterFinished=100, failurePolicy={"maxRestarts": 0})
    world.start()
    world.fail() if is_failed else world.succeed()
    while not world.look().after.is_terminal:
        world.advance(world.passes[-1].decision.requeue_seconds)
    assert world.passes[-1].decision.requeue_seconds == 100
    ended = world.status.completion_time
    world.advance(40)
    forget(world)
    seen = world.look()
    assert not world.is_deleted
    assert world.now + seen.decision.requeue_seconds == pytest.approx(ended + 100)
    world.advance(seen.decision.requeue_seconds)
    seen = world.look()
    assert seen.decision.actions == (DeleteJob(),)
    assert world.is_deleted


def test_job_without_a_ttl_is_kept(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.succeed()
    world.settle()
    assert world.look().decision.requeue_seconds is None


def test_checkpoints_become_stale_exactly_when_promised_and_fresh_with_the_next_commit(make_world: MakeWorld) -> None:
    world = make_world(**STALENESS)
    world.start()
    world.make_step(1)
    world.stage(1)
    world.persist("uid-1")
    committed = world.now
    world.settle()
    world.advance(1)
    world.make_step(2)
    world.settle()
    assert world.status.condition(ConditionType.CHECKPOINT_FRESH).status == "True"
    while world.status.condition(ConditionType.CHECKPOINT_FRESH).status == "True":
        world.advance(world.look().decision.requeue_seconds)
    fresh = world.status.condition(ConditionType.CHECKPOINT_FRESH)
    assert (fresh.reason, fresh.message) == ("Stale", "no step was committed for 30 s (maxStalenessSeconds)")
    assert fresh.last_transition_time == pytest.approx(committed + 30, abs=0.02)
    world.stage(2)
    world.persist("uid-1")
    world.settle()
    assert world.status.condition(ConditionType.CHECKPOINT_FRESH).reason == "Fresh"


def test_first_commit_that_does_not_come_is_stale_too(make_world: MakeWorld) -> None:
    world = make_world(**STALENESS)
    world.start()
    world.make_step(1)
    world.settle()
    assert world.status.condition(ConditionType.CHECKPOINT_FRESH).reason == "NoCheckpoint"
    world.advance(30)
    world.settle()
    assert world.status.condition(ConditionType.CHECKPOINT_FRESH).reason == "Stale"


def test_nothing_is_stale_while_no_training_is_at_risk(make_world: MakeWorld) -> None:
    """Hours without a commit, in which the job was suspended, and then restores, lose nobody anything."""
    world = make_world(**STALENESS)
    world.start(staged=5)
    world.intent = Intent.STOP_NOW
    world.settle()
    world.advance(7200)
    world.intent = Intent.RUN
    world.relaunched()
    world.join()
    world.advance(60)
    world.settle()
    world.make_step(6)
    world.settle()
    assert world.status.condition(ConditionType.CHECKPOINT_FRESH).reason == "Fresh"


def test_pods_that_find_no_node_are_named_with_why_when_the_start_deadline_passes(make_world: MakeWorld) -> None:
    world = make_world(startupDeadlineSeconds=60, trainer={"command": ["torchrun", "t.py"], "numNodes": 5})
    world.launched()
    why = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    for node in range(1, 5):
        world.gang.phases[node] = WorkerPhase.PENDING
        world.gang.messages[node] = why
    world.settle()
    ready = world.status.condition(ConditionType.PODS_READY)
    assert (ready.status, ready.reason) == ("False", "PodsPending")
    assert ready.message == f"still pending: uid-1-1, uid-1-2, uid-1-3 and 1 more ({why})"
    assert (world.status.nodes.desired, world.status.nodes.ready, world.status.nodes.active) == (5, 0, 5)
    world.advance(61)
    world.settle()
    failed = world.status.condition(ConditionType.FAILED)
    assert failed.reason == FailedReason.STARTUP_DEADLINE_EXCEEDED
    assert failed.message == f"{ready.message} within 60 s (startupDeadlineSeconds)"


def test_storage_that_never_answers_a_new_job_fails_it_at_the_start_deadline(make_world: MakeWorld) -> None:
    world = make_world(startupDeadlineSeconds=60)
    world.status = Status()
    world.is_storage_down = True
    for _ in range(100):
        world.turn()
    assert world.status.condition(ConditionType.FAILED).reason == FailedReason.CHECKPOINT_UNAVAILABLE


def test_flush_waits_for_every_agent_that_was_asked(make_world: MakeWorld) -> None:
    """What an agent reported before it heard of the request does not tell what is left."""
    world = make_world(failurePolicy={"flushTimeoutSeconds": 20})
    world.start(staged=10)
    world.awaited_agents = ("node-1",)
    world.fail()
    for _ in range(40):
        world.turn()
    assert len(world.launches) == 1
    assert "node-1" in world.passes[-1].decision.why
    world.awaited_agents = ()
    world.relaunched()
    assert not world.status.recoveries[0].steps_lost


def test_agent_that_never_answers_a_flush_holds_it_up_no_longer_than_is_allowed(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"flushTimeoutSeconds": 20})
    world.start(staged=10)
    world.awaited_agents = ("node-1",)
    world.fail()
    failed = world.now
    world.relaunched()
    assert 20 <= world.now - failed < 22


def test_job_is_not_called_hung_while_an_agent_is_away(make_world: MakeWorld) -> None:
    world = make_world(progressPolicy={"progressDeadlineSeconds": 30})
    world.start()
    observe = world.observe

    async def with_old_reports(status: Status) -> Any:
        return replace(await observe(status), agent=AgentState.STARTING)

    world.observe = with_old_reports
    world.advance(300)
    world.look()
    assert world.status.state is State.RUNNING
    world.observe = observe
    world.relaunched()
    assert len(world.launches) == 2


def test_status_and_conditions_say_which_generation_they_follow_from(make_world: MakeWorld) -> None:
    world = make_world()
    world.generation = 3
    world.start()
    document = json.loads(json.dumps(encode(world.status)))
    assert document["observedGeneration"] == 3
    assert {condition["observedGeneration"] for condition in document["conditions"]} == {3}


def test_spec_that_makes_no_sense_fails_the_job_for_good_and_says_why() -> None:
    message = "spec.checkpoint.resumeFromStep: goes with resumePolicy: Step"
    status = refuse(Status(), message, 50.0, 2)
    failed = status.condition(ConditionType.FAILED)
    assert (status.state, status.terminal_state, status.completion_time) == (State.FAILED, "Failed", 50.0)
    assert (failed.reason, failed.message, failed.observed_generation) == (FailedReason.INVALID_SPEC, message, 2)
    assert refuse(status, "another", 60.0, 3) == status


def test_gang_of_a_job_that_was_refused_meanwhile_is_ended_and_never_started_again(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.status = refuse(world.status, "spec.x: unknown field", world.now)
    assert world.status.condition(ConditionType.PODS_READY) is not None
    for _ in range(5):
        world.look()
    assert not world.gang.lives
    assert not any(isinstance(action, LaunchGang) for seen in world.passes[-5:] for action in seen.decision.actions)
    assert world.status.current.fail_reason is FailedReason.INVALID_SPEC
