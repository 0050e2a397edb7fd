"""Whether a step is saved, persisted or dropped: decided once for the whole gang. Pure.

Owns I7: rank 0 decides from what all ranks last published and posts it with the step; the others read it. When
staging outruns persisting the newest wins, and older staged steps that nobody waits for are dropped, whole.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from math import sqrt
from statistics import median

from stepfast.errors import GangError
from stepfast.references import MAX_REFERRED
from stepfast.step import OnBusy

CONSULT_SECONDS = 2.0  # how often ranks consult each other even when no save is due: a request to save waits so long
DEFAULT_MTBF_SECONDS = 3 * 3600.0  # between interruptions of a large job: Llama 3, 419 in 54 days
LONGEST_INTERVAL_SECONDS = 3600.0  # of auto
MIN_MTBF_SECONDS = 60.0  # a gang that fails more often than that makes no progress: that is the budget's to end


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """When to save: every so many steps, every so many seconds, or (both None) as Young and Daly advise."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"an interval of {self.steps} steps")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"an interval of {self.seconds} seconds")


def young_daly_seconds(stall_seconds: float, mtbf_seconds: float) -> float:
    """sqrt(2·C·MTBF): the interval that loses least time (J. W. Young 1974, first-order; J. T. Daly 2006)."""
    return min(LONGEST_INTERVAL_SECONDS, max(1.0, sqrt(2.0 * stall_seconds * mtbf_seconds)))


def expected_mtbf_seconds(
    interruptions: int, trained_seconds: float, *, prior_seconds: float = DEFAULT_MTBF_SECONDS
) -> float:
    """How long the job may be expected to train between two interruptions, from what was seen of it so far.

    The mean rate of a Poisson process after `interruptions` in `trained_seconds`, when one in `prior_seconds` was
    expected (the conjugate Gamma prior of shape 1): it begins at the prior, lies between that and what was seen, and
    needs no interruption to have been seen.
    """
    return max(MIN_MTBF_SECONDS, (prior_seconds + max(0.0, trained_seconds)) / (max(0, interruptions) + 1))


def typical_stall_seconds(stalls: Sequence[float]) -> float:
    """What a save costs training: the median, which one slow save (a page fault, a busy disk) does not move."""
    return median(stalls)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What a rank publishes after each consultation."""

    rank: int
    step: int | None = None  # newest step it holds staged
    slots: int = 0  # 0: no agent, saves go straight to the storage
    persisting: tuple[int, ...] = ()
    unpersisted: tuple[int, ...] = ()  # staged and due, persisting included
    waited: tuple[int, ...] = ()
    replicated: str = ""  # digest of the replicated state's layout
    wants_save: bool = False
    referable: tuple[int, ...] = ()  # steps whose files, if committed, hold tensors that it need not save again

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str | bytes) -> RankReport:
        values = json.loads(text)
        for key in ("persisting", "unpersisted", "waited", "referable"):
            values[key] = tuple(values[key])
        return RankReport(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What rank 0 posts: what happens with this step, and at which step the ranks meet next."""

    step: int
    save: bool
    due: bool = False  # persist it
    drop: tuple[int, ...] = field(default=())
    final: bool = False  # wait to be stopped after it
    next_step: int = 0  # the first step at which ranks consult again
    time: float = 0.0
    skipped: bool = False  # it was due to be saved, but memory is exhausted
    refers: tuple[int, ...] = ()  # committed steps that every rank may refer to, for what they hold of its state

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str | bytes) -> Decision:
        values = json.loads(text)
        values["drop"], values["refers"] = tuple(values["drop"]), tuple(values["refers"])
        return Decision(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What rank 0 knows of time: seconds now, per step, since the last save and the last due one."""

    now: float
    step_seconds: float
    last_save_step: int
    last_save_time: float
    last_due_time: float | None
    stall_seconds: float
    mtbf_seconds: float = DEFAULT_MTBF_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Why rank 0 consults: an explicit save, a request to stop, or simply that the step has come."""

    step: int
    explicit: bool = False
    final: bool = False
    must_persist: bool = False


def decide_save(
    request: Request,
    reports: Sequence[RankReport],
    pace: Pace,
    interval: Interval,
    *,
    on_busy: OnBusy,
    persist_interval_seconds: float,
) -> Decision:
    """Decides for the whole gang. Raises GangError when the ranks' replicated states are laid out differently."""
    digests = {report.replicated for report in reports if report.replicated}
    if len(digests) > 1:
        raise GangError(
            "objects declared replicated are laid out differently on different ranks: names, shapes or dtypes"
        )
    wanted = request.explicit or request.final or is_save_step(request.step, pace, interval)
    if wanted and not (request.explicit or request.final) and awaits_storage(reports, pace, interval):
        next_step = request.step + _steps_ahead(pace)
        return Decision(step=request.step, save=False, time=pace.now, next_step=next_step)
    drop = outrun(reports)
    must_save = request.final or request.must_persist
    if wanted and not must_save and on_busy is OnBusy.SKIP and not all(has_room(r, drop) for r in reports):
        return Decision(
            step=request.step,
            save=False,
            skipped=True,
            time=pace.now,
            next_step=next_consult(request.step, pace, interval),
        )
    due = (
        must_save
        # The only slot is the next save's too: what stays in memory alone would be in its way for ever.
        or any(report.slots == 1 for report in reports)
        or pace.last_due_time is None
        or pace.now - pace.last_due_time >= persist_interval_seconds
    )
    after = pace if not wanted else _saved_at(pace, request.step)
    return Decision(
        step=request.step,
        save=wanted,
        due=wanted and due,
        drop=drop if wanted else (),
        final=request.final,
        next_step=next_consult(request.step, after, interval),
        time=pace.now,
    )


def awaits_storage(reports: Sequence[RankReport], pace: Pace, interval: Interval) -> bool:
    """Whether auto lets a save that is due wait: a step is on its way to the storage, and the next one would queue.

    A step that queues is not persisted any sooner for being staged now, and a flush would have to persist both. A
    storage that is away is waited for no longer than auto's longest interval.
    """
    if interval.steps is not None or interval.seconds is not None:
        return False
    if pace.now - pace.last_save_time >= LONGEST_INTERVAL_SECONDS:
        return False
    return any(report.unpersisted for report in reports)


def outrun(reports: Sequence[RankReport]) -> tuple[int, ...]:
    """Due steps that a newer staged step of the whole gang has overtaken, that no rank persists or waits for."""
    staged = [report.step for report in reports]
    common = min((step for step in staged if step is not None), default=None)
    if common is None or None in staged:
        return ()
    kept = {step for report in reports for step in (*report.persisting, *report.waited)}
    held = {step for report in reports for step in report.unpersisted}
    # With fewer than three slots nothing is given up: the newest whole step is then the only one in memory.
    if any(0 < report.slots < 3 for report in reports):
        return ()
    return tuple(sorted(step for step in held - kept if step < common))


def steps_to_refer_to(referable: Iterable[int], committed: Collection[int]) -> tuple[int, ...]:
    """The newest few of the steps that some rank could refer to, of those that are committed; ascending.

    What an older one alone holds is saved once more, and is in a newer step then: so a step never needs many.
    """
    return tuple(sorted(set(referable).intersection(committed))[-MAX_REFERRED:])


def has_room(report: RankReport, drop: Sequence[int]) -> bool:
    """Whether the rank has a slot for the next save without waiting."""
    if report.slots == 0:
        return True
    # A step that was staged to stay in memory alone has to be persisted, too, once somebody waits for it.
    unpersisted = {*report.unpersisted, *report.waited}
    held = {step for step in unpersisted if step not in drop} | ({report.step} if report.step is not None else set())
    newest_is_safe = report.step is not None and report.step not in unpersisted
    return len(held) - newest_is_safe < report.slots


def is_save_step(step: int, pace: Pace, interval: Interval) -> bool:
    """Whether the interval says to save at this step."""
    if interval.steps is not None:
        return step // interval.steps > pace.last_save_step // interval.steps
    return pace.now - pace.last_save_time >= interval_seconds(pace, interval) - pace.step_seconds / 2


def next_consult(step: int, pace: Pace, interval: Interval) -> int:
    """The next step at which all ranks consult: when a save falls due, or `CONSULT_SECONDS` from now."""
    if interval.steps is not None:
        save_step = (max(step, pace.last_save_step) // interval.steps + 1) * interval.steps
    else:
        left = pace.last_save_time + interval_seconds(pace, interval) - pace.now
        save_step = step + max(1, int(left / pace.step_seconds)) if pace.step_seconds > 0 else step + 1
    return min(save_step, step + _steps_ahead(pace))


def _steps_ahead(pace: Pace) -> int:
    return max(1, int(CONSULT_SECONDS / pace.step_seconds)) if pace.step_seconds > 0 else 1


def interval_seconds(pace: Pace, interval: Interval) -> float:
    """How long after the last save the next one falls due, unless the interval counts steps."""
    if interval.seconds is not None:
        return interval.seconds
    return young_daly_seconds(pace.stall_seconds, pace.mtbf_seconds)


def _saved_at(pace: Pace, step: int) -> Pace:
    return Pace(
        now=pace.now,
        step_seconds=pace.step_seconds,
        last_save_step=step,
        last_save_time=pace.now,
        last_due_time=pace.last_due_time,
        stall_seconds=pace.stall_seconds,
        mtbf_seconds=pace.mtbf_seconds,
    )
