"""What a list shows has to arrive by the watch, too."""

from __future__ import annotations

import pytest

from stepfast_operator import jobwatch
from stepfast_operator.jobwatch import JobWatch


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(jobwatch, "time", clock)
    return clock


def test_quiet_watch_that_told_everything_is_not_dead(clock: Clock) -> None:
    watch = JobWatch()
    watch.note("a", 5)
    watch.compare({"a": 5}, asked=clock.now)
    clock.now += 10_000
    assert watch.age_seconds() == 0


@pytest.mark.parametrize("told", [None, 4], ids=["a job that it never told of", "a change that it did not tell"])
def test_what_the_watch_does_not_tell_makes_it_older_until_it_does(clock: Clock, told: int | None) -> None:
    watch = JobWatch()
    if told is not None:
        watch.note("a", told)
    watch.compare({"a": 5}, asked=clock.now)
    clock.now += 20
    watch.compare({"a": 7}, asked=clock.now)
    clock.now += 5
    assert watch.age_seconds() == 25, "since the first list that showed it"
    watch.note("a", 5)
    watch.compare({"a": 7}, asked=clock.now)
    assert watch.age_seconds() == 0, "what is owed since then is another thing"
    clock.now += 5
    assert watch.age_seconds() == 5
    watch.note("a", 7)
    assert watch.age_seconds() == 0


def test_end_that_the_watch_does_not_tell_makes_it_older(clock: Clock) -> None:
    watch = JobWatch()
    watch.note("a", 5)
    watch.compare({}, asked=clock.now)
    clock.now += 30
    watch.compare({}, asked=clock.now)
    assert watch.age_seconds() == 30
    watch.forget("a")
    assert watch.age_seconds() == 0


def test_job_that_is_made_while_the_list_is_read_is_not_taken_for_one_that_is_gone(clock: Clock) -> None:
    """The list is of a moment before the job, and the watch was faster than its answer."""
    watch = JobWatch()
    watch.note("new", 9)
    watch.compare({}, asked=clock.now)
    clock.now += 20
    watch.compare({"new": 9}, asked=clock.now)
    clock.now += 10_000
    assert watch.age_seconds() == 0


def test_job_that_came_and_went_between_two_lists_is_owed_no_more(clock: Clock) -> None:
    watch = JobWatch()
    watch.compare({"a": 5}, asked=clock.now)
    clock.now += 20
    watch.compare({}, asked=clock.now)
    assert watch.age_seconds() == 0


def test_end_is_remembered_until_the_watch_told_it_even_if_a_late_word_comes_first(clock: Clock) -> None:
    watch = JobWatch()
    watch.note("a", 5)
    watch.compare({}, asked=clock.now)
    clock.now += 10
    watch.note("a", 6)
    assert watch.age_seconds() == 10
