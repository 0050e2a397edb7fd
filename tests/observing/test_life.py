"""What is drawn of a job's life: how it is put together of status, saves and launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lives import BEGIN, UID, attempt, recovery, save, saves_of_training, suspended, training
from stepfast_operator.goodput import goodput_of
from stepfast_operator.life import AttemptSpan, Life, life_of
from stepfast_operator.record import Cause, State, Status, TrainerStatus

NOW = BEGIN + 1000


def lived(status: Status, now: float = NOW, **sources: Any) -> Life:
    return life_of(status, uid=UID, now=now, **sources)


def spans(life: Life) -> dict[int, AttemptSpan]:
    return {span.attempt: span for span in life.attempts}


def test_attempts_begin_and_end_as_the_recoveries_tell() -> None:
    life = lived(training(), saves=saves_of_training())
    first, second, third = life.attempts
    assert (life.begin, life.end) == (BEGIN, NOW)
    assert (first.end, first.ending, first.reached_step, first.steps_lost) == (BEGIN + 300, "NodeLost", 100, 10)
    assert (second.begin, second.training_time, second.end) == (BEGIN + 306, BEGIN + 360, BEGIN + 700)
    assert (second.start_step, second.reached_step, second.ending) == (90, 200, "RankFailed")
    assert (third.begin, third.training_time, third.end) == (BEGIN + 706, BEGIN + 760, NOW)
    assert (third.start_step, third.reached_step, third.ending) == (190, 260, "")
    assert first.begin == BEGIN
    assert all(span.is_begin_known and span.is_end_known for span in life.attempts)


def test_first_begin_of_a_job_that_was_suspended_is_known_no_more() -> None:
    resumed = replace(training(), start_time=BEGIN + 600, earlier_seconds=400.0)
    first = lived(resumed, saves=saves_of_training()).attempts[0]
    assert (first.begin, first.is_begin_known) == (BEGIN + 48, False)


def test_steps_fall_back_where_an_attempt_begins() -> None:
    lines = lived(training(), saves=saves_of_training()).lines
    assert [line.attempt for line in lines] == [1, 2, 3]
    assert [(line.points[0][1], line.points[-1][1]) for line in lines] == [(10, 100), (90, 200), (190, 260)]
    assert all(list(line.points) == sorted(line.points) for line in lines)


def test_attempts_that_no_recovery_tells_of_any_more_are_known_by_their_saves() -> None:
    status = replace(
        training(), attempt=13, recoveries=(recovery(12, 900),), last_failure=None, current=attempt(13, 906)
    )
    found = spans(lived(status, saves=[save(2, 20, 120), save(2, 30, 180), save(5, 60, 300)]))
    assert set(found) == {1, 2, 5, 12, 13}
    second = found[2]
    assert (second.begin, second.end, second.reached_step) == (BEGIN + 120, BEGIN + 180, 30)
    assert not second.is_begin_known
    assert not second.is_end_known
    assert lived(status, saves=[save(2, 20, 120)]).unseen == 9


def test_launches_of_this_machine_tell_when_attempts_began() -> None:
    found = spans(lived(training(), launches={1: BEGIN + 1, 2: BEGIN + 307}))
    assert (found[1].begin, found[1].is_begin_known) == (BEGIN + 1, True)
    assert found[2].begin == BEGIN + 306  # the recovery's own time


def test_ranks_that_start_anew_in_place_begin_a_line_and_no_attempt() -> None:
    restarted = recovery(1, 300, in_place_restart=1, cause=Cause.RANK_FAILED)
    current = attempt(1, 0, in_place_restarts=1, restored_time=BEGIN + 356, restored_step=90, first_step=91,
                      first_step_time=BEGIN + 360, newest_step=120, newest_step_time=BEGIN + 500)  # fmt: skip
    status = replace(training(), attempt=1, recoveries=(restarted,), last_failure=None, current=current)
    life = lived(status, saves=[save(1, 90, 270), save(1, 110, 420, restarts=1)])
    assert [(span.attempt, span.end) for span in life.attempts] == [(1, NOW)]
    assert [[step for _, step in line.points] for line in life.lines] == [[90, 100], [90, 90, 91, 110, 120]]


def test_saves_of_an_earlier_job_of_the_same_name_are_left_out_and_counted() -> None:
    life = lived(training(), saves=[save(1, 5, -5000, uid="another"), *saves_of_training()])
    assert life.foreign_saves == 1
    assert life.begin == BEGIN
    assert len(life.saves) == len(saves_of_training())


@pytest.mark.parametrize(
    ("status", "end", "ending"),
    [
        pytest.param(
            replace(training(), state=State.COMPLETE, terminal_state="Complete", completion_time=BEGIN + 999,
                    current=replace(training().current or attempt(3, 0), ended_time=BEGIN + 998)),
            BEGIN + 998, "Complete", id="complete",
        ),
        pytest.param(suspended(), BEGIN + 100, "Suspend", id="suspended"),
        pytest.param(
            replace(suspended(), state=State.FAILED, terminal_state="Failed", completion_time=BEGIN + 120,
                    current=attempt(1, 0, ended_time=BEGIN + 110)),
            BEGIN + 110, "Failed", id="failed",
        ),
    ],
)  # fmt: skip
def test_last_attempt_says_why_it_ended(status: Status, end: float, ending: str) -> None:
    span = lived(status).attempts[-1]
    assert (span.end, span.ending, span.is_end_known) == (end, ending, True)


def test_life_that_is_over_ends_when_the_job_did() -> None:
    over = replace(training(), state=State.COMPLETE, terminal_state="Complete", completion_time=BEGIN + 999)
    assert lived(over, now=BEGIN + 90_000).end == BEGIN + 999


def test_job_that_has_not_begun_has_no_attempts() -> None:
    life = lived(Status())
    assert (life.begin, life.end, life.attempts, life.lines, life.unseen) == (NOW, NOW, (), (), 0)


def test_goodput_so_far_is_what_is_kept_of_the_time_active() -> None:
    status = training()
    # 600 s of attempts that ended, 239 s of this one since it was restored, without 0.1 s of stalls.
    assert goodput_of(status, NOW) == pytest.approx((600 + 239 - 0.1) / 1000, abs=1e-4)
    assert goodput_of(status, NOW + 1000) == pytest.approx((600 + 239 - 0.1) / 2000, abs=1e-4)


def test_goodput_of_a_job_that_is_over_stays() -> None:
    over = replace(training(), terminal_state="Complete", goodput_ratio=0.9)
    assert goodput_of(over, NOW + 1e6) == 0.9


def test_job_without_a_step_has_no_goodput() -> None:
    assert goodput_of(replace(training(), trainer_status=TrainerStatus()), NOW) is None
