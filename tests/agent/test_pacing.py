"""The stall and the failures that `interval: auto` follows."""

from __future__ import annotations

from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfast.admission import (
    DEFAULT_MTBF_SECONDS,
    MIN_MTBF_SECONDS,
    Interval,
    expected_mtbf_seconds,
    interval_seconds,
    typical_stall_seconds,
)
from stepfast.pacing import PaceKeeper

HOUR = 3600.0
counts = st.integers(min_value=0, max_value=10_000)
times = st.floats(min_value=0.0, max_value=1e9)


@pytest.mark.parametrize(
    ("interruptions", "trained", "expected"),
    [
        (0, 0.0, 3 * HOUR),
        (0, 24 * HOUR, 27 * HOUR),
        (1, 0.0, 1.5 * HOUR),
        (1, 3 * HOUR, 3 * HOUR),
        (7, HOUR, HOUR / 2),
        (418, 54 * 24 * HOUR, 3.1 * HOUR),
        (10_000, 0.0, MIN_MTBF_SECONDS),
        (0, -5.0, 3 * HOUR),
    ],
    ids=[
        "nothing-known", "never-failed", "failed-at-once", "as-expected", "every-ten-minutes", "llama-3", "crash-loop",
        "clock-set-back",
    ],
)  # fmt: skip
def test_mtbf_follows_what_was_seen(interruptions: int, trained: float, expected: float) -> None:
    assert expected_mtbf_seconds(interruptions, trained) == pytest.approx(expected, rel=0.01)


@given(counts, times, times)
def test_mtbf_falls_with_each_interruption_and_grows_with_time(interruptions: int, trained: float, more: float) -> None:
    now = expected_mtbf_seconds(interruptions, trained)
    assert (
        expected_mtbf_seconds(interruptions + 1, trained) <= now <= expected_mtbf_seconds(interruptions, trained + more)
    )


@given(counts.filter(bool), times)
def test_mtbf_lies_between_what_was_expected_and_what_was_seen(interruptions: int, trained: float) -> None:
    low, high = sorted((DEFAULT_MTBF_SECONDS, trained / interruptions))
    estimate = expected_mtbf_seconds(interruptions, trained)
    assert max(MIN_MTBF_SECONDS, low * (1 - 1e-9)) <= estimate <= max(MIN_MTBF_SECONDS, high * (1 + 1e-9))


def test_one_slow_save_does_not_move_the_typical_stall() -> None:
    assert typical_stall_seconds([0.1, 0.1, 30.0, 0.11, 0.1]) == 0.1


def saved(keeper: PaceKeeper, *stalls: float) -> PaceKeeper:
    for step, stall in enumerate(stalls, start=1):
        keeper.save(step, float(step), stall_seconds=stall, is_due=True)
    return keeper


def test_interval_grows_while_nothing_fails_and_shrinks_with_failures() -> None:
    auto = Interval()
    calm = saved(PaceKeeper(0.0), 0.5)
    assert interval_seconds(calm.pace(0.0), auto) == pytest.approx(sqrt(2 * 0.5 * 3 * HOUR))
    assert interval_seconds(calm.pace(24 * HOUR), auto) == pytest.approx(sqrt(2 * 0.5 * 27 * HOUR))
    failing = saved(PaceKeeper(0.0, interruptions=7, trained_seconds=HOUR), 0.5)
    assert interval_seconds(failing.pace(0.0), auto) == pytest.approx(sqrt(HOUR / 2))


def test_mtbf_that_the_user_said_stays() -> None:
    keeper = PaceKeeper(0.0, mtbf_seconds=100.0, interruptions=5, trained_seconds=1e6)
    assert keeper.pace(1e6).mtbf_seconds == 100.0


def test_a_lasting_change_of_the_stall_is_followed() -> None:
    keeper = saved(PaceKeeper(0.0), *[0.1] * 9, *[2.0] * 4)
    assert keeper.pace(0.0).stall_seconds == 0.1
    assert saved(keeper, 2.0).pace(0.0).stall_seconds == 2.0


def test_time_before_the_restore_is_no_training() -> None:
    keeper = PaceKeeper(0.0)
    keeper.restore(40, 600.0)
    assert keeper.pace(600.0).mtbf_seconds == DEFAULT_MTBF_SECONDS
    assert (keeper.pace(600.0).last_save_step, keeper.pace(600.0).last_save_time) == (40, 600.0)


def test_step_time_leaves_out_what_is_done_between_steps() -> None:
    keeper = PaceKeeper(0.0)
    keeper.leave(1, 1.0)
    keeper.reach(2, 3.0)
    keeper.leave(2, 50.0)  # a long save
    keeper.reach(3, 52.0)
    assert keeper.pace(52.0).step_seconds == pytest.approx(2.0)
    assert keeper.last_step == 2
