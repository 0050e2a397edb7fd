"""Why a gang that lives is to save, to end and to be launched anew: its node is about to be taken away. Pure.

The notice says how long the node stays. Until shortly before, the gang's last save is waited for; what is staged by
then is flushed, and nothing is lost. How a gang is ended in order is in `ending`.
"""

from __future__ import annotations

from stepfast.nodestatus import EvictionNotice
from stepfast_operator.observed import Failure, Observed, WorkerPhase
from stepfast_operator.policies import restart
from stepfast_operator.record import Attempt, Cause, Leaving

# Of the notice, for what follows the save: the end of the pods, and a flush of what was not committed.
RESERVE_SECONDS = 5.0
# What a node that is taken away looks like from its peers, and from the API.
_SIGNS = restart.PEERS_FAIL_WITH | restart.DISRUPTIONS


def reason_of(observed: Observed) -> Leaving | None:
    """Why the gang is to leave now, if it is; when several nodes are to go, because of the first."""
    gang = observed.gang
    workers = gang.workers if gang is not None else ()
    noticed = [
        (worker.notice.not_before_time or 0.0, worker.node, worker.notice)
        for worker in workers
        if worker.notice is not None and worker.phase is not WorkerPhase.SUCCEEDED
    ]
    if not noticed:
        return None
    _, node, notice = min(noticed, key=lambda one: one[:2])
    stays_until = notice.seen_time if notice.not_before_time is None else notice.not_before_time
    longest = observed.now + observed.spec.checkpoint.graceful_suspend_seconds
    return Leaving(
        cause=Cause.EVICTION_NOTICE,
        begin_time=min(notice.seen_time, observed.now),
        save_until_time=min(longest, stays_until - RESERVE_SECONDS),
        node=node,
        message=_message(node, notice),
    )


def _message(node: str, notice: EvictionNotice) -> str:
    if notice.not_before_time is None:
        return f"node {node} is being taken away ({notice.kind})"
    left = max(0.0, notice.not_before_time - notice.seen_time)
    return f"node {node} is about to be taken away ({notice.kind}, {left:.0f} s after it was announced)"


def failure_of(leaving: Leaving) -> Failure:
    """Why the attempt of a gang that has left ended."""
    return Failure(cause=leaving.cause, time=leaving.begin_time, node=leaving.node, message=leaving.message)


def explained(observed: Observed, attempt: Attempt, failure: Failure) -> Failure:
    """That failure, or why the gang was to leave when it befell it."""
    if attempt.leaving is not None:
        return failure_of(attempt.leaving)
    leaving = reason_of(observed) if failure.cause in _SIGNS else None
    return failure if leaving is None else failure_of(leaving)
