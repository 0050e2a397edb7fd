"""Whoever misbehaves harms itself: another job's rank saves, commits and restores undisturbed."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import socket
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from eventual import files_in
from stepfast import catalog
from stepfast.errors import AgentError, AgentUnavailable, ProtocolError, StepfastError
from stepfast.messages import Failure, Fetch, Reserve, Reserved, Staged
from stepfast.protocol import Decoder, encode
from stepfast.slot import CONTROL_BYTES, SlotState
from stepfast_sidecar import agent as agent_module
from stepfast_sidecar import reception
from stepfast_sidecar.config import Config
from stepfast_sidecar.intake import Peer, listen

NEIGHBOUR = "default/neighbour"


class Neighbour:
    """The other job's rank. It saves on and on, whatever happens around it."""

    def __init__(self, agent: Any, ranks: Any) -> None:
        self.agent, self.ranks = agent, ranks
        self.rank = agent.join(job=NEIGHBOUR, run="neighbour-0")
        self.step = 0
        self.save()
        self.persister = agent.persisters()[NEIGHBOUR]

    def save(self) -> None:
        self.step += 1
        self.rank.save(self.step)
        self.rank.wait_committed(self.step)

    def check(self) -> None:
        """It can save, commit and restore; its persister is the one it had; the agent is idle."""
        self.save()
        path = f"global_step{self.step}/state-00000-of-00001-neighbour-0.safetensors"
        for refresh in (False, True):
            fetched, descriptor = self.rank.client.fetch(path, refresh=refresh)
            try:
                stored = os.pread(descriptor, fetched.size_bytes, fetched.offset)
            finally:
                os.close(descriptor)
            assert stored == self.ranks.RankFile(rank=0, step=self.step).bytes()
        assert self.agent.persisters()[NEIGHBOUR] == self.persister
        assert not self.rank.lost.is_set()
        status = self.agent.job(run="neighbour-0", job=NEIGHBOUR)
        assert status.persist_error is None
        self.ranks.eventually(lambda: not any(job.pending_steps for job in self.agent.status().jobs), "idle")


@pytest.fixture(scope="module")
def the_neighbour(shared_agent: Any, ranks: Any) -> Neighbour:
    return Neighbour(shared_agent, ranks)


@pytest.fixture
def neighbour(the_neighbour: Neighbour) -> Iterator[Neighbour]:
    """Checked after each test."""
    yield the_neighbour
    the_neighbour.check()


_runs = iter(range(10_000))


@pytest.fixture
def tenant(shared_agent: Any, neighbour: Neighbour) -> Callable[..., Any]:
    """Joins the agent as a rank of a run of its own."""
    return lambda **values: shared_agent.join(**{"job": "default/hostile", "run": f"hostile-{next(_runs)}", **values})


def _raw(agent: Any, data: bytes) -> list[Any]:
    """Sends bytes, and reads until the agent closes the connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(20)
        sock.connect(agent.socket)
        with contextlib.suppress(OSError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        decoder, messages = Decoder(1 << 24), []
        with contextlib.suppress(ConnectionResetError):
            while data := sock.recv(1 << 16):
                messages += list(decoder.feed(data))
        return messages


def _frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        (1 << 20).to_bytes(4, "big") + b"{",
        _frame(b"{}"),
        _frame(b"null"),
        _frame(b"[" * 60_000),
        _frame(b'{"type":"Hello"}'),
        _frame(b'{"type":"Bye"}'),
        _frame(b'{"type":"Want","step":1}'),
        _frame(b'{"type":"Committed","step":1,"committed_time":1.0}'),
        _frame(b'{"type":"FlushRun","job":"../..","run":"a"}'),
        _frame(b'{"type":"RequestSave","job":"","run":""}'),
        _frame(b'{"type":"FlushRun","job":"\\ud800/a","run":"\\u0000"}'),
        random.Random(1).randbytes(50_000),
    ],
    ids=[
        "oversized",
        "over-limit",
        "no-type",
        "null",
        "nested",
        "half-hello",
        "bye-first",
        "want-first",
        "from-agent",
        "traversal",
        "empty-job",
        "surrogates",
        "random",
    ],
)
def test_broken_frames_are_answered_with_a_reason_and_the_end(
    shared_agent: Any, neighbour: Neighbour, data: bytes
) -> None:
    *_, last = _raw(shared_agent, data)
    assert isinstance(last, Failure)
    assert last.reason


@pytest.mark.parametrize("cut", [1, 3, 4, 20], ids=str)
def test_connection_that_ends_within_a_frame_is_forgotten(shared_agent: Any, neighbour: Neighbour, cut: int) -> None:
    assert _raw(shared_agent, encode(shared_agent.hello(job="default/hostile"))[:cut]) == []


def test_frames_broken_after_a_valid_hello_end_only_that_connection(shared_agent: Any, neighbour: Neighbour) -> None:
    generator = random.Random(2)
    for count in range(30):
        hello = shared_agent.hello(job="default/hostile", run=f"fuzz-{count}")
        body = bytearray(encode(Reserve(id=1, step=1, name="a", size_bytes=9, window_begin=0, drop=()))[4:])
        body[generator.randrange(len(body))] ^= 1 << generator.randrange(8)
        _raw(shared_agent, encode(hello) + _frame(bytes(body)))


def test_other_process_that_claims_a_living_rank_is_refused_and_changes_nothing(
    tenant: Callable[..., Any], shared_agent: Any
) -> None:
    rank = tenant(max_to_keep=0)
    rank.save(1)
    rank.wait_committed(1)
    for changes in ({"pid": 1, "max_to_keep": 1}, {"pid": 1, "local_world_size": 2, "world_size": 2}):
        with pytest.raises(ProtocolError):
            shared_agent.join(job=rank.hello.job, run=rank.hello.run, **changes)
    rank.save(2)
    rank.wait_committed(2)
    rank.save(3)
    rank.wait_committed(3)
    store = shared_agent.store()
    assert {1, 2, 3} <= {found.step for found in catalog.committed_steps(store, "default/hostile")}


def test_rank_of_another_world_size_is_refused(tenant: Callable[..., Any], shared_agent: Any) -> None:
    rank = tenant(world_size=2, local_world_size=2)
    with pytest.raises(ProtocolError, match="2 ranks"):
        shared_agent.join(
            job=rank.hello.job, run=rank.hello.run, rank=1, world_size=3, local_rank=1, local_world_size=2
        )


def test_job_with_another_storage_is_refused(tenant: Callable[..., Any], shared_agent: Any, ranks: Any) -> None:
    rank = tenant()
    with pytest.raises(ProtocolError, match="storage"):
        ranks.RankPeer(shared_agent.socket, replace(rank.hello, rank=0, storage_uri="file:///elsewhere"))


def test_slot_that_never_was_ends_the_connection(tenant: Callable[..., Any]) -> None:
    rank = tenant()
    rank.client.send(Staged(slot=4000, seq=1, stall_seconds=0.0))
    rank.wait_lost()


@pytest.mark.parametrize("seq", [0, 2, 2**40], ids=str)
def test_use_of_a_slot_that_was_not_reserved_is_not_taken(
    tenant: Callable[..., Any], shared_agent: Any, seq: int
) -> None:
    rank = tenant()
    reserved, descriptor = rank.reserve(1, 1000)
    rank.write_record(descriptor, rank.record(1, seq, 1000))
    os.close(descriptor)
    rank.client.send(Staged(slot=reserved.slot, seq=seq, stall_seconds=0.0))
    rank.save(2)
    rank.wait_committed(2)
    assert rank.committed() == [2]


@pytest.mark.parametrize(
    "lie",
    [
        {"run": "other-0"},
        {"rank": 1},
        {"world_size": 5},
        {"node": 9},
        {"files": 0},
        {"state": SlotState.WRITING},
        {"window_bytes": 1 << 40, "file_bytes": 1 << 40},
        {"window_bytes": 900, "file_bytes": 10},
        {"window_bytes": 0, "file_bytes": 0},
        {"window_begin": 5},
        {"window_begin": 8 << 20, "window_bytes": 1000, "file_bytes": 2**60},
        {"window_begin": 4096, "window_bytes": 1000, "file_bytes": 5096},
    ],
    ids=str,
)
def test_control_page_that_lies_ends_the_connection(tenant: Callable[..., Any], lie: dict[str, Any]) -> None:
    rank = tenant()
    reserved, descriptor = rank.reserve(1, 1000)
    rank.write_record(descriptor, rank.record(1, reserved.seq, 1000, **lie))
    os.close(descriptor)
    rank.client.send(Staged(slot=reserved.slot, seq=reserved.seq, stall_seconds=0.0))
    rank.wait_lost()


@pytest.mark.parametrize(
    "garbage",
    [b"\xff" * 4096, b"[" * 4096, random.Random(3).randbytes(4096)],
    ids=["ones", "nested", "random"],
)
def test_control_page_of_garbage_ends_the_connection(tenant: Callable[..., Any], garbage: bytes) -> None:
    rank = tenant()
    reserved, descriptor = rank.reserve(1, 1000)
    os.pwrite(descriptor, garbage, 0)
    os.close(descriptor)
    rank.client.send(Staged(slot=reserved.slot, seq=reserved.seq, stall_seconds=0.0))
    rank.wait_lost()


@pytest.mark.parametrize(
    "path",
    [
        "../neighbour/global_step1/manifest.json",
        "global_step1/../../neighbour/global_step1/manifest.json",
        "global_step1/part-00000-x/../../../neighbour/global_step1/part-00000-neighbour-0.json",
        "/etc/passwd",
        "",
        "\0",
    ],
)
def test_path_out_of_the_jobs_folder_is_refused(tenant: Callable[..., Any], path: str) -> None:
    rank = tenant()
    with pytest.raises(StepfastError):
        rank.client.fetch(path)
    rank.wait_lost()


def test_peer_that_never_reads_is_cut_off_before_the_agent_runs_out_of_descriptors(
    shared_agent: Any, neighbour: Neighbour
) -> None:
    before = shared_agent.descriptors()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(20)
        sock.connect(shared_agent.socket)
        hello = replace(neighbour.rank.hello, run="neighbour-9", storage_uri=shared_agent.storage_uri)
        sock.sendall(encode(hello))
        fetch = Fetch(id=1, path="global_step1/manifest.json", refresh=True)
        with contextlib.suppress(OSError):
            for _ in range(3000):
                sock.sendall(encode(fetch))
        neighbour.save()
        assert shared_agent.descriptors() < before + 150
    neighbour.ranks.eventually(lambda: shared_agent.descriptors() <= before + 2, "its descriptors are given back")


def test_peer_that_never_says_hello_keeps_nobody_waiting(shared_agent: Any, neighbour: Neighbour) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.connect(shared_agent.socket)
        neighbour.save()


def test_peer_that_never_says_hello_is_closed_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "HELLO_SECONDS", 0.01)

    async def meet() -> bytes:
        agent = agent_module.Agent(
            Config(socket=tmp_path / "s", memory_dir=tmp_path / "m", memory_limit_bytes=0, node="n")
        )
        door = agent.reception.open(listen(str(tmp_path / "s")))
        ours, theirs = socket.socketpair()
        with ours:
            await agent.reception.meet(Peer(theirs), door)
            await door.close()
            return ours.recv(1)

    assert asyncio.run(meet()) == b""


def test_tenant_that_truncates_its_slot_before_it_says_staged_is_refused(tenant: Callable[..., Any]) -> None:
    rank = tenant()
    reserved, descriptor = rank.reserve(1, 100_000)
    rank.write_record(descriptor, rank.record(1, reserved.seq, 100_000))
    os.ftruncate(descriptor, CONTROL_BYTES + 10)
    os.close(descriptor)
    rank.client.send(Staged(slot=reserved.slot, seq=reserved.seq, stall_seconds=0.0))
    rank.wait_lost()


def test_tenant_that_grows_its_slot_is_refused(tenant: Callable[..., Any]) -> None:
    rank = tenant()
    reserved, descriptor = rank.reserve(1, 100_000)
    rank.write_record(descriptor, rank.record(1, reserved.seq, 100_000))
    os.ftruncate(descriptor, CONTROL_BYTES + reserved.capacity_bytes + 1)
    os.close(descriptor)
    rank.client.send(Staged(slot=reserved.slot, seq=reserved.seq, stall_seconds=0.0))
    rank.wait_lost()


_MORE_BYTES = 64 << 20


def _lengthen(descriptor: int) -> None:
    os.posix_fallocate(descriptor, 0, os.fstat(descriptor).st_size + _MORE_BYTES)


def _allocate_beyond_the_end(descriptor: int) -> None:
    """Pages that the file's size tells nothing of."""
    keep_size, size = 1, os.fstat(descriptor).st_size
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    assert libc.fallocate(descriptor, keep_size, size, _MORE_BYTES) == 0, os.strerror(ctypes.get_errno())
    assert os.fstat(descriptor).st_size == size


def _is_cut_back(descriptor: int, reserved: Any) -> bool:
    found, size = os.fstat(descriptor), CONTROL_BYTES + reserved.capacity_bytes
    return found.st_size == size and found.st_blocks * 512 < size + _MORE_BYTES // 2


GROW = pytest.mark.parametrize("grow", [_lengthen, _allocate_beyond_the_end])


@GROW
def test_tenant_that_grows_its_slot_and_says_nothing_is_sent_away_and_the_slot_is_cut_back(
    tenant: Callable[..., Any], shared_agent: Any, ranks: Any, grow: Callable[[int], None]
) -> None:
    rank = tenant(job="default/silent")
    reserved, descriptor = rank.reserve(1, 100_000)
    grow(descriptor)
    assert not _is_cut_back(descriptor, reserved)
    rank.wait_lost()
    ranks.eventually(lambda: _is_cut_back(descriptor, reserved), "the memory is back")
    os.close(descriptor)
    back = shared_agent.join(job=rank.hello.job, run=rank.hello.run)
    back.save(2)
    back.wait_committed(2)


def test_tenant_that_grows_its_slot_and_says_nothing_is_told_why(tenant: Callable[..., Any], shared_agent: Any) -> None:
    hello = shared_agent.hello(job="default/silent", run=f"hostile-{next(_runs)}")
    reserve = Reserve(id=1, step=1, name="state", size_bytes=100_000, window_begin=0, drop=())
    decoder, messages = Decoder(1 << 24), []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(20)
        sock.connect(shared_agent.socket)
        sock.sendall(encode(hello) + encode(reserve))
        while True:
            data, descriptors, _, _ = socket.recv_fds(sock, 1 << 16, 8)
            messages += list(decoder.feed(data))
            for descriptor in descriptors:
                _lengthen(descriptor)
                os.close(descriptor)
            if not data:
                break
    (slot,) = [message.slot for message in messages if isinstance(message, Reserved)]
    assert messages[-1] == Failure(id=0, kind="ProtocolError", reason=f"slot {slot} was made larger than it is")


@GROW
@pytest.mark.parametrize("end", ["before", "after"])
def test_slot_that_a_process_grows_without_a_connection_is_cut_back(
    tenant: Callable[..., Any], shared_agent: Any, ranks: Any, grow: Callable[[int], None], end: str
) -> None:
    rank = tenant(job="default/quiet")
    reserved, descriptor = rank.reserve(1, 100_000)
    if end == "after":
        grow(descriptor)
    rank.close()
    ranks.eventually(lambda: not shared_agent.job(rank.hello.run, rank.hello.job).ranks[0].alive, "the rank has left")
    if end == "before":
        grow(descriptor)
    ranks.eventually(lambda: _is_cut_back(descriptor, reserved), "the memory is back")
    os.close(descriptor)


@GROW
def test_agent_that_ends_cuts_back_what_its_ranks_have_grown(
    new_agent: Callable[..., Any], grow: Callable[[int], None]
) -> None:
    agent = new_agent()
    reserved, descriptor = agent.join().reserve(1, 100_000)
    grow(descriptor)
    agent.terminate()
    assert _is_cut_back(descriptor, reserved)
    os.close(descriptor)


@GROW
def test_slot_that_grows_while_there_is_no_agent_is_what_it_was_to_the_next(
    new_agent: Callable[..., Any], ranks: Any, grow: Callable[[int], None]
) -> None:
    agent = new_agent()
    rank = agent.join()
    rank.save(1)
    rank.wait_committed(1)
    reserved, descriptor = rank.reserve(2, 100_000)
    used = agent.status().memory_used_bytes
    agent.kill()
    grow(descriptor)
    agent.start()
    assert agent.status().memory_used_bytes == used
    ranks.eventually(lambda: _is_cut_back(descriptor, reserved), "the memory is back")
    os.close(descriptor)
    assert agent.job().latest_memory_step == 1


def test_honest_rank_is_never_taken_for_one_that_grows_its_slots(agent: Any) -> None:
    sizes = (1, 4096, 100_001, 9_000_000, (32 << 20) - 7)
    for step, size in enumerate(sizes, 1):
        rank = agent.join(run=f"uid1-{step}")
        for again in range(3):
            rank.save(step * 10 + again, data_bytes=size)
            rank.wait_committed(step * 10 + again)
        rank.close()
    assert "larger" not in agent.log


@pytest.mark.parametrize("size", [0, CONTROL_BYTES, CONTROL_BYTES + 50_000_000], ids=["empty", "page", "half"])
def test_tenant_that_truncates_its_slot_while_it_is_persisted_loses_that_step_alone(
    tenant: Callable[..., Any], shared_agent: Any, ranks: Any, size: int
) -> None:
    job = f"default/cutter{size}"
    rank = tenant(job=job)
    file = ranks.RankFile(rank=0, step=1, data_bytes=100_000_000)
    reserved, descriptor = rank.reserve(1, file.size_bytes)
    rank.fill(descriptor, file, 0, file.size_bytes)
    rank.write_record(descriptor, rank.record(1, reserved.seq, file.size_bytes))
    rank.client.send(Staged(slot=reserved.slot, seq=reserved.seq, stall_seconds=0.0))
    folder = shared_agent.storage / job / "global_step1"
    ranks.eventually(lambda: files_in(folder, "*"), "the upload has begun")
    os.ftruncate(descriptor, size)
    os.close(descriptor)
    ranks.eventually(lambda: 1 in rank.dropped() + rank.committed(), "the step is given up", 60)


def test_tenant_that_scribbles_into_its_slot_while_it_is_persisted_harms_its_own_step(
    tenant: Callable[..., Any], shared_agent: Any, ranks: Any
) -> None:
    rank = tenant(job="default/scribbler")
    file = ranks.RankFile(rank=0, step=1, data_bytes=60_000_000)
    reserved, descriptor = rank.reserve(1, file.size_bytes)
    rank.fill(descriptor, file, 0, file.size_bytes)
    rank.write_record(descriptor, rank.record(1, reserved.seq, file.size_bytes))
    rank.client.send(Staged(slot=reserved.slot, seq=reserved.seq, stall_seconds=0.0))
    generator = random.Random(4)
    while not rank.committed() + rank.dropped():
        os.pwrite(descriptor, generator.randbytes(4096), CONTROL_BYTES + generator.randrange(60_000_000))
    os.close(descriptor)
    rank.save(2)
    rank.wait_committed(2)
    assert list(catalog.verify_step(shared_agent.store(), "default/scribbler", 2))


def test_flood_of_reservations_ends_the_connection(tenant: Callable[..., Any]) -> None:
    rank = tenant()
    with contextlib.suppress(AgentUnavailable):
        for count in range(5000):
            rank.client.send(Reserve(id=count, step=1, name="a", size_bytes=1 << 44, window_begin=0, drop=()))
    with contextlib.suppress(AgentError):
        rank.client.steps()


@pytest.mark.parametrize("uri", ["nonsense://x", "\ud800", "a\0b", ""], ids=ascii)
def test_storage_that_cannot_be_opened_is_said_to_the_job_that_named_it(
    new_agent: Callable[..., Any], ranks: Any, uri: str
) -> None:
    agent = new_agent()
    rank = ranks.RankPeer(agent.socket, replace(agent.hello(), storage_uri=uri))
    agent.peers.append(rank)
    rank.save(1)
    ranks.eventually(rank.failures, "the rank hears of it")
    assert "died" not in rank.failures()[0]
    assert agent.job().persist_error is not None


def test_garbage_in_control_pages_does_not_keep_a_restarted_agent_from_starting(
    new_agent: Callable[..., Any],
) -> None:
    agent = new_agent()
    rank = agent.join()
    rank.save(1)
    rank.wait_committed(1)
    for path in agent.slot_files():
        with path.open("r+b") as slot:
            body = b"[" * 1000
            for place in range(0, 4096 - 1024, 512):
                slot.seek(place)
                slot.write(len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body)
    agent.kill()
    agent.start()
    back = agent.join(run="uid1-1")
    back.save(2)
    back.wait_committed(2)


# ---------------------------------------------------------------- the port of metrics and probes

_MANY = 300


def _is_closed(silent: socket.socket) -> bool:
    """Whether the other side has closed the connection, which is otherwise used a little more."""
    try:
        silent.send(b"G")
        return silent.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_connections_that_never_end_their_requests_cost_few_threads_and_hold_up_no_probe(
    new_agent: Callable[..., Any], ranks: Any, free_port: int
) -> None:
    agent = new_agent("--metrics-port", str(free_port))
    process = psutil.Process(agent.pid)
    before = process.num_threads()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", free_port), 30)) for _ in range(_MANY)]
        for page in ("healthz", "readyz", "metrics"):
            for one in silent:
                _is_closed(one)
            with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/{page}", timeout=30) as answer:
                assert answer.status == 200
            assert process.num_threads() < before + _MANY // 2
        ranks.eventually(lambda: all(map(_is_closed, silent)), "none has more time than a request takes")
    ranks.eventually(lambda: process.num_threads() <= before + 1, "their threads have ended")
