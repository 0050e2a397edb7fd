"""Start and activity deadlines. Pure."""

from __future__ import annotations

from stepfast_operator.observed import Observed, WorkerPhase
from stepfast_operator.record import Attempt


def joined_ranks(observed: Observed, run: str) -> tuple[int, int]:
    """How many ranks of the run have ever joined an agent, and how many there are to be (0 while nobody
    knows).
    """
    reports = observed.reports_of(run)
    ranks = {rank.rank for report in reports for rank in report.ranks}
    return len(ranks), max((report.world_size for report in reports), default=0)


def is_active_exceeded(observed: Observed) -> bool:
    """Whether the job has run for `activeDeadlineSeconds` since it started or was last resumed."""
    left = active_left_seconds(observed)
    return left is not None and left <= 0


def active_left_seconds(observed: Observed) -> float | None:
    limit, start = observed.spec.active_deadline_seconds, observed.status.start_time
    return None if limit is None or start is None else start + limit - observed.now


def startup_exceeded(observed: Observed, attempt: Attempt) -> str | None:
    """Why the gang is not up although `startupDeadlineSeconds` have passed since it was planned.

    A script that never uses the SDK joins nobody: for it a running torchrun on each node is enough.
    """
    if attempt.pods_ready_time is not None or observed.gang is None or startup_left_seconds(observed, attempt) > 0:
        return None
    joined, world_size = joined_ranks(observed, attempt.run)
    if 0 < joined < world_size:
        return f"only {joined} of {world_size} ranks joined"
    waiting = [worker.node for worker in observed.gang.workers if worker.phase is WorkerPhase.PENDING]
    return f"still pending: {', '.join(waiting)}" if waiting else None


def startup_left_seconds(observed: Observed, attempt: Attempt) -> float:
    return attempt.planned_time + observed.spec.startup_deadline_seconds - observed.now
