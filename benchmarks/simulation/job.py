"""One job's life under one failure trace: a discrete-event simulation. Pure; times are seconds.

When a save falls due is what `stepfast.pacing` and `stepfast.admission` say, as shipped, given the simulated stalls
and failures. All else is a model:

 - training goes on between saves; a save stops it for the stall (and, without an agent, until the storage has it);
 - one step at a time is persisted, the newest staged one next; steps staged meanwhile are dropped, as the gang does;
 - a failure ends the gang, and takes what only its processes held; then come the restart and the restore;
 - a failure during those begins them anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, inf

from benchmarks.simulation.traces import Failure

from stepfast.admission import LONGEST_INTERVAL_SECONDS, Interval, interval_seconds
from stepfast.pacing import PaceKeeper


class System(StrEnum):
    """What becomes of a save, each with what those before it have."""

    BLOCKING = "blocking torch.save to blob"
    ASYNCHRONOUS = "asynchronous persistence"  # staged in the training process: lost with it
    MEMORY = "+ memory tier"  # staged with an agent: the committed step is restored from memory
    FLUSH = "+ flush at failure"  # what is staged is persisted before the gang starts again


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """In seconds. The defaults are assumptions for some 3 GB a GPU: a copy to host memory; 0.4 GB/s of a shared blob
    storage for each node of 8; a restart that schedules pods, imports torch and builds communicators.
    """

    stall: float = 0.5
    persist: float = 60.0
    restore_memory: float = 5.0
    restore_storage: float = 60.0
    restart: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Where the time of a job went: seconds of training that was kept and lost, stalled, and not trained at all."""

    horizon: float
    kept: float
    lost: float
    stalled: float
    down: float
    saves: int
    failures: int

    @property
    def goodput(self) -> float:
        """The share of all time whose training was kept."""
        return self.kept / self.horizon


@dataclass(slots=True)
class _Persisting:
    """What the storage has, and what it is getting. `work`: seconds of training that a step holds."""

    persist_seconds: float
    persisted: float  # work
    staged: float  # work
    uploading: float | None = None  # work
    until: float = inf

    def advance(self, now: float) -> None:
        """What the storage has by then."""
        while self.uploading is not None and self.until <= now:
            self.persisted, self.uploading = self.uploading, None
            if self.staged > self.persisted:
                self._begin(self.until)

    def stage(self, work: float, now: float) -> None:
        self.advance(now)
        self.staged = work
        if self.uploading is None:
            self._begin(now)

    def _begin(self, now: float) -> None:
        self.uploading, self.until = self.staged, now + self.persist_seconds

    def flush_seconds(self, now: float) -> float:
        """How long it takes until the newest staged step is persisted."""
        if self.uploading is None:
            return 0.0
        return self.until - now + (self.persist_seconds if self.staged > self.uploading else 0.0)


class _Attempt:
    """From a start to the failure."""

    def __init__(
        self, now: float, work: float, *, interval: Interval, system: System, costs: Costs, keeper: PaceKeeper
    ) -> None:
        self._now, self._interval, self._keeper = now, interval, keeper
        self.begin, self.begin_work, self.work = now, work, work
        self.saves, self.stalled = 0, 0.0
        is_blocking = system is System.BLOCKING
        self._stall = costs.stall + (costs.persist if is_blocking else 0.0)
        self.tier = _Persisting(0.0 if is_blocking else costs.persist, work, work)

    def run(self, end: float, *, may_skip: bool = True) -> None:
        """Trains and saves until then."""
        if may_skip and self._interval.seconds is not None:
            self._skip(end, self._interval.seconds)
        while True:
            interval = self._seconds_to_save()
            if self._now + interval + self._stall > end:
                break
            self._now += interval + self._stall
            self.work += interval
            self._count(1)
            self._keeper.save(self.saves, self._now, stall_seconds=self._stall, is_due=True)
            self.tier.stage(self.work, self._now)
        trained = min(interval, end - self._now)
        self.stalled += end - self._now - trained  # in the middle of a save
        self.work += trained
        self.tier.advance(end)

    def _seconds_to_save(self) -> float:
        """From the last save to the next. Auto waits while a step is on its way to the storage (`awaits_storage`)."""
        seconds = interval_seconds(self._keeper.pace(self._now), self._interval)
        if self._interval.seconds is not None or self.tier.uploading is None:
            return seconds
        return max(seconds, min(self.tier.until - self._now, LONGEST_INTERVAL_SECONDS))

    def _count(self, saves: int) -> None:
        self.saves += saves
        self.stalled += saves * self._stall

    def _skip(self, end: float, interval: float) -> None:
        """Saves that no later failure can fall back to, all at once: with a fixed interval each is like the other."""
        period, persist = interval + self._stall, self.tier.persist_seconds
        count = int((end - self._now) / period) - ceil(2 * persist / period) - 3
        if count < 1:
            return
        last = (count - 1) * period  # from the first save to the last that is skipped
        begun = int(last / persist) * persist if persist > period else last  # uploads follow each other
        before = begun - persist if persist > period else begun - period
        base = self.begin + period
        self._now = base + last
        self.work = self.begin_work + count * interval
        self.tier.staged = self.work
        self.tier.uploading, self.tier.until = self._saved_by(begun, period, interval), base + begun + persist
        self.tier.persisted = self._saved_by(before, period, interval) if before >= 0 else self.begin_work
        self._count(count)

    def _saved_by(self, seconds: float, period: float, interval: float) -> float:
        """The work of the newest save so long after the first one."""
        return self.begin_work + (int(seconds / period + 1e-9) + 1) * interval


def simulate(
    failures: Sequence[Failure],
    interval: Interval,
    system: System,
    horizon: float,
    costs: Costs | None = None,
    *,
    may_skip: bool = True,
) -> Outcome:
    """The job's life until the horizon. `Interval()` is auto. `may_skip` takes a short cut that changes nothing."""
    costs = costs or Costs()
    now = work = lost = stalled = down = trained = 0.0
    saves = interruptions = 0
    coming = [*failures, Failure(time=horizon, loses_node=False)]
    index = 0
    while now < horizon:
        keeper = PaceKeeper(now, interruptions=interruptions, trained_seconds=trained)
        attempt = _Attempt(now, work, interval=interval, system=system, costs=costs, keeper=keeper)
        failure = coming[index]
        index += 1
        attempt.run(failure.time, may_skip=may_skip)
        saves, stalled, now = saves + attempt.saves, stalled + attempt.stalled, failure.time
        trained += now - attempt.begin
        if now >= horizon:
            work = attempt.work
            break
        interruptions += 1
        work, recovery = _recover(attempt, failure, system, costs)
        lost += attempt.work - work
        while now + recovery > coming[index].time and coming[index].time < horizon:
            down += coming[index].time - now
            now, interruptions = coming[index].time, interruptions + 1
            lost_node = coming[index].loses_node or system in (System.BLOCKING, System.ASYNCHRONOUS)
            recovery = costs.restart + (costs.restore_storage if lost_node else costs.restore_memory)
            index += 1
        down += min(recovery, horizon - now)
        now += recovery
    return Outcome(
        horizon=horizon, kept=work, lost=lost, stalled=stalled, down=down, saves=saves, failures=interruptions
    )


def _recover(attempt: _Attempt, failure: Failure, system: System, costs: Costs) -> tuple[float, float]:
    """The work that the next attempt goes on from, and the seconds until it does."""
    tier = attempt.tier
    if system in (System.BLOCKING, System.ASYNCHRONOUS) or failure.loses_node:
        return tier.persisted, costs.restart + costs.restore_storage
    if system is System.MEMORY:
        return tier.persisted, costs.restart + costs.restore_memory
    return tier.staged, tier.flush_seconds(failure.time) + costs.restart + costs.restore_memory
