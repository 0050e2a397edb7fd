"""How long tests wait for what must come: one deadline for all of them, and the loop that waits until then.

It is there for what hangs, and says nothing about speed: beside a cluster's tests, on a machine half as fast, what
takes nine seconds alone took three minutes. Where a test's own thread waits, for a process say, the time-out that
pytest has for a whole test is the deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

DEADLINE_SECONDS = 600.0


def eventually(condition: Callable[[], T], what: str) -> T:
    """The condition's first true value. Raises AssertionError when there is none until the deadline."""
    deadline, pause = time.monotonic() + DEADLINE_SECONDS, threading.Event()
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never: {what}"
        pause.wait(0.01)
    return value
