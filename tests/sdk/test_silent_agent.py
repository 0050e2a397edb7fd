"""An agent that accepts connections and says nothing is no agent: whoever asks it goes on, in bounded time."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepfast.client import RankClient
from stepfast.errors import AgentUnavailable
from stepfast.messages import VERSION, Hello
from stepfast.nodeclient import NodeClient
from stepfast.step import JobKey

HELLO = Hello(
    version=VERSION, job="local/x", run="u-1", rank=0, local_rank=0, world_size=1, local_world_size=1, node=0, pid=1,
    storage_uri="memory://", resume_step=0, memory_bytes=0, max_to_keep=0,
)  # fmt: skip
JOB = JobKey(namespace="local", name="x")

Ask = Callable[[str], object]


@pytest.fixture
def silent() -> Iterator[str]:
    """The path of a socket behind which nobody answers."""
    with tempfile.TemporaryDirectory(prefix="sf-", dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as listener:
        path = str(Path(folder) / "a.sock")
        listener.bind(path)
        listener.listen()
        yield path


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda path: NodeClient(path, timeout_seconds=0.2).status(), id="status"),
        pytest.param(lambda path: NodeClient(path, timeout_seconds=0.2).flush(JOB, "u-1"), id="flush"),
        pytest.param(lambda path: NodeClient(path, timeout_seconds=0.2).request_save(JOB, "u-1"), id="save"),
        pytest.param(
            lambda path: RankClient(
                path, HELLO, on_push=lambda message, descriptors: None, on_lost=lambda: None, timeout_seconds=0.2
            ),
            id="hello",
        ),
    ],
)
def test_request_to_a_silent_agent_ends_in_time(silent: str, ask: Ask) -> None:
    with pytest.raises(AgentUnavailable, match="does not answer"):
        ask(silent)
