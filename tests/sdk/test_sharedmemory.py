"""Memory that the ranks of a node share: without an agent and with one, and what is left of it when they die."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch._C._distributed_c10d import HashStore, TCPStore

from eventual import files_in
from stepfast import client
from stepfast.errors import GangError
from stepfast.messages import VERSION, Borrow, Hello
from stepfast.torch import sharedmemory
from stepfast.torch.gang import Alone, StoreGang
from stepfast.torch.link import AgentLink
from stepfast.torch.sharedmemory import SharedMemory, open_shared

SIZE = 1 << 20

# Ranks in processes of their own, forked where torch is imported by now: one for each line, which says which rank, at
# which store, and before which exchange it is to go no further.
RANKS = """
import os, signal, sys
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
from stepfast.environment import read_environment
from stepfast.torch.gang import StoreGang
from stepfast.torch.sharedmemory import open_shared

class Told(StoreGang):
    def exchange(self, topic, text):
        if topic.endswith(stop):
            print("stops", flush=True)
            signal.pause()
        return super().exchange(topic, text)

def run(rank, port):
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    gang = Told(store, rank=rank, world_size=2)
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environment = read_environment(variables, script="train")
    shared = open_shared("activations", 1 << 20, environment=environment, link=None, gang=gang)
    assert shared.write(4096 * rank, b"of rank %d" % rank)
    gang.exchange("written", "")
    found = bytearray(9)
    assert shared.read_into(4096 * (1 - rank), found)
    print(found.decode(), flush=True)
    signal.pause()

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    rank, port, stop = line.split()
    child = os.fork()
    if child == 0:
        try:
            run(int(rank), int(port))
        finally:
            os._exit(1)
    print(child, flush=True)
"""


def at_once(work: list[Callable[[], Any]]) -> list[Any]:
    """What all of it returns, each in a thread of its own."""
    with ThreadPoolExecutor(len(work)) as threads:
        return [future.result(60) for future in [threads.submit(one) for one in work]]


@pytest.fixture
def open_on() -> Iterator[Callable[..., list[SharedMemory | None]]]:
    """`open_on(environments, links)`: what each rank gets; all are closed at the end."""
    opened: list[SharedMemory | None] = []
    store = HashStore()

    def open_all(
        environments: list[Any], links: list[AgentLink | None] | None = None, sizes: list[int] | None = None
    ) -> list[SharedMemory | None]:
        def rank(index: int) -> SharedMemory | None:
            environment = environments[index]
            gang = StoreGang(store, rank=index, world_size=len(environments))
            link = links[index] if links is not None else None
            size = sizes[index] if sizes is not None else SIZE
            return open_shared("activations", size, environment=environment, link=link, gang=gang)

        found = at_once([lambda i=i: rank(i) for i in range(len(environments))])
        opened.extend(found)
        return found

    yield open_all
    for shared in opened:
        if shared is not None:
            shared.close()


@pytest.fixture
def environments(bench: Any) -> Callable[..., list[Any]]:
    """`environments(2, 1)`: of a gang with two ranks on the first node and one on the second."""

    def make(*nodes: int) -> list[Any]:
        plain = replace(bench.environment(), world_size=sum(nodes))
        places = [(node, local) for node, ranks in enumerate(nodes) for local in range(ranks)]
        return [
            replace(plain, rank=rank, local_rank=local, node=node, local_world_size=nodes[node])
            for rank, (node, local) in enumerate(places)
        ]

    return make


def left_behind() -> set[str]:
    """Files of shared memory that have a name."""
    return {str(path) for folder in ("/dev/shm", tempfile.gettempdir()) for path in Path(folder).glob("stepfast-*")
            if path.is_file()}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = left_behind()
    yield
    assert left_behind() <= before


# ---------------------------------------------------------------- without an agent


@dataclass(kw_only=True)
class Two:
    """A gang of two on one node: one rank is a process of its own, the other one a thread of the test's."""

    store: TCPStore
    environments: list[Any]
    forks: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)

    def start(self, rank: int, stop: str = "nowhere") -> psutil.Process:
        assert self.forks.stdin is not None
        self.forks.stdin.write(f"{rank} {self.store.port} {stop}\n")
        self.forks.stdin.flush()
        # It may have come to say something by now: the number is the one line that is a number.
        self.said = [self._line()]
        while not self.said[-1].isdigit():
            self.said.append(self._line())
        return psutil.Process(int(self.said.pop()))

    def line(self) -> str:
        return self.said.pop(0) if self.said else self._line()

    def _line(self) -> str:
        assert self.forks.stdout is not None
        return self.forks.stdout.readline().strip()

    def gang(self, rank: int) -> StoreGang:
        return StoreGang(TCPStore("127.0.0.1", self.store.port, is_master=False), rank=rank, world_size=2)

    def open(self, rank: int, gang: StoreGang) -> SharedMemory | None:
        return open_shared("activations", SIZE, environment=self.environments[rank], link=None, gang=gang)

    def say_for_the_dead(self, rank: int) -> None:
        """What lets the living rank end, which would wait for the supervisor to end it."""
        for topic in ("file", "size"):
            self.store.set(f"1/shared/activations/0/{topic}/0/{rank}", '{"node": 0, "size": 0}')


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", RANKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as made:
        try:
            yield made
        finally:
            for child in psutil.Process(made.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            made.kill()


@pytest.fixture
def two(environments: Callable[..., list[Any]], forks: subprocess.Popen[str]) -> Two:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return Two(store=store, environments=environments(2), forks=forks)


def test_two_processes_share_and_one_goes_on_when_the_other_is_killed(two: Two) -> None:
    before = left_behind()
    process, gang = two.start(0), two.gang(1)
    shared = two.open(1, gang)
    assert shared is not None
    with contextlib.closing(shared):
        assert left_behind() == before
        assert shared.write(4096, b"of rank 1")
        gang.exchange("written", "")
        assert two.line() == "of rank 1"
        process.kill()
        process.wait()
        found = bytearray(9)
        assert shared.read_into(0, found)
        assert found == b"of rank 0"


@pytest.mark.parametrize(("rank", "stop"), [(0, "/file"), (0, "/size"), (1, "/size")], ids=str)
def test_rank_that_is_killed_in_the_middle_leaves_nothing_behind(rank: int, stop: str, two: Two) -> None:
    before = left_behind()
    process = two.start(rank, stop)
    with ThreadPoolExecutor(1) as thread:
        living = thread.submit(two.open, 1 - rank, two.gang(1 - rank))
        try:
            assert two.line() == "stops"
            process.kill()
            process.wait()
            assert left_behind() == before
        finally:
            two.say_for_the_dead(rank)
        assert living.result(60) is None
    assert left_behind() == before


def test_ranks_of_one_node_have_one_file_and_other_nodes_others(
    environments: Callable[..., list[Any]], open_on: Callable[..., list[Any]]
) -> None:
    first, second, elsewhere = open_on(environments(2, 1))
    inodes = [os.fstat(shared.descriptor).st_ino for shared in (first, second, elsewhere)]
    assert inodes[0] == inodes[1] != inodes[2]
    assert os.fstat(first.descriptor).st_nlink == 0
    assert [shared.size_bytes for shared in (first, second, elsewhere)] == [SIZE] * 3


def test_what_one_rank_writes_the_other_reads_by_calls_and_by_mapping(
    environments: Callable[..., list[Any]], open_on: Callable[..., list[Any]]
) -> None:
    first, second = open_on(environments(2), sizes=[3 * SIZE, SIZE])
    values = torch.arange(100_000, dtype=torch.float32)
    assert first.write(4096, memoryview(values.numpy()).cast("B"))
    back = torch.zeros_like(values)
    assert second.read_into(4096, memoryview(back.numpy()))
    assert torch.equal(back, values)
    first.buffer[0:5] = b"hello"
    assert second.buffer[0:5] == b"hello"
    mapped = torch.frombuffer(second.buffer, dtype=torch.float32, count=100_000, offset=4096)
    assert torch.equal(mapped, values)
    second.close()
    second.close()
    assert torch.equal(mapped, values)
    assert first.size_bytes == 3 * SIZE
    with pytest.raises(ValueError, match="not within"):
        first.write(3 * SIZE - 1, b"xx")
    with pytest.raises(ValueError, match="not within"):
        first.read_into(-1, bytearray(1))


def test_name_may_be_opened_again(environments: Callable[..., list[Any]], open_on: Callable[..., list[Any]]) -> None:
    gang = environments(2)
    before, after = open_on(gang)[0], open_on(gang)
    assert before.write(0, b"before")
    found = bytearray(6)
    assert after[1].read_into(0, found)
    assert found == bytes(6)


def test_file_that_one_rank_of_the_node_cannot_open_is_nobodys(
    environments: Callable[..., list[Any]], open_on: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where the ranks do not see each other's /proc: the process has another number there.
    told = os.getpid()
    monkeypatch.setattr(sharedmemory.os, "getpid", lambda: 2**30)
    first, second, elsewhere = open_on(environments(2, 1))
    monkeypatch.setattr(sharedmemory.os, "getpid", lambda: told)
    assert (first, second) == (None, None)
    assert elsewhere.size_bytes == SIZE


def test_it_is_at_most_half_of_what_is_free(
    bench: Any, tmpfs: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = tmpfs("size=2m"), tmpfs("size=8m")
    monkeypatch.setattr(sharedmemory, "_SHM", small)
    monkeypatch.setattr(tempfile, "tempdir", str(large))

    def opened(size_bytes: int) -> tuple[int, int]:
        shared = open_shared("a", size_bytes, environment=bench.environment(), link=None, gang=Alone())
        assert shared is not None
        with contextlib.closing(shared):
            return shared.size_bytes, os.fstat(shared.descriptor).st_dev

    assert opened(1000) == (4096, small.stat().st_dev)
    assert opened(2 << 20) == (2 << 20, large.stat().st_dev)
    assert opened(100 << 20) == ((4 << 20) - 4096, large.stat().st_dev)
    monkeypatch.setattr(tempfile, "tempdir", str(large / "nowhere"))
    assert opened(100 << 20) == ((1 << 20) - 4096, small.stat().st_dev)
    monkeypatch.setattr(sharedmemory, "_SHM", large / "nowhere")
    assert open_shared("a", 1, environment=bench.environment(), link=None, gang=Alone()) is None


def test_file_system_that_is_full_ends_no_process(
    bench: Any, tmpfs: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmpfs("size=2m")
    monkeypatch.setattr(sharedmemory, "_SHM", folder)
    shared = open_shared("a", 1 << 19, environment=bench.environment(), link=None, gang=Alone())
    assert shared is not None
    with contextlib.closing(shared):
        with contextlib.suppress(OSError):
            (folder / "others").write_bytes(bytes(3 << 20))
        assert not shared.write(0, bytes(1 << 19))
        (folder / "others").unlink()
        assert shared.write(0, bytes(1 << 19))


def test_ranks_that_do_not_meet_leave_no_descriptor(bench: Any) -> None:
    class Broken(Alone):
        def exchange(self, topic: str, text: str) -> list[str]:
            raise GangError("the store is gone")

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(GangError):
        open_shared("a", SIZE, environment=bench.environment(), link=None, gang=Broken())
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("name", "size"), [("../x", 1), ("", 1), ("a", 0), ("a", 2**60)], ids=str)
def test_name_or_size_that_no_file_has_is_refused(bench: Any, name: str, size: int) -> None:
    with pytest.raises(ValueError, match=r"file|size_bytes"):
        open_shared(name, size, environment=bench.environment(), link=None, gang=Alone())


# ---------------------------------------------------------------- with an agent


@pytest.fixture
def join() -> Iterator[Callable[..., list[Any]]]:
    """Links of all ranks of a node to an agent, which knows how large their files are."""
    links: list[AgentLink] = []

    def make(agent: Any, environments: list[Any]) -> list[Any]:
        made = []
        for environment in environments:
            hello = Hello(
                version=VERSION, job=str(environment.job), run=environment.run, rank=environment.rank,
                local_rank=environment.local_rank, world_size=environment.world_size,
                local_world_size=environment.local_world_size, node=0, pid=os.getpid(),
                storage_uri=environment.storage_uri, memory_bytes=0, max_to_keep=0, resume_step=0,
            )  # fmt: skip
            made.append(AgentLink(agent.socket, hello))
            made[-1].expect(100_000, lambda slot: None)
        links.extend(made)
        return made

    yield make
    for link in links:
        link.close()


def test_agent_lends_one_file_to_all_ranks_and_its_end_is_seen(
    environments: Callable[..., list[Any]], open_on: Callable[..., list[Any]], join: Callable[..., list[Any]],
    start_agent: Callable[..., Any], until: Callable[..., Any],
) -> None:  # fmt: skip
    agent = start_agent()
    gang = environments(2)
    links = join(agent, gang)
    job = agent.memory / str(gang[0].job)
    until(lambda: len(files_in(job, "[0-9]*/slot-*")) == 6, "the slots are made")
    first, second = open_on(gang, links)
    assert first.size_bytes == second.size_bytes == SIZE
    assert first.write(0, b"hello")
    found = bytearray(5)
    assert second.read_into(0, found)
    assert found == b"hello"
    assert len(list(job.glob("lent/*"))) == 1
    agent.kill()
    assert second.read_into(0, found)
    agent.start()
    until(lambda: second.is_lost, "the next agent took it back")
    assert not first.write(0, b"hello")
    assert not second.read_into(0, found)
    assert list(job.glob("lent/*")) == []


def test_agent_that_has_nothing_to_spare_lends_nothing(
    environments: Callable[..., list[Any]], open_on: Callable[..., list[Any]], join: Callable[..., list[Any]],
    start_agent: Callable[..., Any],
) -> None:  # fmt: skip
    gang = environments(1)
    assert open_on(gang, join(start_agent(limit_bytes=320_000), gang)) == [None]


def test_agent_from_before_lends_nothing_and_the_link_to_it_lasts(
    bench: Any, join: Callable[..., list[Any]], start_agent: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
    until: Callable[..., Any],
) -> None:  # fmt: skip
    environment = bench.environment()
    (link,) = join(start_agent(), [environment])
    before = link.client(10.0)
    # To an agent that does not know the request it is a frame of an unknown type.
    monkeypatch.setattr(client, "Borrow", type("Unknown", (Borrow,), {"__slots__": ()}))
    assert open_shared("a", SIZE, environment=environment, link=link, gang=Alone()) is None
    until(lambda: link.client(60.0) is not before, "that one closes the connection, and takes another")
    assert link.client(60.0).steps() == ()
