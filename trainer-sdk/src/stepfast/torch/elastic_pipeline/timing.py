"""How long something takes here and now."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_ROUNDS = 2  # the better one counts


def best_seconds(work: Callable[[], object]) -> float:
    """Of some rounds, with what they left the device to do."""
    best = float("inf")
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best
