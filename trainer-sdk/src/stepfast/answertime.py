"""How long somebody takes to answer."""

from __future__ import annotations


class AnswerTime:
    """A running mean of seconds, in which the newest answer counts for one part in `inertia`."""

    def __init__(self, inertia: float) -> None:
        self.seconds = 0.0
        self._inertia = inertia

    def note(self, seconds: float) -> None:
        """One more answer."""
        self.seconds += (seconds - self.seconds) / self._inertia
