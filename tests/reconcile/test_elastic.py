"""Gangs whose size follows what there is place for, in a fake world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stepfast.errors import SpecError
from stepfast.nodestatus import EvictionNotice
from stepfast_operator.actions import SetSpares
from stepfast_operator.events import EventReason, events_of
from stepfast_operator.explanation import Surroundings, explain, text_of
from stepfast_operator.limits import limits_of
from stepfast_operator.observed import Intent, NodeCondition, Spare
from stepfast_operator.reconcile import Pass
from stepfast_operator.record import Cause, ExcludedNode, State

MakeWorld = Callable[..., Any]

WORDS = "train-2-1: Unschedulable: 0/1 nodes are available"


def trainer(nodes: int) -> dict[str, Any]:
    return {"command": ["torchrun", "t.py"], "numNodes": nodes}


@pytest.fixture
def world(make_world: MakeWorld) -> Any:
    """A gang of two nodes, of one at least and three at most, that has committed step 10 and made 14."""
    made = make_world(
        trainer=trainer(2),
        elasticPolicy={"maxNodes": 3, "scaleDownTimeoutSeconds": 60},
        failurePolicy={"maxRestarts": 0},
    )
    made.nodes = ("node-0", "node-1", "node-2")
    request_save = made.request_save

    async def save_and_persist(run: str) -> None:
        """An agent persists what was saved on request at once."""
        await request_save(run)
        made.persist(run)

    made.request_save = save_and_persist
    train(made)
    return made


def train(world: Any) -> None:
    """The gang that was launched last makes four steps, and commits the first."""
    if not world.launches:
        world.launched()
    world.join()
    begin = world.launches[-1].resume_step
    world.settle()
    world.make_step(begin + 10)
    world.stage(begin + 10)
    world.settle()
    world.persist(world.launches[-1].run)
    world.make_step(begin + 14)
    world.settle()


def without_place(world: Any, *nodes: int) -> None:
    """Of the gang that was launched last these pods have no place, and the others wait for them."""
    world.unschedulable = {node: WORDS for node in nodes}


def lose(world: Any, node: int = 1) -> None:
    """A node is lost, and what is launched next finds no place for as many pods."""
    world.take_away(Cause.NODE_LOST, node=node)
    world.relaunched()
    without_place(world, node)


def told(world: Any, reason: EventReason) -> list[str]:
    return [event.message for seen in world.passes for event in events_of(seen) if event.reason is reason]


def spares(world: Any, *nodes: str | None, seconds_ago: float = 0.0) -> None:
    """The spares have these places; None: none yet."""
    placed = world.now - seconds_ago
    world.spares = [Spare(node=node, placed_time=placed if node is not None else None) for node in nodes]


def sizes(world: Any) -> list[int]:
    return [launch.nodes for launch in world.launches]


# ---------------------------------------------------------------- smaller


def test_gang_goes_on_smaller_when_a_lost_node_does_not_come_back_in_time(world: Any) -> None:
    lose(world)
    planned = world.now
    world.relaunched()
    waited = world.now - planned
    assert 58 <= waited <= 75, "scaleDownTimeoutSeconds, and what its pods take to end"
    assert sizes(world) == [2, 2, 1]
    assert world.launches[-1].resume_step == world.launches[-2].resume_step == 10
    status = world.status
    assert (status.nodes.desired, status.restarts, status.restarts_count_towards_max) == (1, 2, 0)
    assert status.last_failure.reason is Cause.RESIZED
    assert told(world, EventReason.SCALING_DOWN) == [
        "the gang goes on with 1 node in place of 2: "
        f"there is place for 1 of 2 nodes (scaleDownTimeoutSeconds): {WORDS}"
    ]


def launched_late(world: Any, seconds: int) -> float:
    """The gang is refused for so long, and then one of its pods finds no place; when they were made."""
    world.refusal = "exceeded quota"
    for _ in range(seconds // 10):
        world.look()
        world.advance(10)
    world.refusal = ""
    world.launched()
    launched: float = world.gang.launched_time
    without_place(world, 1)
    world.look()
    return launched


def test_places_are_waited_for_from_when_the_pods_were_made(make_world: MakeWorld) -> None:
    """A quota or a webhook may hold up the launch for longer than that; an autoscaler is to have its chance."""
    world = make_world(trainer=trainer(2), elasticPolicy={"scaleDownTimeoutSeconds": 300})
    launched = launched_late(world, 400)
    assert world.status.current.leaving is None
    explained = text_of(explain(world.status, limits_of(world.spec), Surroundings(), world.now))
    assert "unless there is place for all its pods within 5.0 min" in explained
    world.relaunched()
    assert 300 <= world.now - launched < 315
    assert sizes(world) == [2, 1]


def test_gang_whose_launch_was_held_up_is_not_late_before_it_could_go_on_smaller(make_world: MakeWorld) -> None:
    world = make_world(
        trainer=trainer(2), elasticPolicy={"scaleDownTimeoutSeconds": 300}, startupDeadlineSeconds=400
    )  # fmt: skip
    launched = launched_late(world, 350)
    explained = text_of(explain(world.status, limits_of(world.spec), Surroundings(), world.now))
    assert "unless all ranks are here within 5.0 min" in explained
    world.relaunched()
    assert world.now - launched < 315
    assert (sizes(world), world.status.is_terminal) == ([2, 1], False)


def test_gang_whose_node_comes_back_in_time_stays_as_large(world: Any) -> None:
    lose(world)
    world.advance(40)
    world.look()
    without_place(world)
    train(world)
    assert (sizes(world), world.status.state) == ([2, 2], State.RUNNING)


def test_gang_below_its_least_waits_for_places(make_world: MakeWorld) -> None:
    world = make_world(trainer=trainer(2), elasticPolicy={"minNodes": 2, "scaleDownTimeoutSeconds": 10})
    train(world)
    lose(world)
    for _ in range(20):
        world.turn()
        world.advance(5)
    assert sizes(world) == [2, 2]


def test_gang_that_is_not_elastic_waits_for_places(make_world: MakeWorld) -> None:
    world = make_world(trainer=trainer(2))
    train(world)
    lose(world)
    for _ in range(100):
        world.turn()
        world.advance(5)
    assert sizes(world) == [2, 2]


def test_pod_that_the_scheduler_has_not_looked_at_is_waited_for(world: Any) -> None:
    lose(world)
    world.unplaced = {0}
    world.advance(100)
    for _ in range(5):
        world.turn()
    assert world.status.current.leaving is None


def test_first_attempt_begins_with_what_there_is_place_for(make_world: MakeWorld) -> None:
    world = make_world(trainer=trainer(4), elasticPolicy={"minNodes": 2, "scaleDownTimeoutSeconds": 30})
    world.launched()
    without_place(world, 2, 3)
    world.relaunched()
    assert sizes(world) == [4, 2]
    assert world.status.interruptions == 0, "nobody trained"


def test_shrunken_gang_that_fails_starts_again_as_small(world: Any) -> None:
    lose(world)
    world.relaunched()
    without_place(world)
    train(world)
    world.take_away(Cause.POD_EVICTED)
    world.relaunched()
    assert sizes(world) == [2, 2, 1, 1]


def test_resumed_job_begins_as_its_manifest_says(world: Any) -> None:
    lose(world)
    world.relaunched()
    without_place(world)
    train(world)
    world.intent = Intent.SUSPEND
    world.settle()
    assert world.status.state is State.SUSPENDED
    world.intent = Intent.RUN
    world.relaunched()
    assert sizes(world)[-1] == 2


def test_gang_that_is_larger_than_the_changed_policy_allows_saves_and_shrinks(world: Any) -> None:
    world.spec = replace(world.spec, elastic_policy=replace(world.spec.elastic_policy, max_nodes=1))
    world.relaunched()
    assert sizes(world) == [2, 1]
    assert world.launches[-1].resume_step == 14, "nothing is lost"
    assert told(world, EventReason.SCALING_DOWN) == [
        "the gang goes on with 1 node in place of 2: 1 node at most (maxNodes)"
    ]


# ---------------------------------------------------------------- larger


def test_spares_wait_for_places_once_the_gang_has_committed_a_step(make_world: MakeWorld) -> None:
    world = make_world(trainer=trainer(1), elasticPolicy={"maxNodes": 3})
    world.launched()
    world.join()
    world.settle()
    world.make_step(3)
    world.settle()
    assert world.spares == []
    world.stage(3)
    world.persist(world.launches[-1].run)
    world.settle()
    world.look()
    assert world.spares == [Spare(), Spare()]


def test_gang_saves_and_grows_when_there_is_place(world: Any) -> None:
    world.look()
    assert world.spares == [Spare()]
    spares(world, "node-2")
    world.relaunched()
    assert sizes(world) == [2, 3]
    assert (world.launches[-1].resume_step, world.status.recoveries[-1].steps_lost) == (14, 0)
    assert world.spares == [], "the gang's own pods are to have their places"
    assert world.status.restarts_count_towards_max == 0
    assert told(world, EventReason.SCALING_UP) == [
        "the gang goes on with 3 nodes in place of 2: there is place for 1 more node"
    ]


def test_grown_gang_whose_ranks_are_restarted_in_place_keeps_its_size(make_world: MakeWorld) -> None:
    world = make_world(
        trainer=trainer(2),
        elasticPolicy={"maxNodes": 3},
        failurePolicy={"restartStrategy": "InPlace", "maxInPlaceRestarts": 1},
    )
    train(world)
    spares(world, "node-2")
    world.relaunched()
    train(world)
    world.die()
    world.advance(1)
    world.rejoin(restored_step=20)
    world.make_step(30)
    world.settle()
    world.stage(30)
    world.persist(f"{world.launches[-1].run}.1")
    world.settle()
    world.look()
    assert (world.status.current.in_place_restarts, world.status.nodes.desired, world.spares) == (1, 3, [])


def test_spares_hold_their_places_until_the_gang_has_ended(world: Any) -> None:
    spares(world, "node-2")
    world.turn()
    while world.gangs["uid-1"].lives:
        assert world.spares[0].node == "node-2"
        world.turn()


def test_places_that_are_found_one_after_another_make_one_change(make_world: MakeWorld) -> None:
    world = make_world(trainer=trainer(1), elasticPolicy={"maxNodes": 4})
    train(world)
    spares(world, "node-1", None, None)
    world.look()
    assert world.status.current.leaving is None
    world.advance(6)
    spares(world, "node-1", "node-2", None, seconds_ago=6)
    world.look()
    assert world.status.current.leaving is None
    spares(world, "node-1", "node-2", None, seconds_ago=11)
    world.relaunched()
    assert sizes(world) == [1, 3]


def test_gang_of_a_lost_node_has_its_places_before_any_spare(world: Any) -> None:
    world.look()
    assert len(world.spares) == 1
    lose(world)
    assert world.spares == []
    world.settle()
    assert world.spares == []


@pytest.mark.parametrize("way", ["suspended", "complete", "deadline"])
def test_job_that_rests_holds_no_place(world: Any, way: str) -> None:
    spares(world, None)
    if way == "suspended":
        world.intent = Intent.SUSPEND
    elif way == "complete":
        world.succeed()
    else:
        world.spec = replace(world.spec, active_deadline_seconds=1.0)
    world.settle()
    world.settle()
    assert world.spares == []


def test_gang_that_is_suspended_while_it_grows_rests(world: Any) -> None:
    spares(world, "node-2")
    world.turn()
    world.intent = Intent.SUSPEND
    world.settle()
    assert (world.status.state, world.spares, sizes(world)) == (State.SUSPENDED, [], [2])


def test_place_on_a_node_that_the_gang_keeps_off_is_none(make_world: MakeWorld) -> None:
    rule = {"name": "ill", "action": "RestartJob", "onNodeConditions": [{"type": "XIDErrors"}]}
    world = make_world(trainer=trainer(1), elasticPolicy={"maxNodes": 2}, failurePolicy={"rules": [rule]})
    world.nodes = ("node-0", "node-1")
    train(world)
    world.node_conditions["node-1"] = (NodeCondition(type="XIDErrors", status="True", since=world.now),)
    spares(world, "node-1", seconds_ago=20)
    world.look()
    assert (world.status.current.leaving, world.spares) == (None, [Spare(avoided_nodes=("node-1",))])


XID = NodeCondition(type="XIDErrors", status="True", since=1000.5)
ON_XID = {"name": "ill", "action": "RestartJob", "onNodeConditions": [{"type": "XIDErrors"}]}


def exclude(world: Any, name: str, seconds: float) -> None:
    kept_off = ExcludedNode(name=name, reason="was ill", since_time=world.now, until_time=world.now + seconds)
    world.status = replace(world.status, excluded_nodes=(kept_off,))


def announce(world: Any, name: str) -> None:
    world.notices[name] = EvictionNotice(kind="Reboot", event="e", seen_time=world.now, not_before_time=None)


@pytest.mark.parametrize(
    "keep_off",
    [
        pytest.param(lambda world: world.node_conditions.update({"node-2": (XID,)}), id="ill"),
        pytest.param(lambda world: exclude(world, "node-2", 100), id="excluded"),
        pytest.param(lambda world: announce(world, "node-2"), id="announced"),
    ],
)
def test_spare_without_a_place_is_made_anew_once_the_node_that_it_keeps_off_is_well(
    make_world: MakeWorld, keep_off: Callable[[Any], None]
) -> None:
    world = make_world(trainer=trainer(2), elasticPolicy={"maxNodes": 3}, failurePolicy={"rules": [ON_XID]})
    world.nodes = ("node-0", "node-1", "node-2")
    world.launched()
    keep_off(world)
    train(world)
    world.look()
    assert world.spares == [Spare(avoided_nodes=("node-2",))]
    assert spares_set(world.look()) == [], "nothing has changed"
    world.node_conditions.clear()
    world.notices.clear()
    world.advance(101)
    world.make_step(15)
    assert spares_set(world.look()) == [SetSpares(count=1, avoided_nodes=())]
    assert world.spares == [Spare()]
    assert spares_set(world.look()) == []
    spares(world, "node-2")
    world.relaunched()
    assert sizes(world) == [2, 3]


def test_spare_that_keeps_off_a_node_that_is_gone_is_left_alone(make_world: MakeWorld) -> None:
    world = make_world(trainer=trainer(2), elasticPolicy={"maxNodes": 3}, failurePolicy={"rules": [ON_XID]})
    world.nodes = ("node-0", "node-1", "node-2")
    world.node_conditions["node-2"] = (XID,)
    train(world)
    world.look()
    world.nodes = ("node-0", "node-1")
    assert spares_set(world.look()) == []


def spares_set(seen: Pass) -> list[SetSpares]:
    return [action for action in seen.decision.actions if isinstance(action, SetSpares)]


def test_grown_gang_for_which_the_place_is_gone_goes_on_as_before(world: Any) -> None:
    spares(world, "node-2")
    world.relaunched()
    without_place(world, 2)
    world.relaunched()
    assert sizes(world) == [2, 3, 2]


def grow(world: Any, *, is_there_place: bool) -> None:
    """A spare finds a place, and the gang that is launched for it either finds it, too, or goes on as small."""
    world.look()
    assert len(world.spares) == 1
    spares(world, "node-2")
    world.relaunched()
    if not is_there_place:
        without_place(world, 2)
        world.relaunched()
        without_place(world)
    train(world)


def held_seconds(world: Any) -> float:
    """For how long the gang, which has committed a step, trains before a spare waits for a place."""
    begin = world.status.current.first_step_time
    while not world.spares:
        assert world.now - begin < 10_000
        world.advance(5)
        world.make_step(world.status.current.newest_step + 1)
        world.settle()
    return world.now - begin


def test_tries_to_grow_that_fail_one_after_another_come_more_and_more_seldom(world: Any) -> None:
    grow(world, is_there_place=False)
    for expected in (120, 240, 480):
        grow(world, is_there_place=False)
        assert world.spares == []
        explained = text_of(explain(world.status, limits_of(world.spec), Surroundings(), world.now))
        assert "in a row there was no place for all pods of a gang, the largest of 3 nodes" in explained
        assert expected <= held_seconds(world) <= expected + 30
    assert set(sizes(world)) == {2, 3}
    for _ in range(4):
        held_seconds(world)
        grow(world, is_there_place=False)
    assert 3600 <= held_seconds(world) <= 3630, "an hour at most"


def test_try_to_grow_that_succeeds_makes_up_for_those_that_failed(world: Any) -> None:
    for _ in range(2):
        grow(world, is_there_place=False)
    held_seconds(world)
    grow(world, is_there_place=True)
    assert sizes(world)[-1] == 3
    lose(world)
    world.relaunched()
    without_place(world)
    train(world)
    assert held_seconds(world) < 30


def test_exclusion_leaves_as_many_nodes_as_the_gang_may_have_at_least(make_world: MakeWorld) -> None:
    world = make_world(trainer=trainer(2), elasticPolicy={"minNodes": 1}, nodeExclusionPolicy={"maxFailuresPerNode": 1})
    world.nodes = ("node-0", "node-1")
    train(world)
    world.take_away(Cause.NODE_LOST, node=1)
    world.relaunched()
    assert [node.name for node in world.status.excluded_nodes] == ["node-1"]


# ---------------------------------------------------------------- what its user is told


def test_explanation_says_how_long_places_are_waited_for_and_that_it_grows(world: Any) -> None:
    running = text_of(explain(world.status, limits_of(world.spec), Surroundings(), world.now))
    assert "the gang grows, to at most 3 nodes, when a step of it is committed and there is place" in running
    lose(world)
    world.look()
    waiting = text_of(explain(world.status, limits_of(world.spec), Surroundings(), world.now))
    assert "unless there is place for all its pods within" in waiting
    assert "the gang goes on with fewer, with 1 node at least (scaleDownTimeoutSeconds)" in waiting


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"elasticPolicy": {"minNodes": 3}}, "minNodes"),
        ({"elasticPolicy": {"minNodes": 3, "maxNodes": 2}}, "minNodes"),
        ({"elasticPolicy": {}, "startupDeadlineSeconds": 300}, "scaleDownTimeoutSeconds"),
        ({"elasticPolicy": {}, "podGroupPolicy": {"volcano": {}}}, "elasticPolicy"),
    ],
    ids=["more than there are", "more than the most", "longer than a start may take", "in a group"],
)
def test_policy_that_cannot_hold_is_refused(make_spec: Callable[..., Any], fields: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as raised:
        make_spec(trainer=trainer(2), **fields)
    assert raised.value.field.endswith(field)
