"""The account of a job that was disturbed: its end, its ledger (`status.recoveries`), the API server's audit log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from testjobs.gangs import made_pods, overlapping_gangs
from testjobs.job import SAVE_EVERY, SECONDS, STEPS, Job
from testjobs.matrix import BIT_EXACT, Findings

COMMITTED = 4 * SAVE_EVERY  # before anything happens
TIMES = (
    "failureTime",
    "detectedTime",
    "flushedTime",
    "launchedTime",
    "podsReadyTime",
    "restoredTime",
    "resumedTime",
)


@dataclass(slots=True, kw_only=True)
class Account:
    """Checks how a row's job ended, and keeps that for the table. `undisturbed`: what its ranks end with, by rank, when
    nothing happens to them.
    """

    undisturbed: Mapping[int, str]
    findings: Findings | None = None

    def check_end(
        self, job: Job, *, restarts: int | None = 1, committed: int = COMMITTED, seconds: float = SECONDS
    ) -> dict[str, Any]:
        """It is complete, bit for bit what it would have been, no committed step was lost, and there never were two
        gangs. `restarts`: how many; None: one or more. `committed`: before anything happened; `seconds`: within which
        it is over. Returns its status.
        """
        status = job.wait_for_end(seconds=seconds)
        if restarts is None:
            restarts = max(1, status["restarts"])
        assert (status["restarts"], status["attempt"]) == (restarts, restarts + 1), job.story()
        assert status["checkpoint"]["latestPersistedStep"] == STEPS
        assert job.digests() == self.undisturbed
        events = list(job.cluster.audit())
        uid = job.document()["metadata"]["uid"]
        assert len(made_pods(events, uid)) == len(set(made_pods(events, uid))) == 2 * (restarts + 1)
        assert overlapping_gangs(events, uid) == []
        commits, recoveries = job.commits(), status.get("recoveries", ())
        assert len(recoveries) == restarts
        for recovery in recoveries:
            newest = max([committed, *commits.get(recovery["attempt"], ())])
            assert recovery["resumedFromStep"] >= newest, "a committed step is never lost"
        self.record(status)
        return status

    def record(self, status: Mapping[str, Any], *, agreement: str = BIT_EXACT) -> None:
        """The status that the job ended with, and how that end compares with an undisturbed one, as in `within 1e-6`:
        for rows that check their end by themselves.
        """
        self.findings = Findings.of(status, agreement=agreement)


def check_ledger(status: dict[str, Any], *causes: str, counted: bool, tier: str = "Persistent") -> None:
    """The ledger has every time of each recovery, in order, and the tier: the storage unless steps are mirrored, since
    of what is replicated each node's memory holds its half.
    """
    recoveries = status["recoveries"]
    assert recoveries
    for recovery in recoveries:
        assert recovery["cause"] in causes
        assert (recovery["counted"], recovery["restoredTier"]) == (counted, tier)
        check_times(recovery)
        assert recovery["stepsLost"] == max(0, recovery["stepBefore"] - recovery["resumedFromStep"])
    assert status["restartsCountTowardsMax"] == counted * len(recoveries)


def check_times(recovery: Mapping[str, Any]) -> None:
    """All are there, in order."""
    times = [recovery[name] for name in TIMES]
    assert times == sorted(times)
    assert recovery["durationSeconds"] >= 0
