"""Reads that the system fails: what passes is no damage, and no step is given up for it (I5)."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

from stepfast import catalog
from stepfast.errors import CheckpointDamaged, StorageUnavailable
from stepfast.layout import CHUNK_BYTES, job_folder
from stepfast.storage import open_store
from stepfast.torch import rereading
from stepfast.torch.tagged import Sharing, TaggedCheckpoints

COUNT = CHUNK_BYTES // 4 + 1000  # elements of a file of two chunks: several threads read it
Fail = Callable[..., list[int]]


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch, bench: Any) -> Fail:
    """`fail(pattern, code, times)`: so many reads of such files of step 2 fail from now on; returns the failures."""
    preadv, failed, now = os.preadv, list[int](), [0.0]
    wanted: tuple[str, int, int, int] = ("", 0, 0, 0)

    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        pattern, code, times, begin = wanted
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        is_meant = path.parent == bench.step_folder(2) and fnmatch(path.name, pattern) and offset >= begin
        if is_meant and len(failed) < times:
            failed.append(offset)
            raise OSError(code, os.strerror(code))
        return preadv(descriptor, buffers, offset)

    def fail(pattern: str, code: int, times: int, *, begin: int = 0) -> list[int]:
        nonlocal wanted
        wanted = (pattern, code, times, begin)
        failed.clear()
        return failed

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(os, "preadv", failing)
    monkeypatch.setattr(
        rereading, "RETRY", replace(rereading.RETRY, clock=lambda: now[0], sleep=sleep, jitter=lambda: 1.0)
    )
    return fail


def superseded(bench: Any) -> list[int]:
    store = open_store(bench.storage.as_uri())
    try:
        return [found.step for found in catalog.superseded_steps(store, job_folder(bench.job))]
    finally:
        store.close()


@pytest.fixture
def state(bench: Any) -> dict[str, Any]:
    """What steps 1 and 2 were saved of; it holds something else since."""
    made = {"x": torch.zeros(COUNT)}
    with bench.make(state=made) as checkpointer:
        for step in (1, 2):
            made["x"].fill_(step)
            checkpointer.save(step).wait()
    made["x"].fill_(-1)
    return made


@pytest.fixture(params=["no agent", "agent"])
def next_bench(request: pytest.FixtureRequest, bench: Any, state: dict[str, Any]) -> Any:
    """The bench, for the next attempt: without an agent, or with one that has nothing in memory."""
    if request.param == "agent":
        bench.socket = request.getfixturevalue("start_agent")().socket
    return bench


@pytest.mark.parametrize(
    ("pattern", "begin", "code"),
    [
        ("manifest.json", 0, errno.ESTALE),
        ("part-*", 0, errno.EIO),
        ("*.safetensors", 0, errno.EIO),
        ("*.safetensors", CHUNK_BYTES, errno.EIO),
        ("*.safetensors", CHUNK_BYTES, errno.ESTALE),
        ("*.safetensors", CHUNK_BYTES, errno.ETIMEDOUT),
    ],
    ids=["manifest", "part", "header", "EIO", "ESTALE", "ETIMEDOUT"],
)
def test_newest_step_is_restored_when_a_failure_passes(
    next_bench: Any, state: dict[str, Any], fail: Fail, *, pattern: str, begin: int, code: int
) -> None:
    failed = fail(pattern, code, 2, begin=begin)
    with next_bench.make(state=state) as checkpointer:
        assert checkpointer.restore() == 2
        assert len(failed) == 2
        assert (state["x"] == 2).all()
        checkpointer.save(3).wait()
    assert superseded(next_bench) == []


@pytest.mark.parametrize("pattern", ["manifest.json", "part-*", "*.safetensors"])
def test_older_step_is_restored_where_bytes_are_gone(
    bench: Any, state: dict[str, Any], fail: Fail, pattern: str
) -> None:
    fail(pattern, errno.EIO, 1000)
    with bench.make(state=state) as checkpointer:
        assert checkpointer.restore() == 1
        assert (state["x"] == 1).all()


@pytest.mark.parametrize("pattern", ["manifest.json", "part-*", "*.safetensors"])
def test_storage_that_cannot_be_reached_makes_no_step_damaged(
    bench: Any, state: dict[str, Any], fail: Fail, pattern: str
) -> None:
    fail(pattern, errno.ESTALE, 1000)
    with pytest.raises(StorageUnavailable, match=os.strerror(errno.ESTALE)):
        bench.make(state=state).restore()
    fail(pattern, errno.ESTALE, 0)
    with bench.make(state=state) as checkpointer:
        assert checkpointer.restore() == 2
        checkpointer.save(3).wait()
    assert superseded(bench) == []


@pytest.fixture
def begin(bench: Any) -> Iterator[Callable[[], TaggedCheckpoints]]:
    """`begin()`: the next attempt's tagged checkpoints, after a first one has saved steps 1 and 2."""
    made: list[TaggedCheckpoints] = []

    def begin() -> TaggedCheckpoints:
        for earlier in made:
            earlier.close()
        made.append(TaggedCheckpoints(sharing=Sharing.THIS_RANK, environment=bench.environment()))
        return made[-1]

    for step in (1, 2):
        opened = (made[0] if made else begin()).open(f"global_step{step}")
        opened.put("x", torch.full((COUNT,), float(step)))
        opened.commit().wait()
    yield begin
    for checkpoints in made:
        checkpoints.close()


def test_tagged_step_is_loaded_when_a_failure_passes(
    bench: Any, begin: Callable[[], TaggedCheckpoints], fail: Fail
) -> None:
    failed = fail("*.safetensors", errno.EIO, 2)
    assert (begin().load(2, "x") == 2).all()
    assert len(failed) == 2
    assert superseded(bench) == []


def test_tagged_step_is_set_aside_where_its_bytes_are_gone(
    bench: Any, begin: Callable[[], TaggedCheckpoints], fail: Fail
) -> None:
    fail("*.safetensors", errno.EIO, 1000)
    with pytest.raises(CheckpointDamaged) as caught:
        begin().load(2, "x")
    assert caught.value.older_step == 1
    assert superseded(bench) == [2]


def test_tagged_step_is_not_set_aside_where_the_storage_cannot_be_reached(
    bench: Any, begin: Callable[[], TaggedCheckpoints], fail: Fail
) -> None:
    fail("*.safetensors", errno.ESTALE, 1000)
    with pytest.raises(StorageUnavailable):
        begin().load(2, "x")
    assert superseded(bench) == []
