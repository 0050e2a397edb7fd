"""A gang that waits in a queue, until it is admitted as a whole: neither late nor active meanwhile. Pure."""

from __future__ import annotations

from dataclasses import replace

from stepfast_operator.observed import Observed
from stepfast_operator.record import Attempt, ConditionType, Status

QUEUED = "Queued"
REFUSED = "QueueRefused"


def is_waiting(observed: Observed, attempt: Attempt) -> bool:
    """Whether the attempt's gang waits, or was seen to wait when somebody last looked."""
    return observed.queue.is_waiting or attempt.is_queued


def take_in(observed: Observed, status: Status, attempt: Attempt) -> tuple[Status, Attempt]:
    """Notes when the attempt's gang began to wait, and when it waited no more."""
    if attempt.queued_time is None:
        return status, replace(attempt, queued_time=observed.now) if observed.queue.is_waiting else attempt
    if attempt.dequeued_time is not None or observed.queue.is_waiting:
        return status, attempt
    waited = status.queued_seconds + observed.now - attempt.queued_time
    return replace(status, queued_seconds=waited), replace(attempt, dequeued_time=observed.now)


def queued_seconds(status: Status, now: float) -> float:
    """How long gangs have waited in this stretch, the current one until now."""
    attempt = status.open_attempt
    if attempt is None or not attempt.is_queued or attempt.queued_time is None:
        return status.queued_seconds
    return status.queued_seconds + (now - attempt.queued_time)


def refusal_of(status: Status) -> str:
    """Why no gang could be queued when that was last tried; empty when it could."""
    ready = status.condition(ConditionType.PODS_READY)
    return ready.message if ready is not None and ready.reason == REFUSED else ""
