"""What a job's failures, end and goodput are told as."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stepfast.nodestatus import JobStatus, SaveStatus
from stepfast_operator.local.story import tell
from stepfast_operator.observed import Observed
from stepfast_operator.record import Cause, LastFailure, State, Status
from stepfast_operator.sentences import describe_failure

MakeWorld = Callable[..., Any]


def story(world: Any) -> list[str]:
    return [line for seen in world.passes for line in tell(seen)]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("RuntimeError: boom (exit code 7)", "(rank 1): RuntimeError: boom (exit code 7)"),
        ("exit code 7", "(rank 1): exit code 7"),
        ("RuntimeError: boom", "(rank 1, exit code 7): RuntimeError: boom"),
        ("said exit code 71", "(rank 1, exit code 7): said exit code 71"),
        ("", "(rank 1, exit code 7)"),
    ],
)
def test_exit_code_is_told_once(message: str, told: str) -> None:
    failure = LastFailure(
        attempt=1, failure_time=1.0, reason=Cause.RANK_FAILED, rank=1, exit_code=7, message=message
    )  # fmt: skip
    assert describe_failure(failure) == f"attempt 1 failed: RankFailed {told}"


def test_job_that_fails_for_good_lists_no_recovery_for_its_last_attempt(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"maxRestarts": 1})
    world.start()
    while not world.status.is_terminal:
        world.fail()
        world.relaunched()
    assert [recovery.attempt for recovery in world.status.recoveries] == [1]
    assert world.status.current.fail_message == "1 restart of at most 1 (maxRestarts)"


@pytest.mark.parametrize(
    ("is_saved", "told"), [(True, "complete"), (False, "complete, but nothing was committed")]
)  # fmt: skip
def test_complete_job_without_a_commit_says_so(make_world: MakeWorld, is_saved: bool, told: str) -> None:
    world = make_world()
    world.start()
    world.make_step(9)
    world.settle()
    if is_saved:
        world.stage(9)
    world.succeed()
    world.settle()
    assert world.status.state is State.COMPLETE
    assert story(world)[-1] == told


def test_goodput_counts_training_and_not_the_save_after_its_last_step(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    observe = world.observe

    async def with_stall(status: Status) -> Observed:
        observed: Observed = await observe(status)
        saves = SaveStatus(count=1, stall_seconds_total=8.0, stall_seconds_last=8.0, stall_seconds_max=8.0)
        reports: list[JobStatus] = [replace(report, saves=saves) for report in observed.reports]
        return replace(observed, reports=reports)

    world.observe = with_stall
    began = world.now
    world.advance(10)
    world.make_step(50)  # the only heartbeat that is seen
    world.stage(50)
    world.look()
    world.advance(10)
    world.succeed()
    world.settle()
    assert world.status.goodput_ratio == pytest.approx(10 / (world.now - began), rel=0.05)


def test_status_tells_how_far_training_is_and_how_long_it_still_takes(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.make_step(1)
    world.settle()
    trainer = world.status.trainer_status
    assert (trainer.progress_percentage, trainer.estimated_remaining_seconds) == (None, None), "nobody said"
    world.total_steps = 1000
    world.advance(100)
    world.make_step(201)
    world.settle()
    trainer = world.status.trainer_status
    assert (trainer.steps_per_second, trainer.progress_percentage) == (pytest.approx(2, rel=0.05), 20)
    assert trainer.estimated_remaining_seconds == pytest.approx(400, rel=0.05)
    world.advance(400)
    world.make_step(1001)
    world.settle()
    trainer = world.status.trainer_status
    assert (trainer.progress_percentage, trainer.estimated_remaining_seconds) == (100, 0)
