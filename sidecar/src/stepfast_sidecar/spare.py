"""What of the memory tier no slot is going to need, as far as anybody has said. Pure.

Every rank is counted with the slots that a file of its size comes to, and with its whole share while it has not said
how large its files are. What is left beyond that may be lent for something else (`stepfast_sidecar.lending`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stepfast.errors import MemoryBudgetTooSmall
from stepfast.slot import CONTROL_BYTES
from stepfast.slotplan import plan_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class JobClaim:
    """What one job has of the memory tier, and what it needs for its slots there (`slots_bytes`)."""

    budget_bytes: int  # its part of the memory tier now, for slots and all else
    slots_bytes: int
    lent_bytes: int


def rank_need(share_bytes: int, file_bytes: int | None) -> int:
    """What the slots of a rank with that share come to; `file_bytes`: None when it has not said."""
    if file_bytes is None:
        return share_bytes
    try:
        plan = plan_slots(share_bytes, file_bytes)
    except MemoryBudgetTooSmall:
        return share_bytes
    return plan.slots * (plan.capacity_bytes + CONTROL_BYTES)


def job_need(
    *, share_bytes: int, ranks: int, file_bytes: Mapping[int, int | None], held_bytes: Mapping[int, int]
) -> int:
    """What the slots of a job come to that has so many ranks here. By rank: the size of its files, for those that are
    here by now, and what its slots take already, also of ranks that are gone.
    """
    here = sum(max(rank_need(share_bytes, size), held_bytes.get(rank, 0)) for rank, size in file_bytes.items())
    gone = sum(size for rank, size in held_bytes.items() if rank not in file_bytes)
    return here + max(0, ranks - len(file_bytes)) * share_bytes + gone


def spare_bytes(limit_bytes: int, claims: Iterable[JobClaim], job: JobClaim) -> int:
    """What may be lent to that job, one of `claims`, beside what is lent by now; negative when too much is."""
    left = limit_bytes - sum(claim.slots_bytes + claim.lent_bytes for claim in claims)
    return min(left, job.budget_bytes - job.slots_bytes - job.lent_bytes)


def overdrawn(limit_bytes: int, claims: Sequence[JobClaim]) -> list[int]:
    """By their places in `claims`, the jobs from which what is lent has to be taken back for the slots' sake: those
    over their own budgets, then whoever has most, until the memory tier holds the rest.
    """
    having = sorted((i for i, claim in enumerate(claims) if claim.lent_bytes), key=lambda i: -claims[i].lent_bytes)
    over = [i for i in having if claims[i].slots_bytes + claims[i].lent_bytes > claims[i].budget_bytes]
    left = limit_bytes - sum(claim.slots_bytes for claim in claims)
    left -= sum(claims[i].lent_bytes for i in having if i not in over)
    for i in [i for i in having if i not in over]:
        if left >= 0:
            break
        left += claims[i].lent_bytes
        over.append(i)
    return over
