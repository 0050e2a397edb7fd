"""What is known of time when a save is decided: the pace of steps, what saves cost, how often training is interrupted.

Pure: whoever holds it says what time it is (seconds of a clock that only goes forward).
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from stepfast.admission import DEFAULT_MTBF_SECONDS, Pace, expected_mtbf_seconds, typical_stall_seconds

_INITIAL_STALL_SECONDS = 0.05  # until a save was measured
_STALLS_REMEMBERED = 9


class PaceKeeper:
    """Keeps one process's `Pace`.

    mtbf_seconds: what the user said it is; None: it follows what was seen, `interruptions` in `trained_seconds` before
    this process, and none for as long as this one has trained.
    """

    def __init__(
        self, now: float, *, mtbf_seconds: float | None = None, interruptions: int = 0, trained_seconds: float = 0.0
    ) -> None:
        self._mtbf_seconds, self._interruptions, self._trained_seconds = mtbf_seconds, interruptions, trained_seconds
        self._began = now
        self._stalls: deque[float] = deque(maxlen=_STALLS_REMEMBERED)
        self._last_step: tuple[int, float] | None = None
        self._pace = Pace(
            now=now, step_seconds=0.0, last_save_step=0, last_save_time=now, last_due_time=None,
            stall_seconds=_INITIAL_STALL_SECONDS, mtbf_seconds=mtbf_seconds or DEFAULT_MTBF_SECONDS,
        )  # fmt: skip

    @property
    def last_step(self) -> int | None:
        """The last step that was left."""
        return self._last_step[0] if self._last_step is not None else None

    def reach(self, step: int, now: float) -> None:
        """A step is done. What is done for it (a save) does not count as the next one's time."""
        if self._last_step is None or step <= self._last_step[0]:
            return
        latest = (now - self._last_step[1]) / (step - self._last_step[0])
        before = self._pace.step_seconds
        self._pace = replace(self._pace, step_seconds=latest if before == 0 else 0.8 * before + 0.2 * latest)

    def leave(self, step: int, now: float) -> None:
        """Training goes on after that step."""
        self._last_step = (step, now)

    def restore(self, step: int, now: float) -> None:
        """Training goes on from a restored step; 0: from nothing."""
        self._began = now
        self._pace = replace(self._pace, last_save_step=step, last_save_time=now)

    def save(self, step: int, now: float, *, stall_seconds: float, is_due: bool) -> None:
        """A step was saved."""
        self._stalls.append(stall_seconds)
        self._pace = replace(
            self._pace,
            last_save_step=step,
            last_save_time=now,
            last_due_time=now if is_due else self._pace.last_due_time,
            stall_seconds=typical_stall_seconds(self._stalls),
        )

    def pace(self, now: float) -> Pace:
        """What rank 0 decides from."""
        mtbf = self._mtbf_seconds
        if mtbf is None:
            mtbf = expected_mtbf_seconds(self._interruptions, self._trained_seconds + now - self._began)
        return replace(self._pace, now=now, mtbf_seconds=mtbf)
