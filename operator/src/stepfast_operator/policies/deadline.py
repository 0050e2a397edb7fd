"""Start and activity deadlines. Pure."""

from __future__ import annotations

from stepfast_operator.observed import AgentState, Observed, Worker, WorkerPhase
from stepfast_operator.policies import elastic, queueing, readiness
from stepfast_operator.record import Attempt

_NAMED = 3  # pods in one sentence


def joined_ranks(observed: Observed, run: str) -> tuple[int, int]:
    """How many ranks of the run have ever joined an agent, and how many there are to be (0 while nobody
    knows).
    """
    reports = observed.reports_of(run)
    ranks = {rank.rank for report in reports for rank in report.ranks}
    return len(ranks), max((report.world_size for report in reports), default=0)


def is_active_exceeded(observed: Observed) -> bool:
    """Whether the job was active for `activeDeadlineSeconds` since it started or was last resumed. In a queue it is
    not.
    """
    left = active_left_seconds(observed)
    return left is not None and left <= 0


def active_left_seconds(observed: Observed) -> float | None:
    limit, start = observed.spec.active_deadline_seconds, observed.status.start_time
    if limit is None or start is None:
        return None
    return start + limit + queueing.queued_seconds(observed.status, observed.now) - observed.now


def startup_exceeded(observed: Observed, attempt: Attempt) -> str | None:
    """Why the gang is not up although `startupDeadlineSeconds` have passed since it was planned, or since its ranks
    were started anew in place.

    A script that never uses the SDK joins nobody: for it a running torchrun on each node is enough. One that is known
    to use it has to join, unless nobody is there to tell of that. A gang that makes steps is not late: a rank that
    seems to be missing has yet to come back to an agent that was away.
    """
    if attempt.pods_ready_time is not None or observed.gang is None or queueing.is_waiting(observed, attempt):
        return None
    if startup_left_seconds(observed, attempt) > 0:
        return None
    pending = describe_pending(observed)
    if pending is not None:
        return pending
    if observed.agent in (AgentState.GONE, AgentState.STARTING) or attempt.newest_step is not None:
        return None
    joined, world_size = joined_ranks(observed, attempt.run)
    if 0 < joined < world_size:
        return f"only {joined} of {world_size} ranks joined"
    return "no rank joined" if joined == 0 and readiness.has_used_sdk(observed) else None


def startup_left_seconds(observed: Observed, attempt: Attempt) -> float:
    """A gang that was taken to use no SDK may begin to join later than that: then its last rank has as long again as
    its first had. What waits in a queue is not starting yet. One that may go on with fewer nodes is not late before it
    has had the time for that.
    """
    limit = observed.spec.startup_deadline_seconds
    if queueing.is_waiting(observed, attempt):
        return limit
    since = attempt.planned_time if attempt.restarted_time is None else attempt.restarted_time
    since = max(since, attempt.dequeued_time or since)
    joined = [rank.joined_time for report in observed.reports_of(attempt.run) for rank in report.ranks]
    first = min(joined, default=since)
    until = (since if first <= since + limit else first) + limit
    return max(until, _smaller_until(observed, attempt)) - observed.now


def _smaller_until(observed: Observed, attempt: Attempt) -> float:
    spec, gang = observed.spec, observed.gang
    launched = gang.launched_time if gang is not None else None
    return elastic.startup_until(spec.elastic_policy, elastic.size_of(attempt, spec), attempt, launched)


def describe_pending(observed: Observed) -> str | None:
    """Which of the gang's workers do not run yet, and why; None when all do."""
    workers = observed.gang.workers if observed.gang is not None else ()
    pending = [worker for worker in workers if worker.phase is WorkerPhase.PENDING]
    if not pending:
        return None
    named = ", ".join(_name(worker) for worker in pending[:_NAMED])
    more = f" and {len(pending) - _NAMED} more" if len(pending) > _NAMED else ""
    # Most often one reason holds for all of them.
    reasons = list(dict.fromkeys(worker.message for worker in pending if worker.message))
    return f"still pending: {named}{more}{f' ({reasons[0]})' if reasons else ''}"


def _name(worker: Worker) -> str:
    return worker.pod or worker.node
