"""Which of several numbers of micro-batches is the fastest, found by trying them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from stepfast.torch.elastic_pipeline.groups import Messages

_ROUNDS = 2  # that are timed, of each; the better one counts


def fastest(candidates: Sequence[int], attempt: Callable[[int], None], messages: Messages) -> int:
    """The candidate whose slowest rank is the fastest; every rank calls it alike, and gets the same."""
    if len(candidates) == 1:
        return candidates[0]
    seconds = []
    for candidate in candidates:
        attempt(candidate)  # a first time, which connects ranks and allocates
        seconds.append(min(_seconds(attempt, candidate) for _ in range(_ROUNDS)))
    slowest = messages.largest(seconds)
    return candidates[slowest.index(min(slowest))]


def _seconds(attempt: Callable[[int], None], candidate: int) -> float:
    began = time.perf_counter()
    attempt(candidate)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        torch.cuda.synchronize()
    return time.perf_counter() - began
