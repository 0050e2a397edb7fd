"""What is counted and told when ranks start from another step than was planned."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stepfast_operator.document import encode
from stepfast_operator.local.story import tell
from stepfast_operator.record import ConditionType, FailedReason

MakeWorld = Callable[..., Any]


def document(world: Any) -> Any:
    """The status as the API shows it."""
    return json.loads(json.dumps(encode(world.status)))


def story(world: Any) -> list[str]:
    return [line for seen in world.passes for line in tell(seen)]


def test_first_attempt_counts_from_the_older_step_that_was_restored_in_place_of_a_damaged_one(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.steps = {50: 1.0, 100: 2.0}
    world.launched()
    world.join(restored_step=50)
    world.settle()
    assert document(world)["trainerStatus"]["globalStep"] == 50
    assert (world.status.checkpoint.restored_step, world.status.checkpoint.restored_tier) == (50, "Persistent")
    assert world.status.steps_lost == 50
    world.advance(10)
    world.make_step(60)
    world.settle()
    assert world.status.current.first_step == 60
    assert document(world)["trainerStatus"]["globalStep"] == 60
    said = [line for line in story(world) if "50" in line]
    assert said == [
        "step 100 is damaged or was not asked for, all ranks restored step 50 from Persistent, 50 steps lost"
    ]


def test_node_that_tells_of_its_restore_after_another_made_a_step_is_waited_for(make_world: MakeWorld) -> None:
    world = make_world(trainer={"command": ["torchrun", "t.py"], "numNodes": 2})
    world.start()
    world.make_step(8)
    world.stage(6)
    world.settle()
    world.fail()
    world.relaunched()
    world.join(tier="Memory")
    ranks, restored = world.gang.ranks, world.now
    told = dict(ranks)
    ranks[1] = replace(ranks[1], restored_step=None, restored_time=None, restored_tier=None)
    world.advance(2)
    ranks[0] = replace(ranks[0], global_step=7, step_time=world.now)
    world.settle()
    assert world.status.recoveries[0].resumed_time == world.now
    assert world.status.recoveries[0].restored_time is None
    ranks[1] = replace(told[1], global_step=7, step_time=world.now)
    world.settle()
    assert world.status.recoveries[0].restored_time == restored
    assert story(world).count("all ranks restored step 6 from Memory") == 1


def test_script_that_never_restores_is_counted_from_scratch(make_world: MakeWorld) -> None:
    world = make_world()
    world.steps = {200: 2.0}
    world.launched()
    world.join(restored_step=None)
    world.settle()
    world.advance(1)
    world.make_step(1)
    world.settle()
    world.advance(19)
    world.make_step(20)
    world.settle()
    assert world.status.current.first_step == 1
    assert document(world)["trainerStatus"]["globalStep"] == 20
    assert "restoredStep" not in document(world)["checkpoint"]
    assert [line for line in story(world) if "nothing" in line] == [
        "step 200 was to be restored, and the ranks train without it: nothing was restored, 200 steps lost"
    ]
    world.succeed()
    world.settle()
    assert world.status.goodput_ratio > 0.5


def test_ranks_that_find_every_step_damaged_are_said_to_have_restored_nothing(make_world: MakeWorld) -> None:
    world = make_world()
    world.steps = {100: 2.0}
    world.launched()
    world.join(restored_step=0)
    world.settle()
    assert "restoredTier" not in document(world)["checkpoint"]
    assert [line for line in story(world) if "restored" in line] == [
        "step 100 is damaged or was not asked for, all ranks restored nothing, 100 steps lost"
    ]


def test_recovery_loses_what_was_really_lost_and_the_attempt_after_it_counts_on_from_there(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.start()
    world.advance(100)
    world.make_step(110)
    world.stage(100)
    world.settle()
    world.fail()
    world.relaunched()
    assert world.status.recoveries[0].steps_lost == 10
    kept = world.status.productive_seconds
    world.join(restored_step=50)
    world.settle()
    first = document(world)["recoveries"][0]
    assert (first["stepsLost"], first["resumedFromStep"], first["restoredTier"]) == (60, 50, "Persistent")
    assert world.status.steps_lost == 60
    assert world.status.productive_seconds == pytest.approx(kept * 50 / 100)
    world.advance(10)
    world.make_step(60)
    world.settle()
    world.fail()
    world.relaunched()
    world.join(restored_step=50)
    world.settle()
    assert [recovery.steps_lost for recovery in world.status.recoveries] == [60, 10]
    assert world.status.steps_lost == 70


def test_steps_committed_in_place_of_a_damaged_one_are_progress(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"maxRestarts": 9, "maxRestartsWithoutProgress": 1})
    world.steps = {50: 1.0, 100: 2.0}
    world.launched()
    world.join(restored_step=50)
    world.settle()
    for step in (60, 70, 80):
        world.advance(10)
        world.make_step(step)
        world.settle()
        world.steps.pop(100, None)  # the first save marks it superseded
        world.steps[step] = world.now
        world.fail()
        world.relaunched()
        world.join()
        world.settle()
    assert world.launches[-1].resume_step == 80
    assert world.status.restarts_without_progress == 0


@pytest.mark.parametrize("is_removed", [False, True])
def test_going_back_from_a_damaged_step_again_and_again_is_not_progress(
    make_world: MakeWorld, is_removed: bool
) -> None:
    world = make_world(failurePolicy={"maxRestarts": 9, "maxRestartsWithoutProgress": 2})
    world.steps = {50: 1.0, 100: 2.0}
    world.launched()
    while not world.status.is_terminal:
        world.join(restored_step=50)
        world.settle()
        if is_removed:
            world.steps.pop(100, None)
        world.fail()
        world.relaunched()
    assert world.status.condition(ConditionType.FAILED).reason == FailedReason.NO_PROGRESS


def test_agent_that_restarted_and_forgot_what_was_restored_changes_nothing(make_world: MakeWorld) -> None:
    world = make_world()
    world.steps = {100: 2.0}
    world.launched()
    world.join()
    world.settle()
    world.advance(1)
    world.join(restored_step=None)
    world.make_step(120)
    world.settle()
    assert (world.status.current.restored_step, world.status.checkpoint.restored_step) == (100, 100)
    assert world.status.steps_lost == 0


def test_restored_tier_is_that_of_the_slowest_rank(make_world: MakeWorld) -> None:
    world = make_world()
    world.start(staged=10)
    world.settle()
    world.fail()
    world.relaunched()
    world.join(tier="Memory")
    world.settle()
    assert document(world)["recoveries"][0]["restoredTier"] == "Memory"
    assert "all ranks restored step 10 from Memory" in story(world)


def test_status_speaks_the_words_of_the_api(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    assert "restoredTier" not in document(world)["checkpoint"], "from scratch"
    world.make_step(50, metrics={"loss": 0.5})
    world.settle()
    shown = document(world)
    assert shown["trainerStatus"]["metrics"] == [{"name": "loss", "value": 0.5}]
    world.fail()
    world.relaunched()
    assert document(world)["lastFailure"]["action"] == "RestartJob"


def test_lag_in_seconds_is_the_training_that_is_not_persisted(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.advance(50)
    world.make_step(50)
    world.settle()
    checkpoint = document(world)["checkpoint"]
    assert (checkpoint["persistLagSteps"], checkpoint["persistLagSeconds"]) == (50, pytest.approx(50, rel=0.1))
    world.stage(40)
    world.persist("uid-1")
    world.settle()
    checkpoint = document(world)["checkpoint"]
    assert (checkpoint["persistLagSteps"], checkpoint["persistLagSeconds"]) == (10, pytest.approx(10, rel=0.1))
