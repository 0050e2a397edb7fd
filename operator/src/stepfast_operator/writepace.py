"""How often a job's status is written: at once whatever a decision depends on, progress alone now and then, and the
more seldom the more jobs there are and the slower the API server is, which is to bear all of them. Pure: time is an
argument.

An operator that is killed loses no more than the progress of the last moments, which the agents tell again.
"""

from __future__ import annotations

from dataclasses import replace

from stepfast_operator.record import SavesStatus, Status, TrainerStatus

PROGRESS_SECONDS = 2.0
_LEAST_A_SECOND, _MOST_A_SECOND = 10, 25  # of all jobs
_UNDER_WAY = 0.5  # requests that tell of progress, on average


def progress_seconds(jobs: int, answer_seconds: float = 0.0) -> float:
    """How often to look after a job's progress, and to write it down, when there are so many, and the API server takes
    so long to answer.
    """
    a_second = _UNDER_WAY / answer_seconds if answer_seconds > 0 else _MOST_A_SECOND
    return max(PROGRESS_SECONDS, jobs / min(_MOST_A_SECOND, max(_LEAST_A_SECOND, a_second)))


class WritePace:
    """What was written last, and what is held back."""

    def __init__(self) -> None:
        self._written: Status | None = None
        self._written_time = 0.0
        self._held_back: Status | None = None
        self.progress_seconds = PROGRESS_SECONDS

    def is_due(self, status: Status, now: float) -> bool:
        """Whether that status is to be written now; if not, it is held back."""
        written = self._written
        if written is None or without_progress(status) != without_progress(written):
            return True
        if now - self._written_time >= self.progress_seconds:
            return True
        self._held_back = status
        return False

    def note_written(self, status: Status, now: float) -> None:
        self._written, self._written_time, self._held_back = status, now, None

    def held_back(self, now: float) -> Status | None:
        """What was held back, once it is due."""
        return self._held_back if now - self._written_time >= self.progress_seconds else None

    def wait_seconds(self, now: float) -> float | None:
        """When what is held back is due; None when nothing is."""
        return None if self._held_back is None else max(0.0, self._written_time + self.progress_seconds - now)


def without_progress(status: Status) -> Status:
    """What a decision depends on, and what changes seldom."""
    current = status.current
    if current is not None:
        current = replace(
            current, newest_step=None, newest_step_time=None, steady_step=None, steady_step_time=None
        )  # fmt: skip
    checkpoint = replace(
        status.checkpoint,
        latest_memory_step=None,
        latest_persisted_step=None,
        latest_persisted_time=None,
        size_bytes=None,
        persist_lag_steps=None,
        persist_lag_seconds=None,
        pending_bytes=0,
        saves=SavesStatus(),
    )
    return replace(status, trainer_status=TrainerStatus(), checkpoint=checkpoint, current=current)
