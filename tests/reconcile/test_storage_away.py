"""What is done and told while the storage does not answer, or refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stepfast_operator.local.story import tell
from stepfast_operator.record import ConditionType, FailedReason, State
from stepfast_operator.spec import ResumePolicy

MakeWorld = Callable[..., Any]


def story(world: Any) -> list[str]:
    return [line for seen in world.passes for line in tell(seen)]


def passes(world: Any, count: int) -> None:
    for _ in range(count):
        world.turn()


def test_storage_that_does_not_answer_is_said_once_and_again_when_that_changes(make_world: MakeWorld) -> None:
    world = make_world()
    world.is_storage_down = True
    passes(world, 20)
    assert story(world) == ["waiting for the storage: StorageUnavailable: memory://fake is down"]
    world.is_storage_down = False
    passes(world, 3)
    assert "the storage answers again" in story(world)
    assert world.launches


def test_storage_that_refuses_a_new_job_ends_it_at_once(make_world: MakeWorld) -> None:
    world = make_world()
    world.is_storage_forbidden = True
    began = world.now
    passes(world, 3)
    assert world.now - began < 5
    failed = world.status.condition(ConditionType.FAILED)
    assert failed.reason == FailedReason.CHECKPOINT_UNAVAILABLE
    assert failed.message == "StorageForbidden: memory://fake refuses"
    assert story(world) == ["failed: CheckpointUnavailable: StorageForbidden: memory://fake refuses"]


@pytest.mark.parametrize("mended", [True, False])
def test_storage_that_refuses_between_attempts_is_waited_for_until_the_start_deadline(
    make_world: MakeWorld, mended: bool
) -> None:
    world = make_world(startupDeadlineSeconds=60)
    world.start(staged=5)
    world.settle()
    world.is_storage_forbidden = True
    world.fail()
    passes(world, 10)
    assert not world.status.is_terminal
    world.is_storage_forbidden = not mended
    world.relaunched()
    assert (world.status.state is State.FAILED) is not mended
    assert len([line for line in story(world) if "waiting for the storage" in line]) == 1


def fail_and_keep_alive(world: Any, seconds: float) -> None:
    """A rank fails, and for so long the gang's pods do not go."""
    with world.pods_that_stay():
        world.fail()
        passes(world, 5)
        world.advance(seconds)
        passes(world, 5)
        assert world.status.checkpoint.storage_error is None, "nobody has read yet"


@pytest.mark.parametrize("mended", [True, False])
def test_storage_has_until_the_start_deadline_from_when_it_began_to_fail(make_world: MakeWorld, mended: bool) -> None:
    """The job may have waited for something else for longer than that."""
    world = make_world(startupDeadlineSeconds=60)
    world.start(staged=5)
    world.settle()
    fail_and_keep_alive(world, seconds=1000)
    world.is_storage_down = True
    while world.status.checkpoint.storage_error is None:
        world.turn()
    assert not world.status.is_terminal
    failed_time = world.passes[-1].observed.now
    assert world.status.checkpoint.storage_error_time == failed_time
    world.is_storage_down = not mended
    world.relaunched()
    if mended:
        assert [launch.attempt for launch in world.launches] == [1, 2]
        assert world.status.checkpoint.storage_error_time is None
    else:
        assert world.status.condition(ConditionType.FAILED).reason == FailedReason.CHECKPOINT_UNAVAILABLE
        assert 60 <= world.status.completion_time - failed_time < 66


def test_storage_that_answered_in_between_has_as_long_again(make_world: MakeWorld) -> None:
    world = make_world(startupDeadlineSeconds=60, failurePolicy={"backoff": {"baseSeconds": 300}})
    world.start()
    world.is_storage_down = True
    world.fail()
    for is_down in (True, False, True, False, True):
        world.is_storage_down = is_down
        for _ in range(20 if is_down else 1):
            world.look()
            world.advance(2)
        assert (world.status.checkpoint.storage_error is not None) is is_down
    assert not world.status.is_terminal


@pytest.mark.parametrize("found", [True, False])
def test_storage_without_the_steps_that_were_committed_is_waited_for_and_nothing_begins_anew(
    make_world: MakeWorld, found: bool
) -> None:
    world = make_world(startupDeadlineSeconds=60)
    world.start(staged=5)
    world.persist("uid-1")
    world.settle()
    steps, world.steps = world.steps, {}
    world.fail()
    passes(world, 10)
    assert not world.status.is_terminal
    where = "memory://fake/test/job"
    lost = f"step 5 was committed, and {where} has no step that can be restored: other storage, or emptied?"
    assert [line for line in story(world) if "waiting" in line] == [f"waiting for the storage: {lost}"]
    world.steps = steps if found else {}
    world.relaunched()
    if found:
        assert [launch.resume_step for launch in world.launches] == [0, 5]
    else:
        assert len(world.launches) == 1
        failed = world.status.condition(ConditionType.FAILED)
        assert (failed.reason, failed.message) == (FailedReason.CHECKPOINT_UNAVAILABLE, lost)


@pytest.mark.parametrize(
    "checkpoint",
    [{"resume_policy": ResumePolicy.NEVER}, {"resume_policy": ResumePolicy.STEP, "resume_from_step": 0}],
    ids=["never", "step 0"],
)
def test_who_wants_to_begin_anew_need_not_have_the_steps_that_were_committed(
    make_world: MakeWorld, checkpoint: dict[str, Any]
) -> None:
    world = make_world()
    world.start(staged=5)
    world.persist("uid-1")
    world.settle()
    world.steps = {}
    world.fail()
    passes(world, 3)
    world.spec = replace(world.spec, checkpoint=replace(world.spec.checkpoint, **checkpoint))
    world.relaunched()
    assert [launch.resume_step for launch in world.launches] == [0, 0]
