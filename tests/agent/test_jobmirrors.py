"""What one job's mirrors hold, and what stays of it once it is let go."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepfast.slot import SlotRecord, SlotState
from stepfast.step import JobKey
from stepfast_sidecar.jobmirrors import JobMirrors, MirrorRoom
from stepfast_sidecar.memory import MemoryTier
from stepfast_sidecar.mirrorfiles import Incoming
from stepfast_sidecar.neighbourwire import Offer

JOB, RUN = JobKey(namespace="default", name="train"), "uid1-1"
FILE_BYTES = 5000


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def memory(tmp_path: Path) -> MemoryTier:
    return MemoryTier(tmp_path, 1 << 20)


@pytest.fixture
def mirrors(memory: MemoryTier) -> Iterator[JobMirrors]:
    made = JobMirrors(JOB, memory, MirrorRoom(limit_bytes=1 << 20), clock=Clock())
    yield made
    made.release_all()


def mirror(mirrors: JobMirrors, step: int) -> None:
    """Node 1, which has rank 1 of two, has its step mirrored."""
    record = SlotRecord(
        seq=step, state=SlotState.STAGED, run=RUN, step=step, name="state", rank=1, world_size=2, node=1,
        file_bytes=FILE_BYTES, window_begin=0, window_bytes=FILE_BYTES, files=1, saved_time=float(step),
    )  # fmt: skip
    offer = Offer(job=str(JOB), run=RUN, node=1, ranks="1", sharers="")

    async def receive() -> None:
        incoming = await mirrors.expect(offer, record, "node-b")
        assert isinstance(incoming, Incoming)
        os.close(incoming.make())
        mirrors.finish(incoming, record, offer.sharers, "node-b")

    asyncio.run(receive())


def test_node_whose_step_left_memory_before_its_commit_is_forgotten_after_it(mirrors: JobMirrors) -> None:
    mirror(mirrors, 1)
    (run,) = mirrors.runs
    run.flow.flush()
    run.flow.persisted(1)
    mirrors.release(1 << 20)
    mirrors.sweep(None)
    assert mirrors.size_bytes == 0
    assert mirrors.runs == [run], "it is still to be committed"
    run.flow.committed(1)
    mirrors.sweep(None)
    assert mirrors.runs == []


def test_run_that_is_mirrored_for_long_costs_no_more_than_one_that_has_begun(mirrors: JobMirrors) -> None:
    for step in range(1, 301):
        mirror(mirrors, step)
        mirrors.sweep(None)
    (run,) = mirrors.runs
    assert set(run.saved) == {300}
