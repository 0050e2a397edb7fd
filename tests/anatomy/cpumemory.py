"""What the CPU's allocator says itself of a piece of work."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


def allocator_peak_bytes(work: Callable[[], object]) -> int:
    """The most that it had allocated at once beyond what there was before, in bytes."""
    gc.collect()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as session:
        work()
    changes: list[tuple[int, int]] = []
    _collect(session.profiler.kineto_results.experimental_event_tree(), changes)  # type: ignore[union-attr] # it has run
    total = peak = 0
    for _, size in sorted(changes, key=lambda change: change[0]):
        total += size
        peak = max(peak, total)
    return peak


def _collect(events: Sequence[Any], changes: list[tuple[int, int]]) -> None:
    for event in events:
        if event.tag == _EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
        _collect(event.children, changes)
