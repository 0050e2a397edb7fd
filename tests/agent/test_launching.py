"""What a launcher announces is a hint: it costs no job anything, whatever it says and however often."""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from stepfast.client import connect
from stepfast.messages import VERSION, Launching
from stepfast.protocol import ANSWER_LIMIT, Decoder, encode
from stepfast_sidecar.persisterprocess import PersisterLost, PersisterProcess


def _launching(agent: Any, **values: Any) -> Launching:
    usual = {"job": "default/train", "run": "uid1-1", "storage_uri": agent.storage_uri, "first_rank": 0, "ranks": 1}
    return Launching(**{"version": VERSION, "resume_step": None, **usual, **values})


def _announce(path: str, launching: Launching) -> list[Any]:
    """Says it, and reads until the agent has ended the connection."""
    with connect(path, 30) as sock:
        sock.sendall(encode(launching))
        decoder, answers = Decoder(ANSWER_LIMIT), []
        while data := sock.recv(1 << 16):
            answers += list(decoder.feed(data))
        return answers


def _tier(rank: Any, step: int) -> str:
    """Where the rank's file of its first attempt is read from."""
    fetched, descriptor = rank.client.fetch(f"global_step{step}/state-00000-of-00001-uid1-0.safetensors", refresh=False)
    os.close(descriptor)
    return str(fetched.tier)


@pytest.mark.parametrize("resume_step", [None, 0, 1], ids=["newest", "none", "fixed"])
def test_announcement_of_another_storage_leaves_the_job_its_memory(
    agent: Any, ranks: Any, tmp_path: Path, resume_step: int | None
) -> None:
    rank = agent.join()
    rank.save(1)
    rank.wait_committed(1)
    rank.close()
    ranks.eventually(lambda: not agent.job().ranks[0].alive, "between two attempts nobody lives")
    slots, persisters = agent.slot_files(), agent.persisters()
    elsewhere = (tmp_path / "of-the-environment").as_uri()
    assert _announce(agent.socket, _launching(agent, storage_uri=elsewhere, resume_step=resume_step)) == []
    assert slots
    assert agent.slot_files() == slots
    assert agent.persisters() == persisters
    back = agent.join(run="uid1-1")
    assert _tier(back, 1) == "Memory"
    assert _announce(agent.socket, _launching(agent, storage_uri=elsewhere)) == []  # nor is it refused meanwhile
    assert _tier(back, 1) == "Memory"


def test_process_stays_for_the_next_attempt_and_while_that_is_awaited(new_agent: Callable[..., Any]) -> None:
    agent = new_agent("--idle-timeout", "40")  # looked at every 4 s; unused for 8 s, it may go
    rank = agent.join()
    rank.save(1)
    rank.wait_committed(1)
    living = agent.persisters()
    time.sleep(9)  # its job trains on without a save
    rank.close()
    time.sleep(4.5)
    assert agent.persisters() == living, "who comes next needs it at once"
    assert _announce(agent.socket, _launching(agent, resume_step=1)) == []
    time.sleep(14)
    assert agent.persisters() == living, "it may keep what ranks restore that are not here yet"


def test_announcement_with_other_credentials_leaves_the_job_its_own(
    node_agent: Callable[..., Any], kubelet: Any, new_pod: Any
) -> None:
    agent, job = node_agent(), "team-a/train"
    rank = agent.join(socket=kubelet.publish(new_pod()), job=job)
    rank.save(1)
    rank.wait_committed(1)
    persisters = agent.persisters()
    other = kubelet.publish(new_pod(run="uid1-1", secrets={"AWS_ACCESS_KEY_ID": "other", "AWS_SECRET_ACCESS_KEY": "x"}))
    assert _announce(other, _launching(agent, job=job)) == []
    assert "other credentials" not in agent.log
    rank.save(2)
    rank.wait_committed(2)
    assert agent.persisters() == persisters


def test_rank_with_another_storage_than_announced_is_taken_in(agent: Any, tmp_path: Path) -> None:
    assert _announce(agent.socket, _launching(agent, storage_uri=(tmp_path / "of-the-environment").as_uri())) == []
    rank = agent.join(run="uid1-1")
    rank.save(1)
    rank.wait_committed(1)


def _suspend(process: psutil.Process, eventually: Callable[..., None]) -> None:
    process.suspend()
    eventually(lambda: process.status() == psutil.STATUS_STOPPED, "it is stopped")  # until then it may read


@pytest.fixture
def stopped(
    node_agent: Callable[..., Any], kubelet: Any, new_pod: Any, eventually: Callable[..., None]
) -> Iterator[tuple[Any, str, Any, Any]]:
    """An agent, the pod's job, the pod, and the persister of its job, which answers nobody until it is resumed."""
    agent, pod, job = node_agent(), new_pod(), "team-a/train"
    agent.join(socket=kubelet.publish(pod), job=job).client.steps()  # nothing is left to do for it
    persister = psutil.Process(agent.persisters()[job])
    try:
        _suspend(persister, eventually)
        yield agent, job, pod, persister
    finally:
        persister.resume()


def _waiting_bytes(persister: psutil.Process) -> int:
    """What was written for the persister to do, and it has not read."""
    descriptor = os.open(f"/proc/{persister.pid}/fd/0", os.O_RDONLY | os.O_NONBLOCK)
    try:
        return int(struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4))[0])
    finally:
        os.close(descriptor)


def test_flood_of_announcements_is_one_thing_to_do(
    stopped: tuple[Any, str, Any, Any], kubelet: Any, eventually: Callable[..., None]
) -> None:
    agent, job, pod, persister = stopped
    before = agent.descriptors()
    with connect(kubelet.socket(pod), 30) as first:
        first.sendall(encode(_launching(agent, job=job, run="uid1-0")))
        eventually(lambda: _waiting_bytes(persister), "the first is taken up")
        waiting = _waiting_bytes(persister)
        for rank in range(100):
            assert _announce(kubelet.socket(pod), _launching(agent, job=job, run="uid1-0", first_rank=rank)) == []
        assert _waiting_bytes(persister) == waiting
        assert agent.descriptors() <= before + 2
        persister.resume()
        assert first.recv(1) == b""  # it was done, and its connection lasted as long
    _suspend(persister, eventually)
    with connect(kubelet.socket(pod), 30) as again:
        again.sendall(encode(_launching(agent, job=job, run="uid1-0")))
        eventually(lambda: _waiting_bytes(persister), "the next one is taken up")


def test_announcement_ends_with_its_pod(
    stopped: tuple[Any, str, Any, Any], kubelet: Any, eventually: Callable[..., None]
) -> None:
    agent, job, pod, persister = stopped
    with connect(kubelet.socket(pod), 30) as sock:
        sock.sendall(encode(_launching(agent, job=job, run="uid1-0")))
        eventually(lambda: _waiting_bytes(persister), "it is taken up")
        kubelet.unpublish(pod)
        assert sock.recv(1) == b""


def test_announcement_of_more_ranks_than_a_pod_may_have_is_refused(
    node_agent: Callable[..., Any], kubelet: Any, new_pod: Any
) -> None:
    agent, path = node_agent(), kubelet.publish(new_pod(run="uid1-1"))
    assert _announce(path, _launching(agent, job="team-a/train", ranks=256)) == []
    (answer,) = _announce(path, _launching(agent, job="team-a/train", ranks=257))
    assert "more ranks than the 256" in answer.reason


def test_persister_that_is_closed_while_it_starts_does_not_stay() -> None:
    """As of an announced job whose ranks come with another storage a moment later."""

    async def close_early() -> tuple[BaseException | None, list[psutil.Process]]:
        persister = PersisterProcess(
            "file:///nowhere",
            ["--folder", "a/b"],
            on_lost=lambda _: None,
            environment=os.environ,
            retry_limit_seconds=1,
        )
        asking = asyncio.create_task(persister.request("steps"))
        await asyncio.sleep(0)  # it is in the middle of it
        await persister.close()
        await asyncio.wait([asking], timeout=60)
        return asking.exception(), psutil.Process().children()

    error, children = asyncio.run(close_early())
    assert isinstance(error, PersisterLost)
    assert not [child for child in children if "stepfast_sidecar.persister" in child.cmdline()]
