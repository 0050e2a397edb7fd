"""The book of a run's tags: one step for all ranks that open a tag, and steps that only grow."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfast.admission import RankReport
from stepfast.errors import GangError
from stepfast.step import OnBusy, is_tag
from stepfast.tags import REMEMBERED, Opening, TagBook, TaggedStep, number_in, open_tag


def opened(
    book: TagBook, tag: str, occurrence: int = 1, *, now: float = 0.0, begins_after: int = -1,
    reports: tuple[RankReport, ...] = (), on_busy: OnBusy = OnBusy.WAIT, interval: float = 0.0, rank: int = 0,
    **changes: Any,
) -> tuple[TagBook, TaggedStep]:  # fmt: skip
    opening = Opening(tag=tag, occurrence=occurrence, rank=rank, now=now, begins_after=begins_after, **changes)
    book = TagBook.from_json(
        open_tag(book, opening, reports, on_busy=on_busy, persist_interval_seconds=interval).to_json()
    )
    found = book.find(tag, occurrence)
    assert found is not None
    return book, found


def steps_of(*tags: str, begins_after: int = -1) -> list[int]:
    book, steps, last = TagBook(), [], -1
    for index, tag in enumerate(tags):
        book, agreed = opened(book, tag, 1 + tags[:index].count(tag), begins_after=begins_after, last_number=last)
        steps.append(agreed.step)
        last = agreed.number
    return steps


@pytest.mark.parametrize(
    ("tags", "steps"),
    [
        (("global_step500", "global_step1000"), [500, 1000]),
        (("epoch=1", "epoch=2"), [0, 1]),
        (("global_step500", "best", "global_step501"), [500, 501, 502]),
        (("checkpoint", "checkpoint", "checkpoint"), [0, 1, 2]),
        (("global_step500", "global_step300"), [500, 501]),
        (("global_step0", "global_step1"), [0, 1]),
    ],
    ids=lambda values: " ".join(map(str, values)),
)
def test_tag_becomes_the_step_that_it_names_if_that_is_ahead(tags: tuple[str, ...], steps: list[int]) -> None:
    assert steps_of(*tags) == steps


def test_run_goes_on_behind_the_step_that_it_began_from() -> None:
    assert steps_of("best", "global_step600", begins_after=500) == [501, 600]


def test_rank_that_opens_a_tag_later_finds_what_was_agreed_on() -> None:
    book, first = opened(TagBook(), "global_step5")
    book, _ = opened(book, "global_step6")
    after, second = opened(book, "global_step5", rank=1, now=99.0, begins_after=400)
    assert (after, second) == (book, first)


def test_tag_that_nobody_remembers_is_an_error() -> None:
    book = TagBook()
    for occurrence in range(1, REMEMBERED + 2):
        book, _ = opened(book, "last", occurrence)
    with pytest.raises(GangError, match="more than 16 tags ago"):
        opened(book, "last", 1)


def book_of(count: int) -> TagBook:
    """Of a rank that has opened so many tags."""
    book = TagBook()
    for step in range(1, count + 1):
        book, _ = opened(book, f"global_step{step}", last_number=step - 2)
    return book


@pytest.mark.parametrize(
    ("tag", "last_number", "opens_every_tag"),
    [("global_step1", -1, False), ("global_step2", 0, False), ("global_step1", -1, True), ("best", 0, True)],
)
def test_tag_so_old_that_the_book_has_forgotten_it_is_no_new_one(
    tag: str, last_number: int, opens_every_tag: bool
) -> None:
    with pytest.raises(GangError, match="more than 16 tags ago"):
        opened(book_of(REMEMBERED + 2), tag, rank=1, last_number=last_number, opens_every_tag=opens_every_tag)


@pytest.mark.parametrize(
    ("tag", "last_number", "opens_every_tag"),
    [("global_step1", 1, True), ("global_step1", 17, False), ("global_step99", -1, False), ("best", -1, False)],
    ids=["has-opened-what-is-forgotten", "goes-back", "is-ahead", "opens-for-the-first-time"],
)
def test_rank_that_is_not_behind_opens_a_new_tag(tag: str, last_number: int, opens_every_tag: bool) -> None:
    book = book_of(REMEMBERED + 2)
    _, agreed = opened(book, tag, 2, rank=1, last_number=last_number, opens_every_tag=opens_every_tag)
    assert agreed.number == REMEMBERED + 2


def test_nothing_is_dropped_where_nobody_knows_whose_steps_are() -> None:
    slow = RankReport(rank=0, step=7, slots=3, persisting=(5,), unpersisted=(5, 6, 7))
    _, agreed = opened(TagBook(), "tag", reports=(slow, slow), drops=False)
    assert agreed.drop == ()


def test_tag_is_due_once_the_interval_has_passed_since_the_last_that_was() -> None:
    book, due = TagBook(), []
    for now in (0.0, 1.0, 2.5, 3.0, 4.5):
        book, agreed = opened(book, "tag", len(due) + 1, now=now, interval=2.0)
        due.append(agreed.due)
    assert due == [True, False, True, False, True]


def test_only_slot_is_always_due() -> None:
    book, _ = opened(TagBook(), "a", interval=100.0)
    _, agreed = opened(book, "b", interval=100.0, reports=(RankReport(rank=0, slots=1),))
    assert agreed.due


BUSY = RankReport(rank=0, step=5, slots=1, unpersisted=(5,))


@pytest.mark.parametrize(("on_busy", "save"), [(OnBusy.WAIT, True), (OnBusy.SKIP, False)], ids=["wait", "skip"])
def test_exhausted_memory_is_waited_for_or_the_tag_skipped_by_all(on_busy: OnBusy, save: bool) -> None:
    _, agreed = opened(TagBook(), "tag", reports=(BUSY,), on_busy=on_busy)
    assert (agreed.save, agreed.due) == (save, save)


def test_steps_that_newer_ones_have_overtaken_are_dropped_by_all() -> None:
    slow = RankReport(rank=0, step=7, slots=3, persisting=(5,), unpersisted=(5, 6, 7))
    _, agreed = opened(TagBook(), "tag", reports=(slow, slow))
    assert agreed.drop == (6,)


@given(st.lists(st.sampled_from(["global_step1", "global_step9", "best", "last", "global_step4"]), max_size=40))
def test_steps_of_a_run_only_grow(tags: list[str]) -> None:
    steps = steps_of(*tags)
    assert steps == sorted(set(steps))


@pytest.mark.parametrize(
    ("tag", "number"),
    [("global_step500", 500), ("globalstep7", 7), ("global_step_7", 7), ("global_step-7", 7), ("global_step", None),
     ("epoch=3-step=7", None), ("global_step7x", None), ("global_step" + "9" * 30, None)],
)  # fmt: skip
def test_number_is_read_from_tags_of_that_form_alone(tag: str, number: int | None) -> None:
    assert number_in(tag) == number


@pytest.mark.parametrize(
    ("text", "fits"),
    [("global_step5", True), ("epoch=3, best!", True), ("größte", True), ("", False), (" a", False), ("a\nb", False),
     ("a" * 257, False), ("ü" * 43, False), ("ü" * 42, True)],
    ids=lambda value: str(value)[:8],
)  # fmt: skip
def test_tags_are_printable_and_short(text: str, fits: bool) -> None:
    assert is_tag(text) is fits
