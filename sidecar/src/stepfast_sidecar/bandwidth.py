"""How fast bytes may go out: a token bucket. Pure: times are given, waiting is the caller's."""

from __future__ import annotations


class Bandwidth:
    """So many bytes a second in the long run, and no more than `burst_bytes` ahead of that. Not for several threads."""

    def __init__(self, bytes_per_second: float, burst_bytes: int) -> None:
        self._rate = bytes_per_second
        self._burst_seconds = burst_bytes / bytes_per_second
        self._paid_until = float("-inf")

    def take(self, size_bytes: int, now: float) -> float:
        """Takes the right to send so many bytes; returns after how many seconds it may be used."""
        begin = max(self._paid_until, now - self._burst_seconds)
        self._paid_until = begin + size_bytes / self._rate
        return max(0.0, self._paid_until - now)
