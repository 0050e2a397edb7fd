"""How a rank's share of the memory tier becomes slots: how many, how large. Pure.

The agent makes the slots by it, and the operator tells by it, before there is a rank, what a node's memory comes to.
docs/adr/three-slots.md says why there are three, and what becomes of fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepfast.errors import MemoryBudgetTooSmall
from stepfast.layout import CHUNK_BYTES
from stepfast.slot import CONTROL_BYTES
from stepfast.tensorfile import PAGE

MAX_SLOTS = 3  # one is persisted, one is the newest whole step, one is written
LEAST_SHARE_BYTES = CHUNK_BYTES + CONTROL_BYTES  # of a rank: less holds no chunk, and nothing is staged in it


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """How a rank's share is used: so many slots of so many data bytes. `streamed`: a file is larger than a slot."""

    slots: int
    capacity_bytes: int
    streamed: bool


def rank_share(limit_bytes: int, *, jobs: int, job_limit_bytes: int | None, ranks: int) -> int:
    """One rank's bytes of a node's memory tier: jobs divide it equally, and a job's ranks their job's part.
    `job_limit_bytes` is what the job itself allows (None: all of its part), `ranks` are the job's on that node.
    """
    part = limit_bytes // jobs
    return (part if job_limit_bytes is None else min(part, job_limit_bytes)) // ranks


def slot_bytes(file_bytes: int) -> int:
    """What a slot takes that holds a whole file of that size: its control page, and whole pages of data."""
    return CONTROL_BYTES + _pages(file_bytes)


def least_file_bytes(tensor_bytes: int) -> int:
    """The least that a file with so many bytes of tensors has: its header is another page, or more of them, which
    nobody knows before the state is there.
    """
    return PAGE + tensor_bytes


def plan_slots(share_bytes: int, file_bytes: int) -> SlotPlan:
    """Divides a rank's share for files of that size. Raises MemoryBudgetTooSmall when not even a chunk fits."""
    whole = min(MAX_SLOTS, share_bytes // slot_bytes(file_bytes))
    if whole >= 1:
        return SlotPlan(slots=whole, capacity_bytes=_pages(file_bytes), streamed=False)
    if share_bytes < LEAST_SHARE_BYTES:
        raise MemoryBudgetTooSmall(
            f"a rank's share of the memory tier is {share_bytes} bytes; at least {LEAST_SHARE_BYTES} are "
            "needed: raise checkpoint.memory.sizeLimit (STEPFAST_MEMORY_BUFFER_SIZE)"
        )
    windows = 2 if share_bytes >= 2 * LEAST_SHARE_BYTES else 1
    chunks = (share_bytes // windows - CONTROL_BYTES) // CHUNK_BYTES
    return SlotPlan(slots=windows, capacity_bytes=chunks * CHUNK_BYTES, streamed=True)


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE) * PAGE
