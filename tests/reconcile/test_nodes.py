"""Which nodes the next attempt keeps off, in a fake world whose gangs always run on node-0, node-1, …"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stepfast_operator.events import EventReason, events_of
from stepfast_operator.observed import Intent, NodeCondition, WorkerPhase
from stepfast_operator.record import Cause, ConditionType, ExcludedNode, FailedReason, State

MakeWorld = Callable[..., Any]

FOUR = ("node-0", "node-1", "node-2", "node-3")
TWO_NODES = {"command": ["torchrun", "t.py"], "numNodes": 2}
XID = NodeCondition(type="XIDErrors", status="True", since=1000.5, message="XID 79 on GPU 3")
ON_XID = {
    "name": "gpu",
    "action": "RestartJobAndIgnoreMaxRestarts",
    "onNodeConditions": [{"type": "XIDErrors"}, {"type": "GPUMissing"}],
}


@pytest.fixture
def make_cluster(make_world: MakeWorld) -> MakeWorld:
    """A world of four nodes, and a gang on two of them that has made and staged a step."""

    def make(nodes: tuple[str, ...] = FOUR, **spec: Any) -> Any:
        world = make_world(trainer=TWO_NODES, **spec)
        world.nodes = nodes
        world.start(staged=10)
        return world

    return make


def fail_again(world: Any, step: int, node: int = 0) -> None:
    """A rank fails there after a newer step, and the next attempt trains."""
    fail_on(world, node, step)
    world.relaunched()
    world.join()
    world.settle()


def fail_on(world: Any, node: int, step: int = 20) -> None:
    world.make_step(step)
    world.stage(step)
    world.fail(rank=node)
    failure = world.gang.failures.pop(0)
    world.gang.phases[0] = WorkerPhase.RUNNING
    world.gang.phases[node], world.gang.failures[node] = WorkerPhase.FAILED, replace(failure, node=f"node-{node}")


def told(world: Any, *reasons: EventReason) -> list[str]:
    """What Events of these reasons say, in their order."""
    return [event.message for seen in world.passes for event in events_of(seen) if event.reason in reasons]


def excluded(world: Any) -> list[str]:
    return [node.name for node in world.status.excluded_nodes]


def test_node_on_which_the_job_failed_twice_is_kept_off_and_the_story_says_so(make_cluster: MakeWorld) -> None:
    world = make_cluster()
    fail_again(world, 20)
    assert (world.launches[-1].avoided_nodes, excluded(world)) == ((), [])
    fail_again(world, 30)
    assert world.launches[-1].avoided_nodes == ("node-0",)
    (node,) = world.status.excluded_nodes
    assert (node.name, node.reason) == ("node-0", "2 failures there: RankFailed")
    assert node.until_time - node.since_time == 86400
    condition = world.status.condition(ConditionType.NODES_EXCLUDED)
    assert (condition.status, condition.reason) == ("True", "Excluded")
    assert told(world, EventReason.NODE_EXCLUDED) == [condition.message]
    assert condition.message.startswith("node node-0 is kept off until 1970-01-02T")


def test_node_is_taken_again_when_its_time_is_over(make_cluster: MakeWorld) -> None:
    world = make_cluster(nodeExclusionPolicy={"ttlSeconds": 600})
    fail_again(world, 20)
    fail_again(world, 30)
    assert excluded(world) == ["node-0"]
    world.advance(601)
    world.make_step(31)
    world.settle()
    condition = world.status.condition(ConditionType.NODES_EXCLUDED)
    assert (condition.status, condition.reason) == ("False", "NoneExcluded")
    fail_again(world, 40)
    assert (world.launches[-1].avoided_nodes, excluded(world)) == ((), []), "its first failure again"


def test_failures_that_are_far_apart_do_not_add_up(make_cluster: MakeWorld) -> None:
    world = make_cluster(nodeExclusionPolicy={"ttlSeconds": 600})
    for step in (20, 30, 40):
        fail_again(world, step)
        world.advance(700)
    assert excluded(world) == []


@pytest.mark.parametrize("cause", [Cause.POD_DELETED, Cause.POD_EVICTED, Cause.OOM_KILLED])
def test_what_says_nothing_of_the_node_excludes_none(make_cluster: MakeWorld, cause: Cause) -> None:
    world = make_cluster(nodeExclusionPolicy={"maxFailuresPerNode": 1})
    world.take_away(cause)
    world.relaunched()
    assert (world.status.attempt, world.status.node_faults, excluded(world)) == (2, (), [])


def test_rule_excludes_a_node_from_the_first_time(make_cluster: MakeWorld) -> None:
    """Also for what would not count against it otherwise."""
    rule = {"name": "gone", "action": "RestartJob", "excludeNode": True, "onReasons": ["PodEvicted"]}
    world = make_cluster(failurePolicy={"rules": [rule]})
    world.take_away(Cause.POD_EVICTED, node=1)
    world.relaunched()
    assert [(node.name, node.reason) for node in world.status.excluded_nodes] == [("node-1", "rule 'gone' excludes it")]


def test_never_more_nodes_are_excluded_than_the_policy_says(make_cluster: MakeWorld) -> None:
    policy = {"maxFailuresPerNode": 1, "maxExcludedNodes": 1}
    world = make_cluster((*FOUR, "node-4"), nodeExclusionPolicy=policy)
    fail_again(world, 20)
    fail_again(world, 30, node=1)
    assert excluded(world) == ["node-0"]
    (spared,) = world.status.spared_nodes
    assert (spared.name, spared.limit) == ("node-1", "at most 1 node may be excluded (maxExcludedNodes)")
    assert world.status.condition(ConditionType.NODES_EXCLUDED).reason == "LimitReached"
    assert told(world, EventReason.NODE_SPARED) == [
        "node node-1 is not kept off (1 failure there: RankFailed): at most 1 node may be excluded (maxExcludedNodes)"
    ]


def test_never_so_many_nodes_are_excluded_that_too_few_are_left(make_cluster: MakeWorld) -> None:
    world = make_cluster(("node-0", "node-1", "node-2"), nodeExclusionPolicy={"maxFailuresPerNode": 1})
    fail_again(world, 20)
    fail_again(world, 30, node=1)
    assert excluded(world) == ["node-0"]
    assert [spared.limit for spared in world.status.spared_nodes] == [
        "1 of the 2 nodes that the gang needs would be left"
    ]


def test_excluded_node_is_taken_back_when_others_are_gone(make_cluster: MakeWorld) -> None:
    world = make_cluster(("node-0", "node-1", "node-2"), nodeExclusionPolicy={"maxFailuresPerNode": 1})
    fail_again(world, 20)
    assert excluded(world) == ["node-0"]
    world.nodes = ("node-0", "node-1")
    world.make_step(30)
    world.stage(30)
    world.take_away(Cause.POD_EVICTED, node=1)
    world.relaunched()
    assert (world.launches[-1].avoided_nodes, excluded(world)) == ((), [])


def test_nothing_is_excluded_where_nobody_knows_of_nodes(make_world: MakeWorld) -> None:
    world = make_world(nodeExclusionPolicy={"maxFailuresPerNode": 1})
    world.start(staged=10)
    fail_again(world, 20)
    assert (world.launches[-1].avoided_nodes, excluded(world)) == ((), [])
    assert world.status.condition(ConditionType.NODES_EXCLUDED) is None


def test_exclusion_of_none_excludes_none(make_cluster: MakeWorld) -> None:
    world = make_cluster(nodeExclusionPolicy={"maxFailuresPerNode": 1, "maxExcludedNodes": 0})
    fail_again(world, 20)
    assert excluded(world) == []


def test_gang_leaves_a_node_that_falls_ill_before_anything_has_failed(make_cluster: MakeWorld) -> None:
    world = make_cluster(failurePolicy={"maxRestarts": 0, "rules": [ON_XID]})
    world.advance(3)
    world.node_conditions["node-1"] = (replace(XID, since=world.now - 1),)
    world.relaunched()
    last, recovery = world.status.last_failure, world.status.recoveries[-1]
    assert (last.reason, last.node, last.rule) == (Cause.NODE_UNHEALTHY, "node-1", "gpu")
    assert last.message == "node node-1 has XIDErrors=True (XID 79 on GPU 3)"
    assert (recovery.counted, recovery.detected_time - recovery.failure_time) == (False, 1)
    assert world.launches[-1].avoided_nodes == ("node-1",)
    assert world.launch_of(2).resume_step == 10, "what was staged there was flushed"


def test_node_is_kept_off_for_as_long_as_it_is_ill_and_no_longer(make_cluster: MakeWorld) -> None:
    world = make_cluster(failurePolicy={"rules": [ON_XID]})
    world.node_conditions["node-3"] = (XID,)
    fail_again(world, 20)
    assert world.launches[-1].avoided_nodes == ("node-3",)
    del world.node_conditions["node-3"]
    world.take_away(Cause.POD_DELETED)
    world.relaunched()
    assert world.launches[-1].avoided_nodes == ()


def test_rank_that_dies_on_an_ill_node_follows_the_nodes_rule(make_cluster: MakeWorld) -> None:
    world = make_cluster(failurePolicy={"maxRestarts": 0, "rules": [{**ON_XID, "excludeNode": True}]})
    world.node_conditions["node-0"] = (XID,)
    fail_on(world, 0)
    world.relaunched()
    assert (world.status.last_failure.reason, world.status.last_failure.rule) == (Cause.RANK_FAILED, "gpu")
    assert world.status.restarts_count_towards_max == 0
    assert excluded(world) == ["node-0"]


def test_ill_node_is_blamed_for_the_rank_that_lost_its_peer_there(make_cluster: MakeWorld) -> None:
    world = make_cluster(failurePolicy={"maxRestarts": 0, "rules": [ON_XID]})
    world.node_conditions["node-1"] = (XID,)
    fail_on(world, 0)
    world.relaunched()
    last = world.status.last_failure
    assert (last.reason, last.node, last.rank) == (Cause.NODE_UNHEALTHY, "node-1", None)
    assert last.message.endswith("; seen first: rank 0 failed: failed")


def test_illness_that_its_monitor_tells_of_late_still_explains_the_end(make_cluster: MakeWorld) -> None:
    """A rank fails at once, node-problem-detector looks every so many seconds."""
    rule = {**ON_XID, "excludeNode": True}
    world = make_cluster(failurePolicy={"maxRestarts": 0, "rules": [rule]})
    world.fail(rank=0)
    with world.pods_that_stay():
        world.turn()
        world.turn()
        assert world.status.last_failure.reason is Cause.RANK_FAILED
        assert world.status.node_faults[-1].node == "node-0"
        world.node_conditions["node-1"] = (XID,)
        world.turn()
    world.relaunched()
    assert (world.status.last_failure.reason, world.status.last_failure.rule) == (Cause.NODE_UNHEALTHY, "gpu")
    assert [fault.node for fault in world.status.node_faults] == ["node-1"]
    assert excluded(world) == ["node-1"]


def suspend(world: Any) -> None:
    world.intent = Intent.SUSPEND
    world.settle(limit=1000)
    assert world.status.state is State.SUSPENDED


def back_off(world: Any) -> None:
    world.settle()
    assert world.passes[-1].decision.why == "backing off"


def suspend_and_resume(world: Any) -> None:
    """What is staged could not be flushed, and is due again now."""
    world.stage(30)
    world.is_storage_down = True
    suspend(world)
    assert world.status.current.flush_timed_out
    world.intent = Intent.RUN
    world.look()
    assert world.status.state is State.PENDING


@pytest.mark.parametrize("action", ["FailJob", "RestartJobAndIgnoreMaxRestarts"])
@pytest.mark.parametrize("rest", [suspend, back_off, suspend_and_resume])
def test_node_that_falls_ill_when_its_gang_has_long_ended_explains_nothing(
    make_cluster: MakeWorld, rest: Callable[[Any], None], action: str
) -> None:
    """The pods stay as records, and nodes fall ill for other reasons, too."""
    days = 3 * 86400
    backoff = {"baseSeconds": 2 * days, "maxSeconds": 2 * days}
    world = make_cluster(failurePolicy={"rules": [{**ON_XID, "action": action}], "backoff": backoff})
    world.steps = {10: world.now}
    fail_again(world, 20)
    world.fail(rank=0)
    while world.status.current.ended_time is None:
        world.turn()
    rest(world)
    before = world.status
    assert before.last_failure.reason is Cause.RANK_FAILED
    world.advance(days)
    world.node_conditions["node-1"] = (replace(XID, since=world.now),)
    world.look()
    after = world.status
    assert (after.state, after.terminal_state) == (before.state, None)
    assert (after.last_failure, after.recoveries) == (before.last_failure, before.recoveries)
    assert after.node_faults == before.node_faults


def test_rule_may_end_the_job_for_an_ill_node(make_cluster: MakeWorld) -> None:
    world = make_cluster(failurePolicy={"rules": [{**ON_XID, "action": "FailJob"}]})
    world.node_conditions["node-1"] = (XID,)
    world.settle()
    assert world.status.state is State.FAILED
    failed = world.status.condition(ConditionType.FAILED)
    assert (failed.reason, failed.message) == (
        FailedReason.FAILURE_POLICY,
        "rule 'gpu' ends the job on node condition XIDErrors=True",
    )


def test_exclusions_outlive_the_operator(make_cluster: MakeWorld) -> None:
    """They stand in the status, and are planned with before the gang is launched."""
    world = make_cluster()
    kept = ExcludedNode(name="node-2", reason="was ill", since_time=world.now, until_time=world.now + 600)
    world.status = replace(world.status, excluded_nodes=(kept,))
    fail_again(world, 20)
    assert world.launches[-1].avoided_nodes == ("node-2",)
    assert world.status.excluded_nodes == (kept,)
