"""The persistent tier's records and the commit rule: damage is noticed, only what is whole is committed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepfast.layout import (
    FileEntry,
    Manifest,
    Part,
    RecordInvalid,
    check_part,
    classify,
    data_path,
    is_readable_path,
    manifest_of,
    named_ranks,
    parse_data_path,
    parse_manifest,
    parse_part,
    part_path,
)
from stepfast.ranks import EVERY_RANK


def part(node: int, ranks: tuple[int, ...], *, step: int = 5, run: str = "uid-0", world_size: int = 4) -> Part:
    files = tuple(
        FileEntry(
            path=data_path(step, run, "state", rank, world_size),
            name="state",
            rank=rank,
            size_bytes=9,
            chunk_bytes=4,
            checksums=("a" * 32, "b" * 32, f"{rank:032x}"),
        )
        for rank in ranks
    )
    return Part(
        step=step,
        run=run,
        node=node,
        world_size=world_size,
        ranks=ranks,
        files=files,
        saved_time=10.0 + node,
        persisted_time=20.0 + node,
    )


WHOLE = (part(0, (0, 1)), part(1, (2,)), part(2, (3,)))


def _manifest() -> Manifest:
    manifest = manifest_of(WHOLE)
    assert manifest is not None
    return manifest


@pytest.mark.parametrize("tag", ["global_step5", "epoch=3", "größte"])
def test_tag_is_read_as_it_was_written(tag: str) -> None:
    tagged = [replace(part, tag=tag) for part in WHOLE]
    assert parse_part(tagged[0].to_bytes()) == tagged[0]
    manifest = manifest_of(tagged)
    assert manifest is not None
    assert (parse_manifest(manifest.to_bytes()), manifest.tag) == (manifest, tag)


def test_parts_of_different_tags_are_never_mixed() -> None:
    with pytest.raises(RecordInvalid, match="different tags"):
        manifest_of([replace(WHOLE[0], tag="a"), *WHOLE[1:]])


def test_part_of_the_first_that_shares_in_a_step_names_the_ranks_without_files() -> None:
    assert named_ranks([2], "2,5", 7) == (0, 1, 2, 3, 4, 6)
    assert named_ranks([5], "2,5", 7) == (5,)
    assert named_ranks([1, 0], EVERY_RANK, 7) == (0, 1)


def test_part_and_manifest_are_read_as_they_were_written() -> None:
    assert parse_part(WHOLE[0].to_bytes()) == WHOLE[0]
    assert parse_manifest(_manifest().to_bytes()) == _manifest()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_manifest_is_the_same_bytes_for_any_order_of_parts(order: tuple[int, ...]) -> None:
    shuffled = manifest_of([WHOLE[index] for index in order])
    assert shuffled is not None
    assert shuffled.to_bytes() == _manifest().to_bytes()


@pytest.mark.parametrize(
    ("parse", "record"),
    [(parse_part, WHOLE[0].to_bytes()), (parse_manifest, _manifest().to_bytes())],
    ids=["part", "manifest"],
)
@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80], ids=hex)
def test_record_with_any_byte_flipped_is_invalid(parse: Callable[[bytes], object], record: bytes, mask: int) -> None:
    for index in range(len(record)):
        damaged = bytearray(record)
        damaged[index] ^= mask
        with pytest.raises(RecordInvalid):
            parse(bytes(damaged))


@pytest.mark.parametrize("parse", [parse_part, parse_manifest], ids=["part", "manifest"])
def test_record_cut_at_any_byte_is_invalid(parse: Callable[[bytes], object]) -> None:
    record = WHOLE[0].to_bytes() if parse is parse_part else _manifest().to_bytes()
    for cut in range(len(record)):
        with pytest.raises(RecordInvalid):
            parse(record[:cut])


@pytest.mark.parametrize(
    "data", [b"[" * 100_000, b'{"a":' * 100_000, b"\0", b"1" * 5000, b"{}"], ids=lambda data: str(data[:6])
)
def test_nonsense_is_an_invalid_record(data: bytes) -> None:
    with pytest.raises(RecordInvalid):
        parse_part(data)
    with pytest.raises(RecordInvalid):
        parse_manifest(data)


def test_part_with_another_record_than_the_manifest_names_is_invalid() -> None:
    ref = _manifest().parts[1]
    assert check_part(ref, WHOLE[1].to_bytes()) == WHOLE[1]
    other = replace(WHOLE[1], persisted_time=99.0).to_bytes()
    with pytest.raises(RecordInvalid, match="SHA-256"):
        check_part(ref, other)


@pytest.mark.parametrize(
    "parts",
    [
        (),
        WHOLE[:2],
        WHOLE[1:],
        (*WHOLE, part(3, (3,))),
        (part(0, (0, 1)), part(1, (1, 2)), part(2, (3,))),
        (part(0, (0, 1, 2)),),
        (part(0, (0, 1, 2, 4)),),
    ],
    ids=[
        "none",
        "rank-3-missing",
        "rank-0-missing",
        "rank-3-twice",
        "rank-1-twice",
        "one-part",
        "rank-4-of-4",
    ],
)
def test_parts_that_do_not_name_every_rank_once_commit_nothing(parts: tuple[Part, ...]) -> None:
    assert manifest_of(parts) is None


@pytest.mark.parametrize(
    "other",
    [
        part(2, (3,), run="uid-1"),
        part(2, (3,), step=6),
        part(2, (3,), world_size=5),
        replace(part(2, (3,)), replicated="other"),
    ],
    ids=["other-run", "other-step", "other-world-size", "other-division"],
)
def test_parts_of_different_saves_are_never_mixed(other: Part) -> None:
    with pytest.raises(RecordInvalid):
        manifest_of((*WHOLE[:2], other))


@pytest.mark.parametrize(
    "damaged",
    [
        replace(WHOLE[0], ranks=(0,)),
        replace(WHOLE[0], files=(replace(WHOLE[0].files[0], path="../../etc/passwd"),)),
        replace(WHOLE[0], files=(replace(WHOLE[0].files[0], checksums=()),)),
        replace(WHOLE[0], files=(replace(WHOLE[0].files[0], name="../x"),)),
        replace(WHOLE[0], run="../x"),
        replace(WHOLE[0], ranks=(1, 0)),
        replace(WHOLE[0], ranks=(False, True)),
        replace(WHOLE[0], saved_time=10**400),
        replace(WHOLE[0], saved_time=float("nan")),
    ],
    ids=["foreign-file", "path", "checksums", "name", "run", "order", "bools", "huge-time", "nan-time"],
)
def test_sealed_record_that_says_the_impossible_is_invalid(damaged: Part) -> None:
    with pytest.raises(RecordInvalid):
        parse_part(damaged.to_bytes())


_NAME = st.from_regex(r"[a-z][a-z0-9_.]{0,10}", fullmatch=True).filter(lambda name: ".." not in name)


@given(
    step=st.integers(0, 2**62),
    name=_NAME,
    rank=st.integers(0, 999_999),
    run=st.from_regex(r"[a-z0-9][a-z0-9-]{0,20}-[0-9]", fullmatch=True),
)
@settings(max_examples=100)
def test_path_of_a_file_says_what_it_was_made_of(step: int, name: str, rank: int, run: str) -> None:
    found = parse_data_path(data_path(step, run, name, rank, 1_000_000))
    assert found is not None
    assert (found.step, found.run, found.name, found.rank, found.world_size) == (
        step,
        run,
        name,
        rank,
        1_000_000,
    )
    assert is_readable_path(part_path(step, run, rank))


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "checkpointHistories.csv",
        "global_step1",
        "global_step1/",
        "global_step1/../../other/job/global_step1/manifest.json",
        "global_step1/part-00000-x/../../../other/job/global_step1/part-00000-a.json",
        "global_step1/part-00000-x/y.json",
        "global_step1/a-00000-of-00001-../../x.safetensors",
        "global_step01/manifest.json",
        "global_step1/.manifest.json.1.tmp",
        "global_step1/manifest.json\n",
        "../global_step1/manifest.json",
    ],
    ids=str,
)
def test_path_that_names_no_file_of_a_step_is_not_readable(path: str) -> None:
    assert not is_readable_path(path)


def test_unknown_file_is_of_no_kind() -> None:
    assert classify("notes.txt").kind == "other"
