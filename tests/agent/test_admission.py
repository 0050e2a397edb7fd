"""Whether the gang saves, persists or drops a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from stepfast.admission import (
    Decision,
    Interval,
    Pace,
    RankReport,
    Request,
    awaits_storage,
    decide_save,
    has_room,
    is_save_step,
    next_consult,
    outrun,
    steps_to_refer_to,
    young_daly_seconds,
)
from stepfast.errors import GangError
from stepfast.step import OnBusy

PACE = Pace(now=100.0, step_seconds=1.0, last_save_step=10, last_save_time=90.0, last_due_time=90.0, stall_seconds=0.1)
EVERY_10 = Interval(steps=10)


def report(
    rank: int = 0,
    step: int | None = None,
    *,
    slots: int = 3,
    persisting: tuple[int, ...] = (),
    unpersisted: tuple[int, ...] = (),
    waited: tuple[int, ...] = (),
    replicated: str = "",
) -> RankReport:
    return RankReport(
        rank=rank,
        step=step,
        slots=slots,
        persisting=persisting,
        unpersisted=unpersisted,
        waited=waited,
        replicated=replicated,
    )


def decide(
    request: Request,
    *reports: RankReport,
    pace: Pace = PACE,
    on_busy: OnBusy = OnBusy.WAIT,
    seconds: float = 0.0,
) -> Decision:
    return decide_save(
        request, reports or (report(),), pace, EVERY_10, on_busy=on_busy, persist_interval_seconds=seconds
    )


FULL = report(step=30, persisting=(10,), unpersisted=(10, 20, 30), waited=(20,))


@pytest.mark.parametrize(
    ("request_", "reports", "on_busy", "saves", "skips"),
    [
        (Request(step=19), (), OnBusy.WAIT, False, False),
        (Request(step=20), (), OnBusy.WAIT, True, False),
        (Request(step=27), (), OnBusy.WAIT, True, False),
        (Request(step=11, explicit=True), (), OnBusy.WAIT, True, False),
        (Request(step=11, final=True), (), OnBusy.SKIP, True, False),
        (Request(step=40), (FULL,), OnBusy.WAIT, True, False),
        (Request(step=40), (FULL,), OnBusy.SKIP, False, True),
        (Request(step=40), (report(), FULL), OnBusy.SKIP, False, True),
        (Request(step=40, final=True), (FULL,), OnBusy.SKIP, True, False),
        (Request(step=39), (FULL,), OnBusy.SKIP, True, False),
        (Request(step=11), (FULL,), OnBusy.SKIP, False, False),
    ],
    ids=[
        "not-due",
        "due",
        "late",
        "explicit",
        "final",
        "full-waits",
        "full-skips",
        "one-rank-full-skips-all",
        "final-is-never-skipped",
        "overdue-has-room-after-drop",
        "full-but-not-due",
    ],
)
def test_gang_saves_skips_or_goes_on(
    request_: Request, reports: tuple[RankReport, ...], on_busy: OnBusy, saves: bool, skips: bool
) -> None:
    if request_.step == 39:
        reports = (report(step=30, unpersisted=(20, 30)),)
    decision = decide(request_, *reports, on_busy=on_busy)
    assert (decision.save, decision.skipped) == (saves, skips)
    assert decision.next_step > request_.step
    assert not (decision.skipped and decision.drop)


@pytest.mark.parametrize(
    ("request_", "last_due", "interval", "due"),
    [
        (Request(step=20), 90.0, 0.0, True),
        (Request(step=20), 90.0, 60.0, False),
        (Request(step=20), 40.0, 60.0, True),
        (Request(step=20), None, 60.0, True),
        (Request(step=20, must_persist=True), 90.0, 60.0, True),
        (Request(step=20, final=True), 90.0, 60.0, True),
        (Request(step=11), None, 0.0, False),
    ],
    ids=[
        "every-step",
        "too-early",
        "interval-over",
        "first",
        "must-persist",
        "final",
        "no-save-is-never-due",
    ],
)
def test_saved_step_is_persisted_once_the_interval_has_passed(
    request_: Request, last_due: float | None, interval: float, due: bool
) -> None:
    assert decide(request_, pace=replace(PACE, last_due_time=last_due), seconds=interval).due is due


@pytest.mark.parametrize(
    ("reports", "dropped"),
    [
        ((), ()),
        ((report(),), ()),
        ((report(step=30, unpersisted=(20, 30)),), (20,)),
        ((report(step=30, persisting=(20,), unpersisted=(20, 30)),), ()),
        ((report(step=30, unpersisted=(20, 30), waited=(20,)),), ()),
        ((report(0, 30, unpersisted=(20, 30)), report(1, 20, unpersisted=(20,))), ()),
        ((report(0, 30, unpersisted=(20, 30)), report(1, None)), ()),
        ((report(0, 30, unpersisted=(20, 30)), report(1, 30, unpersisted=(30,), persisting=(20,))), ()),
        ((report(0, 30, unpersisted=(10, 20)), report(1, 30, unpersisted=(20,))), (10, 20)),
        ((report(step=30, slots=2, unpersisted=(20, 30)),), ()),
        ((report(0, 30, unpersisted=(20, 30)), report(1, 30, slots=0)), (20,)),
    ],
    ids=[
        "nobody",
        "nothing-held",
        "overtaken",
        "persisting",
        "waited-for",
        "not-yet-staged-by-all",
        "one-rank-holds-nothing",
        "another-rank-persists",
        "union-of-ranks",
        "two-slots",
        "one-rank-without-agent",
    ],
)
def test_steps_that_the_whole_gang_has_overtaken_are_dropped(
    reports: tuple[RankReport, ...], dropped: tuple[int, ...]
) -> None:
    assert outrun(reports) == dropped


@pytest.mark.parametrize(
    ("held", "drop", "room"),
    [
        (report(slots=0), (), True),
        (report(slots=1), (), True),
        (report(step=10, slots=1), (), True),
        (report(step=10, slots=1, unpersisted=(10,)), (), False),
        (report(step=20, slots=2, unpersisted=(10, 20)), (), False),
        (report(step=20, slots=2, unpersisted=(10, 20)), (10,), True),
        (report(step=30, slots=3, unpersisted=(10, 20)), (), True),
        (report(step=30, slots=3, unpersisted=(10,), waited=(10, 20, 30)), (), False),
        (report(step=30, slots=3, unpersisted=(10,), waited=(10, 20)), (), True),
    ],
    ids=[
        "no-agent",
        "empty",
        "persisted",
        "one-slot-due",
        "two-due",
        "one-dropped",
        "newest-persisted",
        "all-waited-for",
        "newest-waited-for-by-nobody",
    ],
)
def test_rank_has_room_when_a_slot_is_free_of_what_must_be_persisted(
    held: RankReport, drop: tuple[int, ...], room: bool
) -> None:
    assert has_room(held, drop) is room


@pytest.mark.parametrize(
    ("step", "interval", "pace", "expected"),
    [
        (10, EVERY_10, PACE, 12),
        (19, EVERY_10, PACE, 20),
        (10, EVERY_10, replace(PACE, step_seconds=0.1), 20),
        (10, EVERY_10, replace(PACE, step_seconds=0.0), 11),
        (10, EVERY_10, replace(PACE, step_seconds=60.0), 11),
        (10, Interval(seconds=11.0), PACE, 11),
        (10, Interval(seconds=1.0), PACE, 11),
        (10, Interval(seconds=500.0), PACE, 12),
    ],
    ids=[
        "two-seconds",
        "save-comes-first",
        "fast-steps",
        "unknown-pace",
        "slow-steps",
        "nearly",
        "overdue",
        "far",
    ],
)
def test_ranks_consult_at_the_next_save_or_after_two_seconds(
    step: int, interval: Interval, pace: Pace, expected: int
) -> None:
    assert next_consult(step, pace, interval) == expected


@pytest.mark.parametrize(
    ("stall", "mtbf", "seconds"),
    [(0.0, 3600.0, 1.0), (0.5, 10_000.0, 100.0), (10.0, 1e9, 3600.0), (2.0, 3600.0, 120.0)],
    ids=["no-stall", "half-a-second", "capped", "two-seconds"],
)
def test_interval_is_that_of_young_and_daly(stall: float, mtbf: float, seconds: float) -> None:
    assert young_daly_seconds(stall, mtbf) == pytest.approx(seconds)


AUTO_DUE = replace(PACE, now=10_000.0, last_save_time=9_000.0, step_seconds=0.1)
UPLOADING = report(step=10, persisting=(10,), unpersisted=(10,))


@pytest.mark.parametrize(
    ("interval", "reports", "pace", "waits"),
    [
        (Interval(), (UPLOADING,), AUTO_DUE, True),
        (Interval(), (report(), UPLOADING), AUTO_DUE, True),
        (Interval(), (report(step=10),), AUTO_DUE, False),
        (Interval(), (report(slots=0),), AUTO_DUE, False),
        (Interval(), (UPLOADING,), replace(AUTO_DUE, last_save_time=6_400.0), False),
        (Interval(seconds=10.0), (UPLOADING,), AUTO_DUE, False),
        (Interval(steps=10), (UPLOADING,), AUTO_DUE, False),
    ],
    ids=["uploading", "one-rank", "persisted", "no-agent", "an-hour", "fixed-seconds", "fixed-steps"],
)
def test_auto_waits_for_the_storage_and_nothing_else_does(
    interval: Interval, reports: tuple[RankReport, ...], pace: Pace, waits: bool
) -> None:
    assert awaits_storage(reports, pace, interval) is waits
    decision = decide_save(
        Request(step=20), reports, pace, interval, on_busy=OnBusy.WAIT, persist_interval_seconds=0.0
    )  # fmt: skip
    assert decision.save is not waits
    if waits:
        assert decision.next_step == 40  # asked again in two seconds, not at each step
    for asked in (Request(step=20, explicit=True), Request(step=20, final=True)):
        assert decide_save(
            asked, reports, pace, interval, on_busy=OnBusy.WAIT, persist_interval_seconds=0.0
        ).save  # fmt: skip


def test_interval_of_seconds_is_kept_to_the_nearest_step() -> None:
    assert not is_save_step(11, PACE, Interval(seconds=11.0))
    assert is_save_step(11, PACE, Interval(seconds=10.4))


@pytest.mark.parametrize("values", [{"steps": 0}, {"seconds": 0.0}, {"seconds": float("nan")}], ids=str)
def test_interval_that_cannot_be_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="interval"):
        Interval(**values)  # type: ignore[arg-type]  # wrong on purpose


def test_ranks_with_differently_divided_state_are_an_error() -> None:
    with pytest.raises(GangError):
        decide(Request(step=20), report(0, replicated="a"), report(1, replicated="b"), report(2))


@pytest.mark.parametrize(
    ("referable", "committed", "refers"),
    [
        ([], [1, 2], ()),
        ([3, 1], [1, 2, 3], (1, 3)),
        ([1, 2, 3], [2], (2,)),
        (range(20), range(20), tuple(range(12, 20))),
    ],
    ids=["nothing settled", "what is held", "not what is on its way", "the newest few"],
)
def test_gang_refers_to_the_newest_committed_steps_that_hold_something(
    referable: Iterable[int], committed: Iterable[int], refers: tuple[int, ...]
) -> None:
    assert steps_to_refer_to(referable, set(committed)) == refers


def test_reports_and_decisions_travel_as_they_are() -> None:
    said = report(1, 30, persisting=(1,), unpersisted=(1, 2), waited=(3,), replicated="x")
    said = replace(said, referable=(10, 20))
    assert RankReport.from_json(said.to_json()) == said
    decided = Decision(step=5, save=True, due=True, drop=(1, 2), final=True, next_step=7, time=1.5, refers=(3, 4))
    assert Decision.from_json(decided.to_json()) == decided
