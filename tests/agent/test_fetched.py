"""Files out of other nodes' memory: there for as long as ranks may read them, and no longer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepfast.step import JobKey
from stepfast_sidecar.fetched import FetchedFiles
from stepfast_sidecar.memory import MemoryTier

DATA = b"what was saved" * 1000


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def memory(tmp_path: Path) -> MemoryTier:
    return MemoryTier(tmp_path, 1 << 20)


@pytest.fixture
def files(memory: MemoryTier, clock: Clock) -> Iterator[FetchedFiles]:
    made = FetchedFiles(JobKey(namespace="default", name="train"), memory, monotonic=clock)
    yield made
    made.release_all()


def fetch(files: FetchedFiles, memory: MemoryTier) -> int:
    """A descriptor of a file that no other was asked for before."""

    async def bring() -> tuple[int, int]:
        assert memory.budget.take(len(DATA))
        descriptor = files.make(len(DATA))
        os.pwrite(descriptor, DATA, 0)
        return descriptor, len(DATA)

    found = asyncio.run(files.get("global_step1/a-file", bring))
    assert found is not None
    return found.open()


@pytest.mark.parametrize(
    "case",
    [(300, False, True), (30, True, True), (300, True, False), (1000, False, False)],
    ids=["ranks-may-read", "asked-for-a-moment-ago", "ranks-have-saved-since", "nobody-asks"],
)
def test_file_stays_as_long_as_ranks_may_read_it(
    files: FetchedFiles,
    memory: MemoryTier,
    clock: Clock,
    eventually: Callable[..., None],
    case: tuple[float, bool, bool],
) -> None:
    seconds, has_saved, stays = case
    descriptor = fetch(files, memory)
    try:
        clock.now += seconds
        files.sweep(has_saved=has_saved)
        if stays:
            assert os.pread(descriptor, len(DATA), 0) == DATA
            assert memory.budget.taken_bytes == files.size_bytes == len(DATA)
        else:
            eventually(lambda: memory.budget.taken_bytes == 0, "its memory is free")
            assert os.fstat(descriptor).st_blocks == 0
    finally:
        os.close(descriptor)


def test_file_for_which_there_is_no_memory_is_not_begun(tmpfs: Callable[[str], Path]) -> None:
    memory = MemoryTier(tmpfs("size=1m"), 1 << 30)
    with pytest.raises(OSError, match="No space left"):
        FetchedFiles(JobKey(namespace="default", name="train"), memory).make(2 << 20)
