"""Progress alone is written now and then, all else at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from stepfast_operator.record import (
    Attempt,
    CheckpointStatus,
    SavesStatus,
    State,
    Status,
    TrainerStatus,
)
from stepfast_operator.writepace import PROGRESS_SECONDS, WritePace, progress_seconds

CURRENT = Attempt(attempt=1, run="u-1", resume_step=0, planned_time=1.0, first_step=1)
STATUS = Status(state=State.RUNNING, attempt=1, current=CURRENT)
Change = Callable[[Status], Status]


def with_current(**fields: object) -> Change:
    return lambda status: replace(status, current=replace(CURRENT, **fields))  # type: ignore[arg-type]


def with_checkpoint(**fields: object) -> Change:
    return lambda status: replace(status, checkpoint=CheckpointStatus(**fields))  # type: ignore[arg-type]


def paced() -> WritePace:
    """As after a write at time 100."""
    pace = WritePace()
    assert pace.is_due(STATUS, 100.0), "whatever is the first"
    pace.note_written(STATUS, 100.0)
    return pace


@pytest.mark.parametrize(
    "change",
    [
        lambda status: replace(status, trainer_status=TrainerStatus(global_step=5, steps_per_second=1.0)),
        with_current(newest_step=5, newest_step_time=99.0, steady_step=5, steady_step_time=99.0),
        with_checkpoint(latest_memory_step=5, pending_bytes=3, persist_lag_steps=1, persist_lag_seconds=0.1),
        with_checkpoint(latest_persisted_step=5, latest_persisted_time=99.0, size_bytes=7, saves=SavesStatus(count=1)),
    ],
    ids=["what is shown", "steps", "memory", "commits"],
)
def test_progress_waits_and_is_written_later_even_if_nothing_changes_any_more(change: Change) -> None:
    pace, progress = paced(), change(STATUS)
    assert not pace.is_due(progress, 100.5)
    assert pace.held_back(101.0) is None
    assert pace.wait_seconds(101.0) == pytest.approx(PROGRESS_SECONDS - 1.0)
    assert pace.wait_seconds(200.0) == 0.0
    assert pace.held_back(100.0 + PROGRESS_SECONDS) == progress
    pace.note_written(progress, 102.0)
    assert pace.wait_seconds(102.0) is None
    assert pace.held_back(200.0) is None


def test_newest_progress_is_what_was_held_back() -> None:
    pace = paced()
    for step in (1, 2, 3):
        assert not pace.is_due(with_current(newest_step=step)(STATUS), 100.5 + step / 10)
    assert pace.held_back(102.0) == with_current(newest_step=3)(STATUS)


def test_progress_after_a_while_is_written_at_once() -> None:
    assert paced().is_due(with_current(newest_step=5)(STATUS), 100.0 + PROGRESS_SECONDS)


@pytest.mark.parametrize(
    "change",
    [
        lambda status: replace(status, state=State.RESTARTING),
        lambda status: replace(status, restarts=1),
        lambda status: replace(status, observed_generation=2),
        with_current(first_step=2, newest_step=2),
        with_current(ended_time=101.0),
        with_current(suspending_time=101.0),
        with_checkpoint(persist_error="no space"),
        with_checkpoint(restored_step=4),
    ],
    ids=["state", "restarts", "generation", "first step", "end", "suspending", "persist error", "restored"],
)
def test_what_decides_is_written_at_once_with_the_progress_that_was_held_back(change: Change) -> None:
    pace = paced()
    assert not pace.is_due(replace(STATUS, trainer_status=TrainerStatus(global_step=5)), 100.1)
    decided = change(STATUS)
    assert pace.is_due(decided, 100.2)
    pace.note_written(decided, 100.2)
    assert pace.wait_seconds(100.2) is None


def test_the_more_jobs_there_are_the_more_seldom_each_ones_progress_is_written() -> None:
    assert progress_seconds(1) == progress_seconds(50) == PROGRESS_SECONDS
    assert [1000 / progress_seconds(1000), 10_000 / progress_seconds(10_000)] == [25, 25], "writes a second, of all"
    slow = [1000 / progress_seconds(1000, answer_seconds) for answer_seconds in (0.001, 0.02, 0.04, 3.0)]
    assert slow == pytest.approx([25, 25, 12.5, 10]), "fewer while the API server is slow, and never none"
    pace = paced()
    pace.progress_seconds = 20.0
    assert not pace.is_due(with_current(newest_step=5)(STATUS), 119.0)
    assert pace.wait_seconds(119.0) == pytest.approx(1.0)
    assert pace.held_back(119.0) is None
    assert pace.held_back(120.0) is not None
    assert pace.is_due(replace(STATUS, state=State.RESTARTING), 119.0), "all else is written at once"
