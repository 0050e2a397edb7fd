"""What never answers, a storage or an agent, holds up neither the kills nor the end of `stepfast run`."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepfast.errors import AgentUnavailable, StorageUnavailable
from stepfast.nodeclient import NodeClient
from stepfast.step import JobKey
from stepfast_operator.actions import StopMode
from stepfast_operator.backends import jobstorage, localagent
from stepfast_operator.backends.localagent import AgentSettings, LocalAgent
from stepfast_operator.backends.process import ProcessBackend, ProcessSettings
from stepfast_operator.backends.statefolder import StateFolder
from stepfast_operator.observed import Intent
from stepfast_operator.record import Status
from stepfast_operator.spec import Trainer, TrainingJob, TrainingSpec

JOB = JobKey(namespace="local", name="x")
SECONDS = 60


class HungStore:
    """A storage that answers only once it is released: a dead NFS server."""

    uri = "hung://"

    def __init__(self) -> None:
        self.released = threading.Event()
        self.called = threading.Event()
        self.calls = 0
        self.closed = threading.Event()

    def list(self, folder: str) -> list[object]:
        self.calls += 1
        self.called.set()
        self.released.wait()
        return []

    def close(self) -> None:
        self.released.wait()
        self.closed.set()


@pytest.fixture
def store() -> Iterator[HungStore]:
    hung = HungStore()
    yield hung
    hung.released.set()


@pytest.fixture
def backend(store: HungStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProcessBackend:
    monkeypatch.setattr(jobstorage, "_STORAGE_SECONDS", 0.2)
    settings = ProcessSettings(
        storage_uri="hung://",
        open_store=lambda uri: store,  # type: ignore[arg-type,return-value] # as much as is needed of one
        memory_limit=1,
        on_line=lambda line: None,
        say=lambda text: None,
        on_change=lambda: None,
    )
    job = TrainingJob(job=JOB, spec=TrainingSpec(trainer=Trainer(command=("torchrun", "t.py"))))
    return ProcessBackend(job, uuid.uuid4().hex, StateFolder(tmp_path, JOB), None, settings)


def test_hung_storage_holds_up_no_kill_and_no_end(backend: ProcessBackend, store: HungStore) -> None:
    async def scenario() -> None:
        for _ in range(4):
            with pytest.raises(StorageUnavailable, match="hung://"):
                await backend.read_steps()
        assert store.calls == 1, "a call that hangs is not joined by others"
        await asyncio.wait_for(backend.stop(["run-1"], StopMode.KILL), SECONDS)
        await asyncio.wait_for(backend.close(), SECONDS)

    asyncio.run(scenario())


def test_hung_storage_holds_up_no_interrupt(
    backend: ProcessBackend, store: HungStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobstorage, "_STORAGE_SECONDS", 10.0 * SECONDS)

    async def scenario() -> None:
        reading = asyncio.ensure_future(backend.read_steps())
        async with asyncio.timeout(SECONDS):
            await asyncio.to_thread(store.called.wait)
            backend.ask(Intent.SUSPEND)
            with pytest.raises(StorageUnavailable, match="asked to stop"):
                await reading
            assert (await backend.observe(Status())).intent is Intent.SUSPEND
            await backend.close()

    asyncio.run(scenario())


def test_storage_that_hung_is_closed_once_it_answers(backend: ProcessBackend, store: HungStore) -> None:
    async def scenario() -> None:
        with pytest.raises(StorageUnavailable):
            await backend.read_steps()
        await backend.close()
        assert not store.closed.is_set()
        store.released.set()
        assert await asyncio.to_thread(store.closed.wait, SECONDS)

    asyncio.run(scenario())


def test_storage_that_answers_again_is_used_again(backend: ProcessBackend, store: HungStore) -> None:
    async def scenario() -> None:
        with pytest.raises(StorageUnavailable):
            await backend.read_steps()
        store.released.set()
        async with asyncio.timeout(SECONDS):
            while True:
                try:
                    assert await backend.read_steps() == []
                    break
                except StorageUnavailable:
                    await asyncio.sleep(0)
        await backend.close()

    asyncio.run(scenario())


@pytest.fixture
def changed() -> asyncio.Event:
    """Set once the agent has told its status."""
    return asyncio.Event()


@pytest.fixture
def agent(owned: str, tmp_path: Path, changed: asyncio.Event, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalAgent]:
    """An agent that is ended one second after it was asked to."""
    monkeypatch.setattr(localagent, "_END_GRACE_SECONDS", 0.5)
    settings = AgentSettings(
        connect=lambda path: NodeClient(path, timeout_seconds=1.0),
        memory_limit=1 << 20,
        log=tmp_path / "agent.log",
        end_seconds=0.5,
    )
    made = LocalAgent(JOB, uuid.uuid4().hex, settings, changed.set)
    yield made
    shutil.rmtree(made.memory_folder, ignore_errors=True)


def test_agent_that_stands_still_is_given_up_and_ended(agent: LocalAgent, changed: asyncio.Event) -> None:
    async def scenario() -> None:
        await agent.start()
        await asyncio.wait_for(changed.wait(), SECONDS)
        assert agent.pid is not None
        os.kill(agent.pid, signal.SIGSTOP)
        began = time.monotonic()
        asking = asyncio.create_task(agent.flush("run-1"))
        # Ctrl-C comes while the request hangs.
        assert not await asyncio.wait_for(agent.end(), 20)
        with pytest.raises(AgentUnavailable):
            await asking
        assert time.monotonic() - began < 20
        assert agent.pid is None

    asyncio.run(scenario())
