"""Goodput: the share of the time in which a job was active that went into training that is kept. Pure."""

from __future__ import annotations

from stepfast_operator.policies import queueing
from stepfast_operator.record import Status


def goodput_of(status: Status, now: float) -> float | None:
    """So far, or as it was at the job's end; None while no step was made.

    Training that is kept is that of all attempts without the steps that had to be made again and without the stalls of
    saves. A job is active from its first attempt to its end, but for the time in which it is suspended
    or waits in a queue.
    """
    if status.is_terminal:
        return status.goodput_ratio
    current = status.current
    stretch = now - status.start_time - queueing.queued_seconds(status, now) if status.start_time is not None else 0.0
    active = status.earlier_seconds + stretch
    kept = status.productive_seconds + (current.trained_seconds if current is not None else 0.0)
    kept = max(0.0, kept - _stalled_seconds(status))
    has_steps = status.trainer_status.global_step is not None
    return round(min(1.0, kept / active), 4) if active > 0 and has_steps else None


def _stalled_seconds(status: Status) -> float:
    """How long saves stood in the way of steps. The save of the newest step came after it: no step waited for it."""
    checkpoint = status.checkpoint
    newest = status.current.newest_step if status.current is not None else None
    is_last_saved = newest is not None and newest in (checkpoint.latest_memory_step, checkpoint.latest_persisted_step)
    saves = checkpoint.saves
    return saves.stall_seconds_total - (saves.stall_seconds_last if is_last_saved else 0.0)
