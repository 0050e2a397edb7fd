"""Memory that is let go: nobody waits for it but those who need it, and it counts until it is free."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from eventual import files_in
from stepfast.messages import Expect
from stepfast_sidecar.budget import Budget

MIB = 1 << 20
SECONDS = 60
_HELD = """
import sys

if "stepfast_sidecar" in sys.orig_argv:
    import os, time
    from stepfast_sidecar import memory

    def free_blocks(*arguments, really=memory.free_blocks):
        deadline = time.monotonic() + 300
        while os.path.exists(GATE) and time.monotonic() < deadline:
            time.sleep(0.01)
        really(*arguments)

    memory.free_blocks = free_blocks
"""


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """While this file is there, no agent of the test frees memory."""
    gate = tmp_path / "gate"
    gate.touch()
    yield gate
    gate.unlink(missing_ok=True)


@pytest.fixture
def environment(inject: Callable[[str], dict[str, str]], gate: Path) -> dict[str, str]:
    """Of an agent that frees memory no sooner than the gate is open."""
    return inject(f"GATE = {str(gate)!r}\n{_HELD}")


@pytest.fixture
def start(new_agent: Callable[..., Any], environment: dict[str, str]) -> Callable[..., Any]:
    """Starts such an agent."""

    def start(*options: str, memory_limit: int) -> Any:
        return new_agent(*options, memory_limit=memory_limit, environment=environment)

    return start


@pytest.fixture
def caller() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


def descriptors_of(agent: Any) -> list[int]:
    """Of the files of all slots: who has one sees what becomes of the memory."""
    return [os.open(path, os.O_RDONLY) for path in agent.slot_files()]


def blocks_of(descriptors: list[int]) -> int:
    return sum(os.fstat(descriptor).st_blocks for descriptor in descriptors)


def saved(agent: Any, size_bytes: int, **values: Any) -> Any:
    """A rank whose first step, of so many bytes, is committed."""
    rank = agent.join(**values)
    rank.save(1, data_bytes=size_bytes)
    rank.wait_committed(1)
    return rank


@pytest.mark.parametrize("leaves", [False, True], ids=["slots-of-another-size", "job-that-leaves"])
def test_ranks_are_answered_while_memory_is_freed(
    start: Callable[..., Any], gate: Path, caller: ThreadPoolExecutor, eventually: Callable[..., None], leaves: bool
) -> None:
    agent = start("--idle-timeout", "0.3", memory_limit=300 * MIB)
    rank, other = saved(agent, 20 * MIB), agent.join(job="default/other", run="uid2-0")
    before = {path.name for path in agent.slot_files()}
    held = descriptors_of(agent)
    try:
        if leaves:
            rank.close()
        else:
            rank.client.send(Expect(size_bytes=5 * MIB))
        eventually(lambda: not before & {path.name for path in agent.slot_files()}, "the slots are let go")
        _, descriptor = caller.submit(other.reserve, 1, 5 * MIB).result(SECONDS)
        os.close(descriptor)
        assert agent.status().jobs
        assert blocks_of(held)
        gate.unlink()
        eventually(lambda: not blocks_of(held), "the memory is free")
    finally:
        gate.unlink(missing_ok=True)
        for descriptor in held:
            os.close(descriptor)


def test_ranks_are_answered_while_a_mirrored_step_is_freed(
    ring: Any, environment: dict[str, str], gate: Path, eventually: Callable[..., None]
) -> None:
    agents = [ring.add(environment=environment), ring.add()]
    ring.form(eventually, 0, 1)
    peers = [agent.join(rank=node, world_size=2, node=node, run="uid1-1") for node, agent in enumerate(agents)]
    for step in (1, 2):
        for peer in peers:
            peer.save(step)
        peers[0].wait_committed(step)
        held = [{"node": 1, "step": step}]
        eventually(
            lambda held=held: [{k: m[k] for k in ("node", "step")} for m in ring.status(0).get("mirrors", ())] == held,
            "the other node's step is held, and no older one",
        )
    assert len(files_in(agents[0].memory_dir, ".gone/*")) == 1
    for peer in peers:
        peer.save(3)
    peers[0].wait_committed(3)
    gate.unlink()
    eventually(lambda: not files_in(agents[0].memory_dir, ".gone/*"), "the memory is free")


def test_memory_is_given_away_no_sooner_than_it_is_free(
    start: Callable[..., Any], gate: Path, caller: ThreadPoolExecutor, eventually: Callable[..., None]
) -> None:
    agent = start(memory_limit=50 * MIB)
    gone = saved(agent, 40 * MIB)
    held = descriptors_of(agent)
    try:
        gone.close()
        eventually(lambda: not agent.job().ranks[0].alive, "it has left")
        other = agent.join(job="default/other", run="uid2-0")
        reserving = caller.submit(other.reserve, 1, 40 * MIB)
        eventually(lambda: not agent.slot_files(), "the slot is let go")
        assert not reserving.done()
        assert blocks_of(held)
        gate.unlink()
        _, descriptor = reserving.result(SECONDS)
        os.close(descriptor)
        assert not blocks_of(held)
    finally:
        gate.unlink(missing_ok=True)
        for descriptor in held:
            os.close(descriptor)


def test_agent_frees_what_the_one_before_it_had_let_go(
    start: Callable[..., Any], gate: Path, eventually: Callable[..., None]
) -> None:
    agent = start("--idle-timeout", "0.3", memory_limit=50 * MIB)
    rank = saved(agent, 40 * MIB)
    held = descriptors_of(agent)
    try:
        rank.close()
        eventually(lambda: not agent.slot_files(), "the job has left")
        assert blocks_of(held)
        agent.kill()
        gate.unlink()
        agent.start()
        eventually(lambda: not blocks_of(held), "the memory is free")
        saved(agent, 40 * MIB, run="uid1-1", job="default/other")
    finally:
        for descriptor in held:
            os.close(descriptor)


def test_nobody_gives_memory_up_for_more_than_there_is() -> None:
    budget, asked = Budget(10 * MIB), list[int]()
    assert budget.take(4 * MIB)
    assert not asyncio.run(budget.claim(11 * MIB, asked.append))
    assert asked == []
    assert not asyncio.run(budget.claim(10 * MIB, asked.append))
    assert asked == [4 * MIB], "of what there is at all it is asked for"
