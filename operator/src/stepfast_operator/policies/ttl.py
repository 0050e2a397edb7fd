"""How long a job that is over is kept. Pure."""

from __future__ import annotations

from stepfast_operator.observed import Observed


def left_seconds(observed: Observed) -> float | None:
    """Seconds until the job is to be deleted (negative: it is due); None: it is kept, or not over."""
    ttl, ended = observed.spec.ttl_seconds_after_finished, observed.status.completion_time
    return None if ttl is None or ended is None else ended + ttl - observed.now
