"""Retries of what may pass: exponential backoff with full jitter, under one deadline for the whole operation.

Only StorageUnavailable is retried. Whoever calls `run` makes sure that its operation may be done twice. No
I/O here; clock, sleep and randomness are values.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from stepfast.errors import StorageUnavailable

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try of an operation: its number, from 0, and the seconds that the deadline leaves it."""

    number: int
    remaining_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How long, and how often, an operation is tried.

    Before attempt n there is a pause of a random part of `first_delay_seconds * 2**(n-1)`, at most
    `max_delay_seconds` (full jitter: writers that failed together do not come back together), after the time that
    the service asked to be left alone.
    """

    deadline_seconds: float = 60.0
    first_delay_seconds: float = 0.1
    max_delay_seconds: float = 5.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = random.random

    def run(self, operation: Callable[[Attempt], T]) -> T:
        """The operation's result. Raises its last StorageUnavailable once the deadline leaves no time for
        another attempt, and any other error at once.

        The last attempt may have been cut off by the deadline alone: the failure before it is named too.
        """
        start = self.clock()
        number = 0
        before = ""
        while True:
            remaining = self.deadline_seconds - (self.clock() - start)
            try:
                return operation(Attempt(number=number, remaining_seconds=max(remaining, 0.0)))
            except StorageUnavailable as error:
                delay = self.jitter() * min(self.max_delay_seconds, self.first_delay_seconds * 2**number)
                delay += error.retry_after_seconds
                elapsed = self.clock() - start
                number += 1
                if elapsed + delay >= self.deadline_seconds:
                    tried = f"attempts: {number}, in {elapsed:.1f} s"
                    if before not in {"", str(error)}:
                        tried += f"; the one before: {before}"
                    given_up = StorageUnavailable(f"{error} ({tried})")
                    given_up.retry_after_seconds = error.retry_after_seconds
                    raise given_up from error
                before = str(error)
                self.sleep(delay)
