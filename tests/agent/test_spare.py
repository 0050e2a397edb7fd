"""What of the memory tier is spare: slots first, as a table."""

from __future__ import annotations

import pytest

from stepfast.slotplan import LEAST_SHARE_BYTES, slot_bytes
from stepfast_sidecar.spare import JobClaim, job_need, overdrawn, rank_need, spare_bytes

FILE = 100_000
SLOTS = 3 * slot_bytes(FILE)
SHARE = 10 * SLOTS


def claim(budget: int, slots: int, lent: int = 0) -> JobClaim:
    return JobClaim(budget_bytes=budget, slots_bytes=slots, lent_bytes=lent)


@pytest.mark.parametrize(
    ("share", "file", "need"),
    [
        (SHARE, FILE, SLOTS),
        (SHARE, None, SHARE),
        (2 * slot_bytes(FILE), FILE, 2 * slot_bytes(FILE)),
        (LEAST_SHARE_BYTES - 1, FILE * 1000, LEAST_SHARE_BYTES - 1),
    ],
    ids=["three slots", "not known", "two fit", "not even a chunk fits"],
)
def test_rank_needs_what_its_slots_come_to(share: int, file: int | None, need: int) -> None:
    assert rank_need(share, file) == need


@pytest.mark.parametrize(
    ("ranks", "files", "held", "need"),
    [
        (2, {0: FILE, 1: FILE}, {}, 2 * SLOTS),
        (2, {0: FILE}, {}, SLOTS + SHARE),
        (1, {0: FILE}, {0: 2 * SLOTS}, 2 * SLOTS),
        (1, {0: FILE}, {0: SLOTS, 3: 70_000}, SLOTS + 70_000),
    ],
    ids=["all known", "one to come", "larger slots that stay", "slots of a rank that is gone"],
)
def test_job_needs_what_its_ranks_do_and_what_is_there(
    ranks: int, files: dict[int, int | None], held: dict[int, int], need: int
) -> None:
    assert job_need(share_bytes=SHARE, ranks=ranks, file_bytes=files, held_bytes=held) == need


@pytest.mark.parametrize(
    ("claims", "spare"),
    [
        ([claim(100, 30)], 70),
        ([claim(40, 30, 10)], 0),
        ([claim(50, 30), claim(50, 50)], 20),
        ([claim(50, 30), claim(20, 60)], 10),
        ([claim(50, 30, 5), claim(50, 50, 20)], -5),
    ],
    ids=["alone", "own budget", "beside another", "beside slots that are over their budget", "too much is lent"],
)
def test_spare_is_what_neither_limit_nor_own_budget_needs_for_slots(claims: list[JobClaim], spare: int) -> None:
    assert spare_bytes(100, claims, claims[0]) == spare


@pytest.mark.parametrize(
    ("claims", "places"),
    [
        ([claim(50, 30, 20), claim(50, 30, 20)], []),
        ([claim(50, 31, 20), claim(50, 20, 20)], [0]),
        ([claim(100, 40, 10), claim(100, 30, 25)], [1]),
        ([claim(100, 60, 10), claim(100, 35, 25)], [1, 0]),
        ([claim(10, 101), claim(100, 0)], []),
    ],
    ids=["all fits", "over its own budget", "whoever has most", "both", "nothing is lent"],
)
def test_what_is_lent_goes_where_slots_need_it(claims: list[JobClaim], places: list[int]) -> None:
    assert overdrawn(100, claims) == places
