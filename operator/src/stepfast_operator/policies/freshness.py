"""`maxStalenessSeconds`: how much training the user is ready to lose, in time. Pure."""

from __future__ import annotations

from stepfast_operator.observed import Observed
from stepfast_operator.record import Status


def left_seconds(observed: Observed, status: Status) -> float | None:
    """Seconds until more training than promised is at risk (negative: it is); None while none is.

    Counted from the newest commit, or from the attempt's first step where that is later: what an attempt before this
    one lost, and the hours in which a job was suspended, put nothing at risk now.
    """
    limit, current, persisted = observed.spec.checkpoint.max_staleness_seconds, status.open_attempt, status.checkpoint
    if limit is None or current is None or current.newest_step is None or current.first_step_time is None:
        return None
    if current.newest_step <= (persisted.latest_persisted_step or 0):
        return None
    return max(persisted.latest_persisted_time or 0.0, current.first_step_time) + limit - observed.now
