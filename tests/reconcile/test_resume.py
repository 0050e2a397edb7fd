"""Which step an attempt starts from, in a fake world, one behaviour a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stepfast_operator.observed import Intent
from stepfast_operator.record import ConditionType, FailedReason
from stepfast_operator.spec import ResumePolicy

MakeWorld = Callable[..., Any]


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
