"""Sets of ranks: what is written of them is read back, and nothing else is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfast.ranks import MAX_SPANS, RankSet


@given(ranks=st.sets(st.integers(0, 999), min_size=1, max_size=60))
def test_ranks_are_read_as_they_were_written(ranks: set[int]) -> None:
    found = RankSet.parse(str(RankSet.of(ranks)), 1000)
    assert set(found) == ranks
    assert found.first == min(ranks)
    assert {rank for rank in range(1000) if rank in found} == ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([0], "0"),
        ([3, 4], "3-4"),
        (range(8), "0-7"),
        (range(0, 10_000, 8), "0-9992:8"),
        ([0, 2, 3, 4, 9], "0,2-4,9"),
        ([0, 8, 16, 17, 18], "0-16:8,17-18"),
    ],
    ids=str,
)
def test_set_is_written_shortly(ranks: range, text: str) -> None:
    assert str(RankSet.of(ranks)) == text


@pytest.mark.parametrize(
    "text",
    ["", "?", "a", "-1", "3-2", "0-7", "1,0", "2,2", "0-3,2", "0-4:0", "1-", ",", "0:2", "9" * 40,
     ",".join(str(rank) for rank in range(MAX_SPANS + 1))],
    ids=lambda text: text[:9] or "empty",
)  # fmt: skip
def test_text_that_names_no_ranks_of_the_gang_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"rank|spans"):
        RankSet.parse(text, 7)


def test_a_million_ranks_are_told_apart_without_being_written_out() -> None:
    ranks = RankSet.parse("0-999998:2", 1_000_000)
    assert (999_998 in ranks, 999_999 in ranks, ranks.first) == (True, False, 0)


def test_no_ranks_are_no_set() -> None:
    with pytest.raises(ValueError, match="no ranks"):
        RankSet.of([])
