"""Memory that the ranks of a run on a node share beside their slots: who gets it, and that slots come first."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from eventual import files_in
from stepfast.errors import AgentError, ProtocolError, StepfastError
from stepfast.lentfile import MARK
from stepfast.messages import Borrow, Expect, Lent
from stepfast.protocol import decode
from stepfast.slotplan import slot_bytes

MIB = 1 << 20
DATA = 1_000_000  # bytes of a rank's state
SIZE = 4 * MIB


def lent_files(agent: Any) -> list[Path]:
    return files_in(agent.memory_dir, "*/*/lent/*")


def expecting(agent: Any, ranks: Any, world_size: int = 1, size_bytes: int = DATA, **values: object) -> list[Any]:
    """A gang of which the agent knows how large its files are."""
    gang = agent.gang(world_size, **values)
    for rank in gang:
        rank.client.send(Expect(size_bytes=size_bytes))
    job = str(gang[0].hello.job)
    slots = 3 * world_size
    ranks.eventually(
        lambda: len(files_in(agent.memory_dir, f"{job}/[0-9]*/slot-*")) == slots, f"{slots} slots are made"
    )
    return gang


def is_marked(descriptor: int, granted_bytes: int) -> bool:
    return os.pread(descriptor, len(MARK), granted_bytes) == MARK


@pytest.fixture
def borrow() -> Any:
    """`borrow(rank, name, size)`: bytes and descriptor, which the test's end closes."""
    opened: list[int] = []

    def ask(rank: Any, name: str = "activations", size_bytes: int = SIZE) -> tuple[int, int]:
        granted, descriptor = rank.client.borrow(name, size_bytes)
        if descriptor is not None:
            opened.append(descriptor)
        return granted, -1 if descriptor is None else descriptor

    yield ask
    for descriptor in opened:
        os.close(descriptor)


# ---------------------------------------------------------------- who gets what


def test_two_ranks_of_a_run_have_one_file_whatever_sizes_they_ask_for(agent: Any, ranks: Any, borrow: Any) -> None:
    first, second = expecting(agent, ranks, 2)
    granted, mine = borrow(first)
    assert granted == SIZE
    same, theirs = borrow(second, size_bytes=100 * MIB)
    assert same == granted
    os.pwrite(mine, b"of the first rank", 12345)
    assert os.pread(theirs, 17, 12345) == b"of the first rank"
    assert is_marked(theirs, granted)
    assert (os.fstat(mine).st_mode & 0o777, len(lent_files(agent))) == (0o600, 1)


def test_other_names_and_other_jobs_have_other_files(agent: Any, ranks: Any, borrow: Any) -> None:
    (rank,) = expecting(agent, ranks)
    (other,) = expecting(agent, ranks, job="default/other", run="uid2-0")
    files = [borrow(rank), borrow(rank, "more"), borrow(other)]
    assert [granted for granted, _ in files] == [SIZE] * 3
    assert len({os.fstat(descriptor).st_ino for _, descriptor in files}) == 3


def test_what_is_lent_counts_as_memory_in_use(agent: Any, ranks: Any, borrow: Any) -> None:
    (rank,) = expecting(agent, ranks)
    before = agent.status().memory_used_bytes
    assert before == 3 * slot_bytes(DATA)
    borrow(rank)
    assert agent.status().memory_used_bytes == before + SIZE + 4096


# ---------------------------------------------------------------- slots first


def test_nothing_is_lent_while_a_rank_of_the_node_has_not_said_what_it_needs(
    agent: Any, ranks: Any, borrow: Any
) -> None:
    first = agent.join(world_size=2, local_world_size=2)
    first.client.send(Expect(size_bytes=DATA))
    ranks.eventually(lambda: len(agent.slot_files()) == 3, "its slots are made")
    second = agent.join(rank=1, local_rank=1, world_size=2, local_world_size=2)
    # Half of the memory is the second rank's, whole, until it says otherwise; three slots are the first one's.
    granted, _ = borrow(first, size_bytes=1 << 30)
    assert granted == (512 * MIB - 3 * slot_bytes(DATA)) // 4096 * 4096 - 4096
    assert borrow(second, size_bytes=4096)[0] == granted
    alone = agent.join(job="default/alone", run="uid2-0")
    assert borrow(alone)[0] == 0
    assert borrow(alone)[0] == 0


def test_rank_that_says_what_it_needs_a_moment_later_is_waited_for(agent: Any, ranks: Any, borrow: Any) -> None:
    first = agent.join(world_size=2, local_world_size=2)
    first.client.send(Expect(size_bytes=DATA))
    second = agent.join(rank=1, local_rank=1, world_size=2, local_world_size=2)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(borrow, first, size_bytes=1 << 30)
        ranks.eventually(lambda: len(agent.slot_files()) == 3, "the first rank's slots are made")
        second.client.send(Expect(size_bytes=DATA))
        granted, _ = asked.result(60)
    assert granted == ((1 << 30) - 6 * slot_bytes(DATA)) // 4096 * 4096 - 4096


def test_no_more_is_lent_than_the_slots_leave_of_the_jobs_own_budget(agent: Any, ranks: Any, borrow: Any) -> None:
    budget = 10 * MIB
    (rank,) = expecting(agent, ranks, memory_bytes=budget)
    granted, _ = borrow(rank, size_bytes=1 << 40)
    assert 0 < granted <= budget - 3 * slot_bytes(DATA) - 4096
    assert agent.status().memory_used_bytes <= budget
    assert borrow(rank, "more") == (0, -1)


def test_slots_that_are_reserved_later_are_all_that_they_would_have_been(
    new_agent: Callable[..., Any], ranks: Any, borrow: Any
) -> None:
    agent = new_agent(memory_limit=40 * MIB)
    first, second = expecting(agent, ranks, 2)
    borrow(first, size_bytes=1 << 30)
    for step in (1, 2, 3):
        for rank in (first, second):
            rank.save(step, data_bytes=DATA - 100_000, due=False)
    assert len(agent.slot_files()) == 6
    assert len(lent_files(agent)) == 1


@pytest.mark.parametrize("said", ["expected", "reserved"])
def test_state_that_grows_has_its_slots_and_what_was_lent_is_taken_back(
    new_agent: Callable[..., Any], ranks: Any, borrow: Any, said: str
) -> None:
    limit = 40 * MIB
    agent = new_agent(memory_limit=limit)
    (rank,) = expecting(agent, ranks)
    granted, descriptor = borrow(rank, size_bytes=1 << 30)
    os.pwrite(descriptor, b"x" * MIB, 0)
    assert granted > 30 * MIB
    grown = 12 * MIB
    if said == "expected":
        rank.client.send(Expect(size_bytes=grown))
    else:
        reserved, slot = rank.reserve(1, grown)
        os.close(slot)
        assert reserved.slots == 3
    ranks.eventually(lambda: [slot.st_size for slot in agent.slots()] == [slot_bytes(grown)] * 3, "three larger slots")
    assert not is_marked(descriptor, granted)
    assert os.fstat(descriptor).st_blocks == 0
    assert (lent_files(agent), borrow(rank)) == ([], (0, -1))
    assert agent.used_bytes() <= limit


def test_job_that_comes_has_its_share_although_others_have_borrowed(
    new_agent: Callable[..., Any], ranks: Any, borrow: Any
) -> None:
    agent = new_agent(memory_limit=40 * MIB)
    (rank,) = expecting(agent, ranks)
    granted, descriptor = borrow(rank, size_bytes=1 << 30)
    kept = {path.name for path in agent.slot_files()}
    other = agent.join(job="default/other", run="uid2-0")
    reserved, slot = other.reserve(1, 6 * MIB)
    os.close(slot)
    assert reserved.slots == 3
    assert not is_marked(descriptor, granted)
    assert kept <= {path.name for path in agent.slot_files()}


# ---------------------------------------------------------------- how long


def test_what_was_lent_is_gone_when_the_last_rank_says_goodbye(agent: Any, ranks: Any, borrow: Any) -> None:
    first, second = expecting(agent, ranks, 2)
    granted, descriptor = borrow(first)
    first.close()
    ranks.eventually(lambda: not agent.job().ranks[0].alive, "the first rank has left")
    assert lent_files(agent)
    assert borrow(second)[0] == granted
    second.close()
    ranks.eventually(lambda: not lent_files(agent), "nothing is lent any more")
    assert not is_marked(descriptor, granted)
    assert agent.status().memory_used_bytes == 6 * slot_bytes(DATA)


def test_what_was_lent_is_gone_when_its_rank_is_killed(agent: Any, ranks: Any, start_rank: Callable[..., Any]) -> None:
    process = start_rank(agent, steps=[1], borrow="activations")
    assert [path.stat().st_blocks * 512 for path in lent_files(agent)] == [MIB + 4096]
    process.kill()
    ranks.eventually(lambda: not lent_files(agent), "nothing is lent any more")
    assert agent.status().memory_used_bytes == sum(slot.st_size for slot in agent.slots())


def test_newer_run_ends_what_an_older_one_borrowed(agent: Any, ranks: Any, borrow: Any) -> None:
    (old,) = expecting(agent, ranks)
    granted, before = borrow(old)
    (new,) = expecting(agent, ranks, run="uid1-1")
    assert not is_marked(before, granted)
    assert borrow(old) == (0, -1)
    again, after = borrow(new)
    assert again == granted
    assert os.fstat(after).st_ino != os.fstat(before).st_ino
    old.close()
    assert borrow(new)[0] == granted
    assert is_marked(after, granted)


def test_job_that_leaves_the_node_leaves_nothing_lent(new_agent: Callable[..., Any], ranks: Any, borrow: Any) -> None:
    agent = new_agent("--idle-timeout", "0.2")
    (rank,) = expecting(agent, ranks)
    borrow(rank)
    rank.close()
    ranks.eventually(lambda: not files_in(agent.memory_dir, "default/train/*"), "the job is gone")
    assert agent.status().memory_used_bytes == 0


def test_agent_that_starts_takes_back_what_the_one_before_lent(agent: Any, ranks: Any, borrow: Any) -> None:
    (rank,) = expecting(agent, ranks)
    granted, descriptor = borrow(rank)
    os.pwrite(descriptor, b"x" * MIB, 0)
    agent.kill()
    assert is_marked(descriptor, granted)
    assert lent_files(agent)
    agent.start()
    assert lent_files(agent) == []
    assert not is_marked(descriptor, granted)
    assert os.fstat(descriptor).st_blocks == 0
    (back,) = expecting(agent, ranks)
    assert borrow(back)[0] == granted


def test_agent_that_ends_in_order_leaves_nothing_lent(agent: Any, ranks: Any, borrow: Any) -> None:
    (rank,) = expecting(agent, ranks)
    borrow(rank)
    assert agent.terminate() == 0
    assert lent_files(agent) == []


# ---------------------------------------------------------------- who misbehaves


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "../../other/lent/x"}, {"name": ""}, {"name": ".x"}, {"name": "a/b"}, {"name": "x" * 300},
        {"size_bytes": 0}, {"size_bytes": -1}, {"size_bytes": 2**44 + 1}, {"size_bytes": 1.5}, {"run": "uid2-0"},
    ],
    ids=str,
)  # fmt: skip
def test_request_out_of_range_is_refused(changes: dict[str, object]) -> None:
    body = {"type": "Borrow", "id": 1, "name": "activations", "size_bytes": 1, **changes}
    with pytest.raises(ProtocolError):
        decode(json.dumps(body).encode())


def test_answer_that_lends_something_comes_with_a_descriptor() -> None:
    assert [Lent(id=1, granted_bytes=size).descriptors for size in (0, 4096)] == [0, 1]
    with pytest.raises(ProtocolError):
        Lent(id=1, granted_bytes=-1)


def test_rank_that_asks_under_ever_new_names_has_sixteen(agent: Any, ranks: Any, borrow: Any) -> None:
    (rank,) = expecting(agent, ranks)
    granted = [borrow(rank, f"name{number}", 4096)[0] for number in range(20)]
    assert granted == [4096] * 16 + [0] * 4
    assert len(lent_files(agent)) == 16


def test_rank_that_asks_on_and_on_and_never_reads_loses_its_connection_alone(
    agent: Any, ranks: Any, borrow: Any
) -> None:
    (rank,) = expecting(agent, ranks)
    (other,) = expecting(agent, ranks, job="default/other", run="uid2-0")
    borrow(rank)
    before = agent.descriptors()
    for number in range(5000):
        try:
            rank.client.send(Borrow(id=10_000 + number, name="activations", size_bytes=SIZE))
        except StepfastError:
            break
    ranks.eventually(lambda: agent.descriptors() <= before + 70, "it holds no more than it may")
    assert borrow(other)[0] == SIZE
    assert not other.lost.is_set()


def test_rank_that_makes_it_larger_is_sent_away_and_the_memory_is_freed(agent: Any, ranks: Any, borrow: Any) -> None:
    (rank,) = expecting(agent, ranks)
    (other,) = expecting(agent, ranks, job="default/other", run="uid2-0")
    granted, descriptor = borrow(rank)
    os.posix_fallocate(descriptor, 0, granted + 64 * MIB)
    rank.wait_lost()
    ranks.eventually(lambda: os.fstat(descriptor).st_blocks == 0, "its memory is freed")
    assert lent_files(agent) == []
    assert not other.lost.is_set()


@pytest.mark.parametrize("size", [0, 4097], ids=["empty", "cut"])
def test_file_that_a_rank_cut_short_is_removed_all_the_same(agent: Any, ranks: Any, borrow: Any, size: int) -> None:
    (rank,) = expecting(agent, ranks)
    _, descriptor = borrow(rank)
    os.ftruncate(descriptor, size)
    rank.close()
    ranks.eventually(lambda: not lent_files(agent), "nothing is lent any more")
    assert os.fstat(descriptor).st_blocks == 0
    assert agent.status().memory_used_bytes == 3 * slot_bytes(DATA)


def test_agent_from_before_costs_the_connection_and_is_an_error_of_the_agents(agent: Any, ranks: Any) -> None:
    # It knows no frame of this type, which is what this one says of another.
    (rank,) = expecting(agent, ranks)
    unknown = type("Lend", (Borrow,), {"__slots__": ()})
    rank.client.send(unknown(id=1, name="activations", size_bytes=1))
    rank.wait_lost()
    with pytest.raises(AgentError):
        rank.client.borrow("activations", 1)
