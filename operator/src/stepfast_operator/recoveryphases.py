"""The phases of a recovery, each from the end of the one before it: the same in tables, metrics and pictures. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from stepfast_operator.record import Recovery

PHASES = ("detect", "flush", "schedule", "restore", "resume")


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One of `PHASES`, in seconds since the epoch."""

    name: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return max(0.0, self.end - self.begin)


def phases_of(recovery: Recovery) -> tuple[Phase, ...]:
    """Those whose begin and end are known. Where nothing was restored, `resume` begins when all ranks are here."""
    restored = recovery.restored_time or recovery.pods_ready_time
    ends = (
        ("detect", recovery.failure_time, recovery.detected_time),
        ("flush", recovery.detected_time, recovery.flushed_time),
        ("schedule", recovery.flushed_time, recovery.pods_ready_time),
        ("restore", recovery.pods_ready_time, recovery.restored_time),
        ("resume", restored, recovery.resumed_time),
    )
    return tuple(
        Phase(name=name, begin=begin, end=end) for name, begin, end in ends if begin is not None and end is not None
    )
