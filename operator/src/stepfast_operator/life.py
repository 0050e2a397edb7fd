"""A job's life in time, put together of all that tells of it: status, saves, launches, Events. Pure.

The status remembers the attempt at hand and the last recoveries. What is older is known by its saves, and on this
machine by its launches: an attempt's begin or end that only these tell of is marked as not known exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stepfast.histories import SaveRow
from stepfast.step import attempt_of, split_run
from stepfast_operator.record import Recovery, State, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """An Event of the job; `count`: how often it was seen, last at `time`."""

    time: float
    type: str
    reason: str
    message: str
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSpan:
    """One attempt. `training_time`: its first new step, as far as it is known; `end` of one that goes on is now."""

    attempt: int
    begin: float
    end: float
    is_begin_known: bool
    is_end_known: bool
    training_time: float | None
    start_step: int | None
    reached_step: int | None
    steps_lost: int | None  # of those that it had made, when the next one began
    ending: str  # why it ended; empty where that is not known, or it goes on


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Steps over time, of ranks that were started together."""

    attempt: int
    points: tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """From `begin` to `end`: until it was over, or until now. `unseen` attempts have left no trace but their number."""

    begin: float
    end: float
    attempts: tuple[AttemptSpan, ...]
    unseen: int
    lines: tuple[Line, ...]
    recoveries: tuple[Recovery, ...]
    saves: tuple[SaveRow, ...]
    foreign_saves: int  # of other jobs of the same name
    happenings: tuple[Happening, ...]


def life_of(
    status: Status,
    *,
    uid: str,
    now: float,
    saves: Sequence[SaveRow] = (),
    launches: Mapping[int, float] | None = None,
    happenings: Sequence[Happening] = (),
) -> Life:
    """`saves`: all rows of the job's folder, also of earlier jobs of its name; `launches`: when attempts were launched,
    as far as that is known; `now` in seconds since the epoch.
    """
    own = tuple(sorted((row for row in saves if _is_of(row, uid)), key=lambda row: row.saved_time))
    end = _end_of(status, now)
    traces = {number: _Trace() for number in range(1, status.attempt + 1)}
    for row in own:
        trace = traces.setdefault(attempt_of(row.run), _Trace())
        trace.saves.append(row)
    if 1 in traces and not status.earlier_seconds and status.state is not State.PENDING:
        traces[1].begin = status.start_time  # of a job that was never suspended: when its first attempt was planned
    for number, launched in (launches or {}).items():
        traces.setdefault(number, _Trace()).begin = launched
    for recovery in status.recoveries:
        _take_recovery(traces, recovery)
    _take_failure(traces, status)
    _take_current(traces, status)
    spans = [span for number in sorted(traces) if (span := _span(traces, number, end)) is not None]
    times = [status.start_time, *(span.begin for span in spans), *(row.saved_time for row in own)]
    begin = min((time for time in times if time is not None), default=end)
    return Life(
        begin=begin,
        end=max(begin, end),
        attempts=tuple(spans),
        unseen=len(traces) - len(spans),
        lines=tuple(_lines(traces, status)),
        recoveries=status.recoveries,
        saves=own,
        foreign_saves=len(saves) - len(own),
        happenings=tuple(sorted(happenings, key=lambda each: each.time)),
    )


class _Trace:
    """What is known of one attempt, while it is put together."""

    def __init__(self) -> None:
        self.saves: list[SaveRow] = []
        self.begin: float | None = None
        self.end: float | None = None
        self.training: float | None = None
        self.start_step: int | None = None
        self.reached_step: int | None = None
        self.steps_lost: int | None = None
        self.ending = ""
        self.goes_on = False


def _is_of(row: SaveRow, uid: str) -> bool:
    run, _ = split_run(row.run)
    return run.rpartition("-")[0] == uid


def _end_of(status: Status, now: float) -> float:
    """When the life was over; while it goes on, now. A suspended job's goes on: it waits."""
    return status.completion_time if status.is_terminal and status.completion_time is not None else now


def _take_recovery(traces: dict[int, _Trace], recovery: Recovery) -> None:
    """The end of one attempt and the begin of the next."""
    if recovery.in_place_restart is not None:
        return
    ended = traces.setdefault(recovery.attempt, _Trace())
    ended.end, ended.ending = recovery.failure_time, str(recovery.cause)
    ended.reached_step, ended.steps_lost = recovery.step_before, recovery.steps_lost
    following = traces.get(recovery.attempt + 1)
    if following is None:
        return
    begin = recovery.launched_time or recovery.flushed_time
    following.begin = following.begin if begin is None else begin
    following.training = recovery.resumed_time
    following.start_step = recovery.resumed_from_step


def _take_failure(traces: dict[int, _Trace], status: Status) -> None:
    failure = status.last_failure
    if failure is not None and failure.attempt in traces:
        trace = traces[failure.attempt]
        trace.end, trace.ending = failure.failure_time, str(failure.reason)


def _take_current(traces: dict[int, _Trace], status: Status) -> None:
    """The attempt at hand, of which the status knows most."""
    current = status.current
    if current is None or current.attempt not in traces:
        return
    trace = traces[current.attempt]
    trace.begin = current.planned_time if trace.begin is None else trace.begin
    if not current.in_place_restarts:
        trace.training = current.first_step_time
        trace.start_step = current.start_step
    trace.reached_step = current.newest_step if current.newest_step is not None else trace.reached_step
    trace.goes_on = current.ended_time is None
    if trace.end is None and current.ended_time is not None:
        trace.end = current.ended_time
        trace.ending = str(current.verdict or status.terminal_state or "")
    if status.terminal_state == State.COMPLETE:
        trace.ending = str(State.COMPLETE)


def _span(traces: Mapping[int, _Trace], number: int, end: float) -> AttemptSpan | None:
    """None where nothing tells when the attempt was."""
    trace = traces[number]
    saved = [row.saved_time for row in trace.saves]
    begin = min([time for time in (trace.begin, *saved[:1], trace.end) if time is not None], default=None)
    until = end if trace.goes_on else trace.end
    last = max([time for time in (begin, *saved[-1:], until) if time is not None], default=None)
    if begin is None or last is None:
        return None
    steps = [row.global_step for row in trace.saves]
    return AttemptSpan(
        attempt=number,
        begin=begin,
        end=last,
        is_begin_known=trace.begin is not None,
        is_end_known=until is not None,
        training_time=trace.training,
        start_step=trace.start_step,
        reached_step=max([step for step in (trace.reached_step, *steps) if step is not None], default=None),
        steps_lost=trace.steps_lost,
        ending=trace.ending,
    )


def _lines(traces: Mapping[int, _Trace], status: Status) -> Iterator[Line]:
    """One of each start of the ranks; where they begin and end is known of the last ones."""
    points: dict[tuple[int, int], list[tuple[float, int]]] = {}

    def add(attempt: int, restarts: int, time: float | None, step: int | None) -> None:
        if time is not None and step is not None:
            points.setdefault((attempt, restarts), []).append((time, step))

    for number, trace in traces.items():
        for row in trace.saves:
            add(number, split_run(row.run)[1], row.saved_time, row.global_step)
    for recovery in status.recoveries:
        restart = recovery.in_place_restart
        before = (recovery.attempt, max(0, restart - 1 if restart is not None else _restarts(points, recovery.attempt)))
        after = (recovery.attempt + 1, 0) if restart is None else (recovery.attempt, restart)
        add(*before, recovery.failure_time, recovery.step_before)
        add(*after, recovery.resumed_time, recovery.resumed_from_step)
    current = status.current
    if current is not None:
        key = (current.attempt, current.in_place_restarts)
        began = current.restored_time if current.restored_time is not None else current.pods_ready_time
        add(*key, began if current.first_step_time is not None else None, current.start_step)
        add(*key, current.first_step_time, current.first_step)
        add(*key, current.newest_step_time, current.newest_step)
    for (attempt, _), found in sorted(points.items()):
        yield Line(attempt=attempt, points=tuple(sorted(set(found))))


def _restarts(points: Mapping[tuple[int, int], object], attempt: int) -> int:
    """The last start of that attempt's ranks that is known of."""
    return max((restarts for number, restarts in points if number == attempt), default=0)
