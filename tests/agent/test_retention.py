"""Which committed steps are kept, and which leftovers are swept."""

from __future__ import annotations

import pytest

from stepfast.layout import data_path, part_path
from stepfast.retention import leftovers, steps_to_remove, unfinished


@pytest.mark.parametrize(
    ("committed", "keep", "protected", "removed"),
    [
        ([1, 2, 3], 0, [], []),
        ([1, 2, 3], 5, [], []),
        ([1, 2, 3], 1, [], [1, 2]),
        ([3, 1, 2], 2, [], [1]),
        ([1, 2, 3], 1, [1], [2]),
        ([1, 2, 3], 1, [9], [1, 2]),
        ([], 1, [1], []),
    ],
    ids=[
        "keep-all",
        "fewer-than-kept",
        "newest-alone",
        "unordered",
        "resume-step-kept",
        "unknown-protected",
        "none",
    ],
)
def test_steps_beyond_the_newest_are_removed_but_for_protected_ones(
    committed: list[int], keep: int, protected: list[int], removed: list[int]
) -> None:
    assert steps_to_remove(committed, max_to_keep=keep, protected=protected) == removed


def _name(step: int, run: str) -> str:
    return data_path(step, run, "state", 0, 2).partition("/")[2]


@pytest.mark.parametrize(
    ("step", "run", "swept"),
    [
        (5, "uid-1", True),
        (5, "uid-2", False),
        (5, "uid-3", False),
        (5, "other-7", True),
        (10, "uid-1", False),
        (11, "uid-1", False),
        (5, "uid-10", False),
    ],
    ids=[
        "earlier-attempt",
        "this-run",
        "later-attempt",
        "earlier-job",
        "newest-committed",
        "newer",
        "attempt-10",
    ],
)
def test_leftovers_of_earlier_attempts_below_the_newest_commit_are_swept(step: int, run: str, swept: bool) -> None:
    names = [_name(step, run), part_path(step, run, 0).partition("/")[2]]
    found = leftovers({step: names}, newest_committed=10, run="uid-2")
    assert found == ([(step, run)] if swept else [])


def test_superseded_step_keeps_its_bytes() -> None:
    mine, other = _name(5, "uid-1"), _name(5, "uid-0")
    names = [mine, other, part_path(5, "uid-1", 0).partition("/")[2], "manifest-superseded-uid-1.json"]
    assert leftovers({5: names}, newest_committed=10, run="uid-2") == [(5, "uid-0")]


def test_committed_step_and_unknown_files_are_never_swept() -> None:
    folders = {5: [_name(5, "uid-1"), "manifest.json"], 6: ["notes.txt", "manifest-superseded-uid-1.json"]}
    assert leftovers(folders, newest_committed=10, run="uid-2") == []


@pytest.mark.parametrize(
    ("run", "more", "spared", "found"),
    [
        ("uid-1", [], [], ["uid-1"]),
        ("uid-1.3", [], ["uid-1"], ["uid-1.3"]),
        ("uid-1", [], ["uid-1"], []),
        ("uid-2", [], [], []),
        ("uid-2.1", [], [], []),
        ("uid-3", [], [], []),
        ("other-1", [], [], []),
        ("uid-1", ["manifest-superseded-uid-1.json"], [], []),
        ("uid-1", ["manifest-superseded-uid-0.json"], [], ["uid-1"]),
        ("uid-1", ["manifest.json"], [], []),
    ],
    ids=[
        "earlier-attempt", "restarted-in-place", "spared", "this-run", "this-attempt", "later-attempt", "earlier-job",
        "superseded", "another-is-superseded", "committed",
    ],
)  # fmt: skip
def test_earlier_attempts_of_the_same_job_alone_make_room(
    run: str, more: list[str], spared: list[str], found: list[str]
) -> None:
    for name in (_name(5, run), part_path(5, run, 0).partition("/")[2]):
        assert unfinished([name, *more], run="uid-2", spared=spared) == found
