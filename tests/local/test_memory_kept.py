"""The memory tier of `stepfast run` goes only when an agent has said that the storage has all that was in it."""

from __future__ import annotations

import asyncio
import shutil
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepfast.nodeclient import NodeClient
from stepfast.step import JobKey
from stepfast_operator.backends.localagent import AgentSettings, LocalAgent
from stepfast_operator.observed import AgentState

# An agent that tells an empty status and ends with the status that it is given; it leaves its options behind.
AGENT = """
import json, os, signal, socket, sys, threading
from pathlib import Path
from stepfast.nodestatus import NodeStatus, to_document
from stepfast.messages import Status
from stepfast.protocol import encode
memory = Path(sys.argv[sys.argv.index("--memory-dir") + 1])
(memory / "options").write_text(" ".join(sys.argv[2:]))
signal.signal(signal.SIGTERM, lambda *_: os._exit(int(sys.argv[1])))
status = NodeStatus(node="n", memory_limit_bytes=1, memory_used_bytes=0, jobs=())
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[sys.argv.index("--socket") + 1])
listener.listen()
kept = []
while True:
    kept.append(listener.accept()[0])
    kept[-1].sendall(encode(Status(document=json.dumps(to_document(status)))))
"""


class Agents:
    """A job's memory folder, and agents on it that end with a given exit status."""

    def __init__(self, folder: Path) -> None:
        self.uid = uuid.uuid4().hex
        self.folder = folder
        self.changed = asyncio.Event()
        (folder / "agent.py").write_text(AGENT)

    def make(self, exit_status: int) -> LocalAgent:
        settings = AgentSettings(
            connect=NodeClient, memory_limit=1 << 20, log=self.folder / "agent.log", end_seconds=7,
            command=(sys.executable, str(self.folder / "agent.py"), str(exit_status)),
        )  # fmt: skip
        return LocalAgent(JobKey(namespace="local", name="x"), self.uid, settings, self.changed.set)

    async def start(self, exit_status: int) -> LocalAgent:
        """An agent that has told its status."""
        agent = self.make(exit_status)
        await agent.start()
        await asyncio.wait_for(self.changed.wait(), 60)
        assert agent.state() is AgentState.READY
        return agent


@pytest.fixture
def agents(owned: str, tmp_path: Path) -> Iterator[Agents]:
    made = Agents(tmp_path)
    yield made
    shutil.rmtree(made.make(0).memory_folder, ignore_errors=True)


def test_memory_that_no_agent_has_looked_at_is_kept(agents: Agents) -> None:
    async def scenario() -> None:
        agent = agents.make(0)
        agent.memory_folder.mkdir(parents=True)
        (agent.memory_folder / "slot").write_bytes(b"a staged step")
        assert not await agent.end()
        assert (agent.memory_folder / "slot").exists()

    asyncio.run(scenario())


def test_session_without_an_agent_and_without_memory_leaves_nothing(agents: Agents) -> None:
    async def scenario() -> None:
        assert await agents.make(0).end()

    asyncio.run(scenario())


@pytest.mark.parametrize(("exit_status", "is_removed"), [(0, True), (3, False)])
def test_memory_goes_only_when_the_agent_says_that_nothing_is_left(
    agents: Agents, exit_status: int, is_removed: bool
) -> None:
    async def scenario() -> None:
        agent = await agents.start(exit_status)
        assert "--flush-timeout 7" in (agent.memory_folder / "options").read_text()
        assert await agent.end() is is_removed
        assert agent.memory_folder.exists() is not is_removed

    asyncio.run(scenario())
