"""A gang that has to be admitted as a whole, in a fake world: who waits is not late, who rests frees the place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stepfast_operator.actions import DeleteJob, LaunchGang, LeaveQueue
from stepfast_operator.events import EventReason, events_of
from stepfast_operator.goodput import goodput_of
from stepfast_operator.observed import Intent, QueueView
from stepfast_operator.record import Cause, ConditionType, FailedReason, State

MakeWorld = Callable[..., Any]
WAITS = QueueView(is_waiting=True, message="waits in queue q: 2 GPUs more are needed", is_held=True)
ADMITTED = QueueView(is_held=True)
FAIL_ON_DELETED = {"name": "deleted", "action": "FailJob", "onReasons": ["PodDeleted"]}


def wait_in_queue(world: Any, seconds: float = 0.0) -> None:
    """Its gang is launched, and waits for so long."""
    world.queue = WAITS
    if not world.launches or world.status.current.ended_time is not None:
        before = len(world.launches)
        while len(world.launches) == before:
            world.turn()
    world.hold_up("SchedulingGated")
    world.settle()
    world.advance(seconds)
    world.settle()


def admit(world: Any) -> None:
    world.queue = ADMITTED
    for node in world.gang.phases:
        world.begin_to_run(node)
    world.join()
    world.settle()


def told(world: Any, reason: EventReason) -> list[str]:
    return [event.message for seen in world.passes for event in events_of(seen) if event.reason is reason]


def test_gang_that_waits_says_so_and_why(make_world: MakeWorld) -> None:
    world = make_world()
    wait_in_queue(world)
    ready = world.status.condition(ConditionType.PODS_READY)
    assert (ready.status, ready.reason, ready.message) == ("False", "Queued", WAITS.message)
    assert world.status.state is State.STARTING
    world.advance(60)
    admit(world)
    assert told(world, EventReason.QUEUED) == ["attempt 1 waits in queue q: 2 GPUs more are needed"]
    assert told(world, EventReason.ADMITTED) == ["attempt 1 was admitted after 1.0 min"]
    assert world.status.condition(ConditionType.PODS_READY).reason == "PodsReady"
    assert world.status.queued_seconds == pytest.approx(60, abs=1)


def test_start_deadline_runs_from_the_admission(make_world: MakeWorld) -> None:
    world = make_world(startupDeadlineSeconds=100)
    wait_in_queue(world, 10_000)
    assert world.status.state is State.STARTING
    world.queue = ADMITTED
    world.settle()
    world.advance(90)
    world.settle()
    assert not world.status.is_terminal
    world.advance(20)
    world.settle()
    world.settle()
    assert world.status.current.fail_reason is FailedReason.STARTUP_DEADLINE_EXCEEDED


def test_time_in_a_queue_is_no_activity_of_the_job(make_world: MakeWorld) -> None:
    world = make_world(activeDeadlineSeconds=500)
    wait_in_queue(world, 10_000)
    admit(world)
    world.advance(100)
    world.make_step(1)
    world.settle()
    world.fail()
    wait_in_queue(world, 10_000)
    admit(world)
    assert world.status.state is State.RUNNING
    world.advance(500)
    world.settle()
    world.settle()
    assert world.status.current.fail_reason is FailedReason.DEADLINE_EXCEEDED


def test_goodput_is_measured_against_the_time_outside_of_queues(make_world: MakeWorld) -> None:
    world = make_world()
    wait_in_queue(world, 10_000)
    admit(world)
    world.advance(10)
    world.make_step(1)
    world.settle()
    world.advance(90)
    world.make_step(10)
    world.settle()
    world.succeed()
    world.settle()
    world.settle()
    assert world.status.state is State.COMPLETE
    assert world.status.goodput_ratio > 0.9


def test_wait_of_a_gang_that_ends_in_its_queue_is_no_activity_either(make_world: MakeWorld) -> None:
    world = make_world(activeDeadlineSeconds=500)
    wait_in_queue(world, 10_000)
    world.vanish(0)
    world.settle()
    assert world.status.last_failure.reason is Cause.POD_DELETED
    assert not world.status.is_terminal, world.status.current.fail_message
    assert world.status.queued_seconds == pytest.approx(10_000, abs=5)
    before = world.status.queued_seconds
    wait_in_queue(world, 10_000)
    assert world.status.attempt == 2
    admit(world)
    assert world.status.queued_seconds - before == pytest.approx(10_000, abs=5)


@pytest.mark.parametrize("is_suspended", [False, True], ids=["fails for good", "is suspended"])
def test_goodput_of_a_job_whose_last_gang_ends_in_its_queue_knows_of_its_wait(
    make_world: MakeWorld, is_suspended: bool
) -> None:
    world = make_world(failurePolicy={"rules": [FAIL_ON_DELETED]})
    wait_in_queue(world)
    admit(world)
    for step in range(1, 11):
        world.advance(10)
        world.make_step(step)
        world.settle()
    world.stage(10)
    world.fail()
    wait_in_queue(world, 10_000)
    if is_suspended:
        world.intent = Intent.SUSPEND
        while world.status.state is not State.SUSPENDED:
            world.turn()
    else:
        world.vanish(0)
        world.settle()
        assert world.status.state is State.FAILED
    assert goodput_of(world.status, world.now) > 0.7
    assert len(told(world, EventReason.ADMITTED)) == 1, "the second gang never was"


@pytest.mark.parametrize("is_admitted", [True, False], ids=["that runs", "that waits"])
def test_suspended_job_leaves_the_queue_before_it_can_go_on(make_world: MakeWorld, is_admitted: bool) -> None:
    world = make_world()
    wait_in_queue(world)
    if is_admitted:
        admit(world)
    world.intent, world.queue = Intent.SUSPEND, ADMITTED
    for _ in range(200):
        world.turn()
        if world.status.state is State.SUSPENDED:
            break
    assert not any(isinstance(action, LeaveQueue) for seen in world.passes for action in seen.decision.actions)
    world.intent = Intent.RUN
    world.settle()
    actions = [action for seen in world.passes for action in seen.decision.actions]
    kinds = [type(action) for action in actions if isinstance(action, LaunchGang | LeaveQueue)]
    assert kinds == [LaunchGang, LeaveQueue, LaunchGang], "the job may have another size by now"
    assert not world.queue.is_held


def test_failed_job_leaves_the_queue_and_does_not_go_before_it_has(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"maxRestarts": 0}, ttlSecondsAfterFinished=0)
    wait_in_queue(world)
    admit(world)
    world.fail()
    world.settle()
    world.settle()
    assert world.status.state is State.FAILED
    actions = [action for seen in world.passes for action in seen.decision.actions]
    kinds = [type(action) for action in actions if isinstance(action, LeaveQueue | DeleteJob)]
    assert kinds[:2] == [LeaveQueue, DeleteJob]


def test_gang_that_cannot_be_queued_says_why_and_is_launched_once_it_can(make_world: MakeWorld) -> None:
    world = make_world()
    world.refusal = "is Volcano installed?"
    for _ in range(10):
        world.turn()
    ready = world.status.condition(ConditionType.PODS_READY)
    assert (ready.reason, ready.message) == ("QueueRefused", "is Volcano installed?")
    assert told(world, EventReason.QUEUE_REFUSED) == ["is Volcano installed?"]
    assert told(world, EventReason.PODS_CREATED) == []
    world.refusal = ""
    world.start()
    assert world.status.attempt == 1


def test_gang_that_nobody_queues_ends_the_job_with_the_reason(make_world: MakeWorld) -> None:
    world = make_world(startupDeadlineSeconds=60)
    world.refusal = "is Volcano installed?"
    for _ in range(30):
        world.turn()
    assert world.status.current.fail_reason is FailedReason.STARTUP_DEADLINE_EXCEEDED
    assert "was not launched (is Volcano installed?) within 60 s" in world.status.current.fail_message
