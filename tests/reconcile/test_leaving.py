"""Nodes that the cloud is about to take away, in a fake world: the gang saves and goes elsewhere before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from stepfast.nodestatus import EvictionNotice
from stepfast_operator.actions import StopMode
from stepfast_operator.events import EventReason, events_of
from stepfast_operator.observed import AgentState, Intent, WorkerPhase
from stepfast_operator.record import Cause, ConditionType, State

MakeWorld = Callable[..., Any]

TWO_NODES = {"command": ["torchrun", "t.py"], "numNodes": 2}


@pytest.fixture
def world(make_world: MakeWorld) -> Any:
    """Of three nodes; the gang, on node-0 and node-1, has staged step 10, and made 14."""
    made = make_world(trainer=TWO_NODES, failurePolicy={"maxRestarts": 0})
    made.nodes = ("node-0", "node-1", "node-2")
    made.start(staged=10)
    made.make_step(14)
    made.settle()
    request_save = made.request_save

    async def save_and_persist(run: str) -> None:
        """An agent persists what was saved on request at once."""
        await request_save(run)
        made.persist(run)

    made.request_save = save_and_persist
    return made


def announce(world: Any, *, node: str = "node-1", kind: str = "Preempt", seconds: float | None = 30.0) -> None:
    ends = None if seconds is None else world.now + seconds
    world.notices[node] = EvictionNotice(kind=kind, event="e1", seen_time=world.now, not_before_time=ends)


def told(world: Any, reason: EventReason) -> list[str]:
    return [event.message for seen in world.passes for event in events_of(seen) if event.reason is reason]


def test_gang_saves_and_goes_elsewhere_uncounted_with_nothing_lost(world: Any) -> None:
    announce(world)
    noticed = world.now
    world.relaunched()
    status = world.status
    last, recovery = status.last_failure, status.recoveries[-1]
    assert (last.reason, last.node) == (Cause.EVICTION_NOTICE, "node-1")
    assert last.message == "node node-1 is about to be taken away (Preempt, 30 s after it was announced)"
    assert (world.launch_of(2).resume_step, recovery.steps_lost, recovery.counted) == (14, 0, False)
    assert world.launches[-1].avoided_nodes == ("node-1",)
    assert (status.restarts, status.restarts_count_towards_max) == (1, 0)
    assert recovery.failure_time == noticed
    assert world.now - noticed < 30 - 5, "before the node is gone"
    assert told(world, EventReason.EVICTION_NOTICE) == [f"{last.message}: the gang saves and leaves"]


def test_script_that_ends_well_when_it_is_told_to_end_has_not_ended_its_training(world: Any) -> None:
    stop = world.stop

    async def stop_well(runs: Sequence[str], mode: StopMode) -> None:
        await stop(runs, mode)
        for run in runs:
            world.gangs[run].phases = dict.fromkeys(world.gangs[run].phases, WorkerPhase.SUCCEEDED)

    world.stop = stop_well
    announce(world)
    world.relaunched()
    assert (world.status.state, world.status.last_failure.reason) == (State.STARTING, Cause.EVICTION_NOTICE)
    assert world.launch_of(2).resume_step == 14


def test_status_says_why_while_the_gang_is_leaving(world: Any) -> None:
    announce(world)
    world.is_commit_held = True
    for _ in range(5):
        world.turn()
    assert world.status.state is State.RESTARTING
    condition = world.status.condition(ConditionType.RESTARTING)
    assert (condition.status, condition.reason) == ("True", "EvictionNotice")
    assert condition.message.startswith("node node-1 is about to be taken away")


def test_save_is_waited_for_no_longer_than_the_node_stays(world: Any) -> None:
    world.is_commit_held = True
    announce(world, seconds=20)
    noticed = world.now
    while world.gangs["uid-1"].lives:
        world.turn()
    assert 14 <= world.now - noticed <= 20


@pytest.mark.parametrize("seconds", [None, 2.0], ids=["has begun", "too late to save"])
def test_gang_whose_node_goes_at_once_is_flushed_and_moved_without_a_save(world: Any, seconds: float | None) -> None:
    announce(world, kind="Reboot", seconds=seconds)
    noticed = world.now
    world.relaunched()
    assert world.final == {}, "nobody was asked to save"
    assert (world.launch_of(2).resume_step, world.status.recoveries[-1].steps_lost) == (10, 4)
    assert world.now - noticed < 5
    assert world.status.last_failure.reason is Cause.EVICTION_NOTICE


def test_long_notice_is_no_reason_to_wait_longer_than_a_suspension_would(world: Any) -> None:
    world.is_commit_held = True
    announce(world, kind="Redeploy", seconds=600)
    noticed = world.now
    while world.gangs["uid-1"].lives:
        world.turn()
    assert 60 <= world.now - noticed < 75, "gracefulSuspendSeconds"


def test_machine_that_is_gone_before_the_gang_has_left_is_why_it_ended(world: Any) -> None:
    """What its peers die of then counts no more than the notice does."""
    announce(world)
    world.is_commit_held = True
    world.turn()
    world.turn()
    world.fail(rank=0)
    world.relaunched()
    assert (world.status.last_failure.reason, world.status.last_failure.node) == (Cause.EVICTION_NOTICE, "node-1")
    assert world.status.restarts_count_towards_max == 0


@pytest.mark.parametrize("cause", [Cause.NODE_LOST, Cause.POD_EVICTED, Cause.RANK_FAILED])
def test_operator_that_comes_too_late_still_finds_the_notice_to_blame(world: Any, cause: Cause) -> None:
    announce(world)
    if cause is Cause.RANK_FAILED:
        world.fail(rank=0)
    else:
        world.take_away(cause, node=1)
    world.relaunched()
    assert world.status.last_failure.reason is Cause.EVICTION_NOTICE
    assert world.status.restarts_count_towards_max == 0


def test_operator_that_is_replaced_half_way_goes_on(world: Any) -> None:
    """All it needs stands in the status."""
    announce(world)
    while world.status.current.leaving is None:
        world.turn()
    leaving = world.status.current.leaving
    world.notices.clear()
    world.relaunched()
    assert world.status.last_failure.message == leaving.message
    assert world.launch_of(2).resume_step == 14


def test_gang_that_has_finished_by_then_is_complete(world: Any) -> None:
    announce(world)
    world.succeed()
    world.settle()
    assert world.status.state is State.COMPLETE
    assert world.status.recoveries == ()


def test_suspension_goes_before(world: Any) -> None:
    announce(world)
    world.turn()
    world.intent = Intent.SUSPEND
    world.settle()
    assert (world.status.state, world.status.recoveries) == (State.SUSPENDED, ())
    assert world.steps.keys() >= {14}


def test_notice_for_a_node_that_the_gang_is_not_on_moves_nobody(world: Any) -> None:
    announce(world, node="node-2")
    world.settle()
    assert (world.status.state, len(world.launches)) == (State.RUNNING, 1)


def test_agent_that_does_not_answer_holds_nobody_beyond_the_notice(world: Any) -> None:
    announce(world, seconds=12)
    world.agent = AgentState.STARTING
    noticed = world.now
    while world.gangs["uid-1"].lives:
        world.turn()
    assert world.now - noticed <= 12 + 10


def test_gang_waits_for_nodes_that_stay(world: Any) -> None:
    """Pods that are made meanwhile keep off those that go."""
    announce(world)
    announce(world, node="node-2", seconds=600)
    world.relaunched()
    assert world.launches[-1].avoided_nodes == ("node-1", "node-2")
