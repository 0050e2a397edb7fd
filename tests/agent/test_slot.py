"""Control pages: a torn record loses against the whole one before it, and a tenant's bytes do no harm."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepfast.references import MAX_REFERRED
from stepfast.slot import (
    CONTROL_BYTES,
    MAX_SHARERS_BYTES,
    ControlPage,
    SlotRecord,
    SlotState,
    agent_record,
    rank_record,
    read_control,
)
from stepfast.step import MAX_STEP, MAX_TAG_BYTES

RECORD = SlotRecord(
    seq=7,
    state=SlotState.STAGED,
    run="uid-0",
    step=500,
    name="state",
    rank=3,
    world_size=8,
    node=1,
    file_bytes=9000,
    window_begin=0,
    window_bytes=9000,
    files=1,
    saved_time=1.5,
)
NEXT = replace(RECORD, seq=8, state=SlotState.WRITING, step=510)


def _page(*writes: tuple[int, bytes]) -> bytes:
    page = bytearray(CONTROL_BYTES)
    for place, data in writes:
        page[place : place + len(data)] = data
    return bytes(page)


def _framed(body: bytes, place: int) -> tuple[int, bytes]:
    return place, len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body


@pytest.mark.parametrize(
    ("writes", "state"),
    [
        ([], SlotState.EMPTY),
        ([rank_record(NEXT)], SlotState.WRITING),
        ([rank_record(RECORD)], SlotState.STAGED),
        ([rank_record(RECORD), rank_record(NEXT)], SlotState.WRITING),
        ([rank_record(replace(NEXT, seq=7)), rank_record(RECORD)], SlotState.STAGED),
        ([rank_record(RECORD), agent_record(7, SlotState.PERSISTED)], SlotState.PERSISTED),
        ([rank_record(RECORD), agent_record(7, SlotState.DROPPED)], SlotState.DROPPED),
        ([rank_record(RECORD), agent_record(6, SlotState.PERSISTED)], SlotState.STAGED),
        ([rank_record(NEXT), agent_record(8, SlotState.PERSISTED)], SlotState.WRITING),
    ],
    ids=[
        "empty",
        "writing",
        "staged",
        "written-again",
        "staged-after-writing",
        "persisted",
        "dropped",
        "verdict-of-earlier-use",
        "verdict-while-writing",
    ],
)
def test_slot_is_in_the_state_of_its_newest_whole_record(writes: list[tuple[int, bytes]], state: SlotState) -> None:
    assert read_control(_page(*writes)).state is state


def test_staged_record_torn_at_any_byte_leaves_the_slot_as_it_was() -> None:
    writing = rank_record(replace(RECORD, state=SlotState.WRITING))
    older = rank_record(replace(RECORD, seq=6, step=490))
    place, data = rank_record(RECORD)
    before = _page(older, writing)
    for cut in range(len(data)):
        page = bytearray(before)
        page[place : place + cut] = data[:cut]
        if page[place : place + len(data)] == data:
            break  # what is not written yet is equal to what lay there: the record is whole
        found = read_control(bytes(page))
        assert found.state is SlotState.WRITING, cut
        assert found.record == replace(RECORD, state=SlotState.WRITING)


def test_writing_record_torn_at_any_byte_leaves_the_staged_step_whole() -> None:
    place, data = rank_record(NEXT)
    before = _page(rank_record(replace(RECORD, seq=6, state=SlotState.WRITING)), rank_record(RECORD))
    for cut in range(len(data)):
        page = bytearray(before)
        page[place : place + cut] = data[:cut]
        if page[place : place + len(data)] == data:
            break
        assert read_control(bytes(page)) == ControlPage(record=RECORD, verdict=None), cut


def test_verdict_torn_at_any_byte_is_no_verdict() -> None:
    place, data = agent_record(7, SlotState.PERSISTED)
    for cut in range(len(data)):
        assert read_control(_page(rank_record(RECORD), (place, data[:cut]))).state is SlotState.STAGED


def test_record_with_any_byte_flipped_is_not_read_as_another() -> None:
    place, data = rank_record(RECORD)
    for index in range(len(data)):
        page = bytearray(_page((place, data)))
        page[place + index] ^= 0x20
        assert read_control(bytes(page)).record in (None, RECORD), index


@given(page=st.binary(min_size=0, max_size=CONTROL_BYTES))
@settings(max_examples=100)
def test_garbage_is_an_empty_slot(page: bytes) -> None:
    assert read_control(page).record is None


@pytest.mark.parametrize(
    "body",
    [b"[" * 1000, b'{"a":' * 200, b"null", b"[]", b"{}", b"\xff" * 10, b'{"seq":' + b"9" * 900 + b"}"],
    ids=["nested-lists", "nested-objects", "null", "list", "empty", "not-text", "huge"],
)
@pytest.mark.parametrize("place", [rank_record(RECORD)[0], rank_record(NEXT)[0], agent_record(1, SlotState.DROPPED)[0]])
def test_record_with_a_right_checksum_and_nonsense_in_it_is_not_a_record(body: bytes, place: int) -> None:
    assert read_control(_page(_framed(body, place))).record is None


REFERRING = replace(RECORD, refers=(10, 20))


def test_record_says_what_it_refers_to_and_nothing_where_it_refers_to_nothing() -> None:
    assert read_control(_page(rank_record(REFERRING))).record == REFERRING
    assert b"refers" not in rank_record(RECORD)[1]


@pytest.mark.parametrize(
    "refers",
    [[20, 10], [10, 10], [500], [-1], [True], ["10"], list(range(MAX_REFERRED + 1)), None, 10, {"10": 1}],
    ids=["order", "twice", "itself", "negative", "no-number", "text", "too-many", "null", "number", "object"],
)
def test_record_that_refers_to_what_it_cannot_is_not_a_record(refers: object) -> None:
    body = json.dumps({**asdict(RECORD), "refers": refers}).encode()
    assert read_control(_page(_framed(body, rank_record(RECORD)[0]))).record is None


def test_longest_record_has_room() -> None:
    longest = replace(
        RECORD, seq=MAX_STEP, run="r" * 120, step=MAX_STEP, name="n" * 64, rank=999_999, world_size=1_000_000,
        node=999_999, file_bytes=MAX_STEP, window_begin=MAX_STEP, window_bytes=MAX_STEP, saved_time=1.0 / 3 + 2**36,
        replicated="f" * 32, tag="t" * MAX_TAG_BYTES, sharers="999999",
        refers=tuple(range(MAX_STEP - MAX_REFERRED, MAX_STEP)),
    )  # fmt: skip
    place, data = rank_record(longest)
    room = MAX_SHARERS_BYTES - len(longest.sharers)
    assert place + len(data) + room <= agent_record(1, SlotState.DROPPED)[0]
    assert read_control(_page((place, data))).record == longest


_ANY = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=9) | st.just([])


@given(key=st.sampled_from(sorted(asdict(RECORD))), value=_ANY)
@settings(max_examples=300)
def test_record_with_any_value_in_any_field_is_checked(key: str, value: Any) -> None:
    body = json.dumps({**asdict(RECORD), key: value}).encode()
    record = read_control(_page(_framed(body, rank_record(RECORD)[0]))).record
    if record is not None:
        assert type(record.seq) is type(record.step) is type(record.file_bytes) is int
        assert 0 <= record.saved_time < 2**37
        assert rank_record(record)
