"""The simulated life of a job: against the closed form, and against itself."""

from __future__ import annotations

from math import exp, sqrt
from statistics import fmean, stdev

import pytest
from benchmarks.simulation.job import Costs, Outcome, System, simulate
from benchmarks.simulation.traces import DAY, HOUR, Failure, all_traces, exponential, read_times, recorded, weibull
from benchmarks.simulation.traces import RECORDED as FILE

from stepfast.admission import Interval

AUTO = Interval()
BARE = Costs(stall=5.0, persist=0.0, restore_memory=0.0, restore_storage=0.0, restart=60.0)


def failed(*times: float, loses_node: bool = False) -> list[Failure]:
    return [Failure(time=time, loses_node=loses_node) for time in times]


@pytest.mark.parametrize(("mtbf", "interval"), [(HOUR, 60.0), (HOUR, 600.0), (3 * HOUR, 1800.0)])
def test_goodput_is_that_of_the_closed_form_for_exponential_failures(mtbf: float, interval: float) -> None:
    """Daly 2006, equation 13: T of work takes M·exp(R/M)·(exp((T + C)/M) − 1)."""
    horizon = 400 * mtbf
    trace = exponential("closed form", mtbf, horizon)
    found = [
        simulate(trace.draw(seed, 0.0), Interval(seconds=interval), System.BLOCKING, horizon, BARE).goodput
        for seed in range(40)
    ]
    expected = interval / (mtbf * exp(BARE.restart / mtbf) * (exp((interval + BARE.stall) / mtbf) - 1))
    assert fmean(found) == pytest.approx(expected, abs=4 * stdev(found) / sqrt(len(found)) + 1e-4)


@pytest.mark.parametrize("system", System)
@pytest.mark.parametrize("interval", [Interval(seconds=10), Interval(seconds=45), Interval(seconds=600), AUTO], ids=str)
def test_time_is_accounted_for_to_the_second(system: System, interval: Interval) -> None:
    trace = weibull("accounts", HOUR, 5 * DAY)
    seen = simulate(trace.draw(1, 0.3), interval, system, trace.horizon_seconds)
    assert seen.kept + seen.lost + seen.stalled + seen.down == pytest.approx(seen.horizon)
    assert seen.failures == len(trace.draw(1, 0.3))


@pytest.mark.parametrize("system", System)
@pytest.mark.parametrize("seconds", [10.0, 45.0, 60.0, 600.0])
def test_the_short_cut_changes_nothing(system: System, seconds: float) -> None:
    trace = exponential("short cut", 2 * HOUR, 5 * DAY)
    runs = [
        simulate(trace.draw(2, 0.3), Interval(seconds=seconds), system, trace.horizon_seconds, may_skip=may_skip)
        for may_skip in (True, False)
    ]
    assert runs[0].saves == runs[1].saves
    assert [runs[0].kept, runs[0].lost, runs[0].down] == pytest.approx([runs[1].kept, runs[1].lost, runs[1].down])


COSTS = Costs(stall=1.0, persist=30.0, restore_memory=5.0, restore_storage=50.0, restart=100.0)


@pytest.mark.parametrize(
    ("system", "loses_node", "kept", "down"),
    [
        (System.BLOCKING, False, 200.0, 150.0),  # saves take 31 s: at 131, 262; the failure at 310
        (System.ASYNCHRONOUS, False, 200.0, 150.0),  # staged at 101, 202, 303; the last is half persisted at 310
        (System.MEMORY, False, 200.0, 105.0),
        (System.FLUSH, False, 300.0, 128.0),  # 23 s of it are the flush
        (System.FLUSH, True, 200.0, 150.0),
    ],
)
def test_what_a_failure_costs(system: System, loses_node: bool, kept: float, down: float) -> None:
    horizon = 310.0 + down
    seen = simulate(failed(310.0, loses_node=loses_node), Interval(seconds=100), system, horizon, COSTS)
    assert (seen.kept, seen.down) == pytest.approx((kept, down))


def test_failure_during_the_recovery_begins_it_anew() -> None:
    seen = simulate(failed(310.0, 400.0), Interval(seconds=100), System.MEMORY, 505.0, COSTS)
    assert (seen.failures, seen.down, seen.kept) == (2, 195.0, 200.0)


def test_newest_staged_step_is_persisted_next_when_saves_outrun_the_storage() -> None:
    seen = simulate(failed(66.0), Interval(seconds=9), System.ASYNCHRONOUS, 216.0, COSTS)
    # Staged at 10, 20, … 60; persisted: that of 10 by 40, that of 40 not before 70.
    assert seen.kept == 9.0


def mean(seen: list[Outcome]) -> float:
    return fmean(outcome.goodput for outcome in seen)


@pytest.mark.parametrize("trace", all_traces(), ids=lambda trace: trace.name)
def test_auto_is_within_a_hair_of_the_best_fixed_interval(trace: object) -> None:
    assert isinstance(trace, type(all_traces()[0]))
    traces = [trace.draw(seed, 0.2) for seed in range(4)]

    def run(interval: Interval) -> float:
        return mean([simulate(one, interval, System.FLUSH, trace.horizon_seconds) for one in traces])

    fixed = [run(Interval(seconds=seconds)) for seconds in (10, 60, 600, 1800, 3600)]
    assert run(AUTO) >= max(fixed) - 0.005


def test_traces_are_the_same_for_the_same_seed_and_have_the_mean_that_they_say() -> None:
    for trace in all_traces():
        assert trace.draw(3, 0.2) == trace.draw(3, 0.2)
        assert trace.draw(3, 0.2) != trace.draw(4, 0.2)
        assert [f.time for f in trace.draw(3, 0.2)] == [f.time for f in trace.draw(3, 0.9)]
    long = weibull("long", HOUR, 20_000 * HOUR)
    assert len(long.draw(1, 0.0)) == pytest.approx(20_000, rel=0.05)


def test_recorded_trace_is_whole_and_runs_faster_for_more_servers() -> None:
    times = read_times(FILE)
    assert len(times) == 457
    assert times == sorted(times)
    assert recorded("a", DAY, servers=800).mtbf_seconds == pytest.approx(recorded("b", DAY).mtbf_seconds / 2)
