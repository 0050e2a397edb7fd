"""Retries under one deadline, with a clock that only sleeps move."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stepfast.errors import ObjectNotFound, StorageForbidden, StorageFull, StorageUnavailable
from stepfast.storage.retry import Attempt, Retry


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.sleeps: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


def failing(times: int, attempts: list[Attempt]) -> Callable[[Attempt], str]:
    def operation(attempt: Attempt) -> str:
        attempts.append(attempt)
        if len(attempts) <= times:
            raise StorageUnavailable("read x: 503")
        return "done"

    return operation


def retry(clock: Clock, jitter: float = 1.0, deadline_seconds: float = 60.0) -> Retry:
    return Retry(deadline_seconds=deadline_seconds, clock=lambda: clock.now, sleep=clock.sleep, jitter=lambda: jitter)


def test_passing_failures_are_retried_with_doubling_delays_up_to_the_maximum() -> None:
    clock = Clock()
    attempts: list[Attempt] = []
    assert retry(clock).run(failing(8, attempts)) == "done"
    assert clock.sleeps == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert [attempt.number for attempt in attempts] == list(range(9))


def test_service_is_left_alone_as_long_as_it_asks() -> None:
    clock = Clock()
    asked = StorageUnavailable("read x: 429")
    asked.retry_after_seconds = 7.0
    failures = [asked, StorageUnavailable("read x: 503")]

    def operation(_: Attempt) -> str:
        if failures:
            raise failures.pop(0)
        return "done"

    assert retry(clock).run(operation) == "done"
    assert clock.sleeps == [7.1, 0.2]


def test_wait_that_the_deadline_does_not_leave_is_not_begun() -> None:
    clock = Clock()
    asked = StorageUnavailable("read x: 429")
    asked.retry_after_seconds = 90.0

    def operation(_: Attempt) -> str:
        raise asked

    with pytest.raises(StorageUnavailable) as raised:
        retry(clock).run(operation)
    assert clock.sleeps == []
    assert raised.value.retry_after_seconds == 90.0  # for whoever tries again later


@pytest.mark.parametrize("jitter", [0.0, 0.5, 1.0], ids=["none", "half", "full"])
def test_jitter_takes_any_part_of_the_delay(jitter: float) -> None:
    clock = Clock()
    retry(clock, jitter).run(failing(2, []))
    assert clock.sleeps == [0.1 * jitter, 0.2 * jitter]


def test_an_operation_never_sleeps_past_its_deadline() -> None:
    clock = Clock()
    attempts: list[Attempt] = []
    with pytest.raises(StorageUnavailable, match=r"read x: 503 \(attempts: 4, in 0\.7 s\)") as caught:
        retry(clock, deadline_seconds=1.0).run(failing(99, attempts))
    assert sum(clock.sleeps) < 1.0
    assert isinstance(caught.value.__cause__, StorageUnavailable)


def test_failure_before_an_attempt_that_the_deadline_cut_off_is_told() -> None:
    clock = Clock()

    def operation(attempt: Attempt) -> str:
        if attempt.number < 2:
            raise StorageUnavailable("read x: 503")
        clock.now += attempt.remaining_seconds
        raise StorageUnavailable("read x: no answer in time")

    told = r"^read x: no answer in time \(attempts: 3, in 1\.0 s; the one before: read x: 503\)$"
    with pytest.raises(StorageUnavailable, match=told):
        retry(clock, deadline_seconds=1.0).run(operation)


def test_attempts_know_what_the_deadline_leaves_them() -> None:
    clock = Clock()
    attempts: list[Attempt] = []
    retry(clock, deadline_seconds=10.0).run(failing(2, attempts))
    assert [round(attempt.remaining_seconds, 3) for attempt in attempts] == [10.0, 9.9, 9.7]


def test_an_attempt_that_used_up_the_deadline_is_the_last() -> None:
    clock = Clock()

    def slow(_: Attempt) -> None:
        clock.now += 61
        raise StorageUnavailable("timed out")

    with pytest.raises(StorageUnavailable, match="attempts: 1"):
        retry(clock).run(slow)
    assert clock.sleeps == []


@pytest.mark.parametrize(
    "error", [ObjectNotFound("x"), StorageForbidden("x"), StorageFull("x"), ValueError("x")], ids=repr
)
def test_what_will_not_pass_is_raised_at_once(error: Exception) -> None:
    clock = Clock()

    def operation(_: Attempt) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        retry(clock).run(operation)
    assert caught.value is error
    assert clock.sleeps == []
