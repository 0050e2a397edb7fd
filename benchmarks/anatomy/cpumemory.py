"""What the CPU's allocator says itself of a piece of work."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

STEP = "stepfast.tests.step"  # the name of a record_function around each training step


def allocator_peak_bytes(work: Callable[[], object]) -> int:
    """The most that it had allocated at once beyond what there was before, in bytes."""
    totals, _ = _totals(work)
    return max(total for _, total in totals)


def allocator_peaks_bytes(work: Callable[[], object]) -> list[int]:
    """The same within each of the steps that the work marks with `record_function(STEP)`."""
    totals, steps = _totals(work)
    return [max(total for time, total in totals if begin <= time <= end) for begin, end in steps]


def _totals(work: Callable[[], object]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """What was allocated after each change, with its time; and when steps began and ended. In ns.

    The profiler does not see what threads of gloo let go of: such a block is known to have ended where another begins
    at its address. So the totals may be too high by what lies between, never too low.
    """
    gc.collect()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as session:
        work()
    changes: list[tuple[int, int, int]] = []
    steps: list[tuple[int, int]] = []
    _collect(session.profiler.kineto_results.experimental_event_tree(), changes, steps)
    living: dict[int, int] = {}
    totals: list[tuple[int, int]] = []
    total = 0
    for time, address, size in sorted(changes, key=lambda change: change[0]):
        total -= living.pop(address, 0)
        if size > 0:
            living[address] = size
            total += size
        totals.append((time, total))
    return totals, steps


def _collect(events: Sequence[Any], changes: list[tuple[int, int, int]], steps: list[tuple[int, int]]) -> None:
    for event in events:
        if event.tag == _EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        elif event.name == STEP:
            steps.append((event.start_time_ns, event.end_time_ns))
        _collect(event.children, changes, steps)
