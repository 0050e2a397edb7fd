"""What an allocator says itself of a piece of work: the CPU's through the profiler, CUDA's through its own history."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from stepfast.torch.anatomy.replacing import environment

_CUDA_ENTRIES = 1_000_000  # changes that CUDA's history keeps: the last ones


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """Memory at `address` is taken (`size_bytes` > 0) or given back (< 0); `time_ns` since the epoch."""

    time_ns: int
    address: int
    size_bytes: int


class History:
    """What was recorded within its context. Filled when that is left."""

    def __init__(self) -> None:
        self.changes: Sequence[MemoryChange] = ()
        self.reserved: Sequence[tuple[int, int]] = ()  # (time_ns, bytes): what CUDA's allocator had of the device


@contextmanager
def cpu_history() -> Iterator[History]:
    """Of this thread's allocations on the CPU; kernels' own, in their threads, among them."""
    history = History()
    # The profiler would tell the terminal about every start and stop.
    quiet = environment({"KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "99")})
    with quiet, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as session:
        yield history
    assert session.profiler is not None
    found: list[MemoryChange] = []
    _collect(session.profiler.kineto_results.experimental_event_tree(), found)
    history.changes = sorted(found, key=lambda change: change.time_ns)


@contextmanager
def cuda_history(device: int) -> Iterator[History]:
    """Of all streams of one CUDA device."""
    history = History()
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=_CUDA_ENTRIES, device=device)
    try:
        yield history
        snapshot = torch.cuda.memory._snapshot(device)
    finally:
        torch.cuda.memory._record_memory_history(None, device=device)
    history.changes = cuda_changes(snapshot, device)
    history.reserved = cuda_reserved(snapshot, device)


def cuda_changes(snapshot: Mapping[str, Any], device: int) -> list[MemoryChange]:
    """The allocations of a snapshot as torch.cuda.memory._snapshot makes it. Memory is given back when it may be used
    again: "free_completed", behind "free_requested" where another stream still works on it."""
    signs = {"alloc": 1, "free_completed": -1}
    return [
        MemoryChange(entry["time_us"] * 1000, entry["addr"], signs[entry["action"]] * entry["size"])
        for entry in _entries(snapshot, device)
        if entry["action"] in signs
    ]


def cuda_reserved(snapshot: Mapping[str, Any], device: int) -> list[tuple[int, int]]:
    """(time_ns, bytes) behind each change of what the allocator has of the device.

    A history may begin in the middle: what there was before is what there is at its end, less what came in it.
    """
    signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    steps = [
        (entry["time_us"] * 1000, signs[entry["action"]] * entry["size"])
        for entry in _entries(snapshot, device)
        if entry["action"] in signs
    ]
    now = sum(segment["total_size"] for segment in snapshot["segments"] if segment["device"] == device)
    total = now - sum(size for _, size in steps)
    behind = [(steps[0][0] if steps else 0, total)]
    for time, size in steps:
        total += size
        behind.append((time, total))
    return behind


def _entries(snapshot: Mapping[str, Any], device: int) -> Sequence[Mapping[str, Any]]:
    traces = snapshot["device_traces"]
    found: Sequence[Mapping[str, Any]] = traces[device] if device < len(traces) else ()
    return found


def _collect(events: Sequence[Any], found: list[MemoryChange]) -> None:
    for event in events:
        if event.tag == _EventType.Allocation:
            change = event.extra_fields
            found.append(MemoryChange(event.start_time_ns, change.ptr, change.alloc_size))
        _collect(event.children, found)
