"""Nodes that the cloud is about to take away, in a fake world: the gang saves and goes elsewhere before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from stepfast.nodestatus import EvictionNotice
from stepfast_operator.actions import StopMode
from stepfast_operator.events import EventReason, events_of
from stepfast_operator.explanation import Surroundings, explain, text_of
from stepfast_operator.limits import limits_of
from stepfast_operator.observed import AgentState, Intent, NodeCondition, WorkerPhase
from stepfast_operator.record import Cause, ConditionType, FailedReason, State

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


# ---------------------------------------------------------------- a node that is well again

WORDS = "train-2-1: Unschedulable: 0/2 nodes are available"
XID = NodeCondition(type="XIDErrors", status="True", since=1000.5)
ON_XID = {"name": "gpu", "action": "RestartJobAndIgnoreMaxRestarts", "onNodeConditions": [{"type": "XIDErrors"}]}


def fall_ill(world: Any) -> None:
    world.node_conditions["node-1"] = (XID,)


def fail_there(world: Any) -> None:
    world.take_away(Cause.NODE_LOST, node=1)


def be_well(world: Any) -> None:
    world.notices.clear()
    world.node_conditions.clear()


def without_spare_node(make_world: MakeWorld, leave: Callable[[Any], None]) -> Any:
    """A gang of two nodes, of which there are no more, has left one of them, and its pod finds no other place."""
    world = make_world(
        trainer=TWO_NODES,
        failurePolicy={"maxRestarts": 0, "rules": [ON_XID]},
        nodeExclusionPolicy={"maxFailuresPerNode": 1 if leave is fail_there else 2, "ttlSeconds": 180},
    )
    world.nodes = ("node-0", "node-1", "node-2")
    world.start(staged=10)
    leave(world)
    world.relaunched()
    assert world.launches[-1].avoided_nodes == ("node-1",)
    world.nodes = ("node-0", "node-1")
    world.unschedulable = {1: WORDS}
    return world


WAYS = [
    pytest.param(lambda world: announce(world, kind="Reboot"), id="announced"),
    pytest.param(fall_ill, id="ill"),
    pytest.param(fail_there, id="excluded"),
]


@pytest.mark.parametrize("leave", WAYS)
def test_pod_without_a_place_is_made_anew_once_the_node_that_it_keeps_off_is_well(
    make_world: MakeWorld, leave: Callable[[Any], None]
) -> None:
    """Nobody can change where a pod may go; it would keep off that node until the job has failed."""
    world = without_spare_node(make_world, leave)
    launched = world.now
    while world.now < launched + 170:
        world.turn()
    assert len(world.launches) == 2
    be_well(world)
    world.relaunched()
    assert world.now - launched < 200
    status = world.status
    assert (len(world.launches), world.launches[-1].avoided_nodes, status.is_terminal) == (3, (), False)
    assert (status.restarts, status.restarts_count_towards_max, status.restarts_without_progress) == (2, 0, 0)
    assert (status.interruptions, status.last_failure.reason) == (1, Cause.NODE_AVAILABLE)
    words = (
        "attempt 2 ended: NodeAvailable: node node-1 may be used again, which the pods were made to keep off, "
        "and there is no place for 1 of 2 nodes"
    )
    assert told(world, EventReason.RESTARTING)[-1] == f"{words}; not counted towards maxRestarts"
    assert words in text_of(explain(status, limits_of(world.spec), Surroundings(), world.now))
    world.join()
    world.settle()
    assert (world.status.state, len(world.launches)) == (State.RUNNING, 3)


def test_operator_that_is_replaced_meanwhile_finds_out_what_the_pods_keep_off(make_world: MakeWorld) -> None:
    world = without_spare_node(make_world, fall_ill)
    be_well(world)
    world.lose_supervisor()
    world.agent = AgentState.READY
    world.relaunched()
    assert (len(world.launches), world.launches[-1].avoided_nodes) == (3, ())


@pytest.mark.parametrize("way", ["scheduled", "not looked at", "still ill", "another node"])
def test_gang_that_the_node_would_not_help_is_left_alone(make_world: MakeWorld, way: str) -> None:
    world = without_spare_node(make_world, fall_ill)
    if way == "scheduled":
        be_well(world)
        world.unschedulable = {}
        world.hold_up()
    elif way == "not looked at":
        be_well(world)
        world.unschedulable, world.unplaced = {}, {1}
    elif way == "another node":
        world.nodes = ("node-0", "node-1", "node-9")
    launched = world.now
    while world.now < launched + 600:
        world.turn()
    assert len(world.launches) == 2


def test_gang_that_its_node_helps_at_once_has_time_to_find_another_place(make_world: MakeWorld) -> None:
    world = without_spare_node(make_world, fall_ill)
    launched = world.now
    be_well(world)
    world.relaunched()
    assert 30 <= world.now - launched < 40


def test_node_that_is_well_and_ill_by_turns_makes_no_attempts_without_end(make_world: MakeWorld) -> None:
    world = without_spare_node(make_world, fall_ill)
    while not world.status.is_terminal:
        be_well(world)
        while world.status.open_attempt is not None:
            world.turn()
        fall_ill(world)
        world.relaunched()
        world.unschedulable = {1: WORDS}
    assert len(world.launches) < 9
    assert world.status.condition(ConditionType.FAILED).reason == FailedReason.STARTUP_DEADLINE_EXCEEDED
