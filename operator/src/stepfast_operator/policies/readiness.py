"""Whether a gang is up although no rank says so: a script that never uses the SDK joins nobody. Pure.

That is assumed, never known, and lasts until a rank joins; what the status calls ready by then is `State.RUNNING`
without a `pods_ready_time`, which is when all ranks had joined and nothing else.
"""

from __future__ import annotations

from stepfast_operator.names import is_run_of
from stepfast_operator.observed import Observed, WorkerPhase
from stepfast_operator.record import Attempt, State, Status

# A script that has not joined by then is taken to be one that never uses the SDK: it runs as well as can be told.
READY_WITHOUT_SDK_SECONDS = 30.0


def state_without_ranks(observed: Observed, status: Status, current: Attempt) -> State:
    """The state of a job that may be taken to run without a rank: taken back when some ranks, and not all, have joined.

    A job that was suspended meanwhile, or whose ranks are all known to be here, keeps its state.
    """
    if current.pods_ready_time is not None or status.state not in (State.STARTING, State.RUNNING):
        return status.state
    if observed.reports_of(current.run):
        return State.STARTING
    return State.RUNNING if _runs_without_ranks(observed) else status.state


def _runs_without_ranks(observed: Observed) -> bool:
    """Whether every worker has run for a while, and nothing tells that the script uses the SDK."""
    gang = observed.gang
    if gang is None or any(worker.phase is not WorkerPhase.RUNNING for worker in gang.workers):
        return False
    begun = [worker.running_since for worker in gang.workers if worker.running_since is not None]
    if len(begun) < len(gang.workers) or has_used_sdk(observed):
        return False
    # A node's clock may be behind: nothing of a gang ran before it was launched.
    return observed.now - max([gang.launched_time, *begun]) >= READY_WITHOUT_SDK_SECONDS


def has_used_sdk(observed: Observed) -> bool:
    """Whether a rank of this job ever joined, in any attempt, as far as the status and the agents remember.

    Committed steps do not tell: they may be those of another job, which had its name before it.
    """
    status, current = observed.status, observed.status.current
    if status.checkpoint.saves.count > 0 or status.productive_seconds > 0:
        return True
    if current is not None and (current.in_place_restarts > 0 or current.step_seconds_before > 0):
        return True
    if any(recovery.restored_time is not None for recovery in status.recoveries):
        return True
    return any(is_run_of(report.run, observed.uid) for report in observed.reports)
