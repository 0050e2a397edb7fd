"""Why a gang that has found no place is launched anew: a node that its pods keep off may be had again. Pure.

Which nodes a pod keeps off is fixed when it is made. One that was ill, excluded or about to be taken away may be well
minutes later, under the same name, and a pod that has found no place would never go there.
"""

from __future__ import annotations

from collections.abc import Iterator

from stepfast_operator.observed import Failure, Gang, Observed, Worker
from stepfast_operator.policies import exclusion
from stepfast_operator.record import Attempt, Cause, Status
from stepfast_operator.sentences import count_text

# The scheduler, and whoever adds nodes, have that long to find a place elsewhere. A node that is well and ill by turns
# makes no attempts without end: in a row each waits for twice as long, and in the end its start deadline comes first.
FIRST_SECONDS = 30.0


def is_asked(gang: Gang | None) -> bool:
    """Whether it depends on which nodes there are."""
    return any(worker.avoided_nodes for worker in _without_place(gang))


def failure_of(observed: Observed, attempt: Attempt) -> Failure | None:
    """The end of an attempt that is to be made anew; None while it is not."""
    nodes, gang = _nodes(observed, attempt), observed.gang
    if gang is None or not nodes or _due_time(observed.status, attempt, gang) > observed.now:
        return None
    left_out = sum(1 for _ in _without_place(gang))
    message = (
        f"node {nodes[0]} may be used again, which the pods were made to keep off, and there is no place for "
        f"{left_out} of {count_text(len(gang.workers), 'node')}"
    )
    return Failure(cause=Cause.NODE_AVAILABLE, time=observed.now, node=nodes[0], message=message)


def next_check_seconds(observed: Observed, attempt: Attempt) -> float | None:
    """When it is to be looked at again, as far as that is known."""
    gang = observed.gang
    if gang is None or not is_asked(gang) or not _is_starting(attempt):
        return None
    kept_off = {name for worker in _without_place(gang) for name in worker.avoided_nodes}
    times = [node.until_time for node in observed.status.excluded_nodes if node.name in kept_off]
    waits = [time - observed.now for time in [*times, _due_time(observed.status, attempt, gang)]]
    return min((wait for wait in waits if wait > 0), default=None)


def _nodes(observed: Observed, attempt: Attempt) -> list[str]:
    """The nodes that may be had again, and that some pod without a place keeps off."""
    gang = observed.gang
    if gang is None or not _is_starting(attempt):
        return []
    taken = {worker.node for worker in gang.workers if worker.is_placed}
    kept_off = {name for worker in _without_place(gang) for name in worker.avoided_nodes}
    return sorted((kept_off & exclusion.available(observed)) - taken)


def _without_place(gang: Gang | None) -> Iterator[Worker]:
    return (worker for worker in (gang.workers if gang is not None else ()) if worker.is_unschedulable)


def _is_starting(attempt: Attempt) -> bool:
    """Whether nobody has trained in it yet."""
    return attempt.pods_ready_time is None and attempt.newest_step is None


def _due_time(status: Status, attempt: Attempt, gang: Gang) -> float:
    return gang.launched_time + FIRST_SECONDS * 2.0 ** _count_in_a_row(status, attempt)


def _count_in_a_row(status: Status, attempt: Attempt) -> int:
    """How many attempts just before this one ended for the same reason."""
    count = 0
    for recovery in reversed(status.recoveries):
        is_before = recovery.attempt == attempt.attempt - 1 - count
        if recovery.cause is not Cause.NODE_AVAILABLE or not is_before:
            break
        count += 1
    return count
