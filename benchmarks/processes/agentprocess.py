"""A real agent for the length of a benchmark."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.workload import MIB

from stepfast.errors import AgentUnavailable
from stepfast.nodeclient import NodeClient

_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """Where it listens, and its process."""

    socket: str
    memory: Path
    process: subprocess.Popen[bytes]

    def wait_for_slots(self, size_bytes: int) -> None:
        """Until so many bytes of slots were made. Raises TimeoutError."""
        wait_for_slots(NodeClient(self.socket), size_bytes)

    def kill(self) -> None:
        """SIGKILL; what it held stays in its memory folder."""
        self.process.kill()
        self.process.wait()


def wait_for_slots(client: NodeClient, size_bytes: int) -> None:
    """Until the agent has made slots of so many bytes. Raises TimeoutError."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while client.status().memory_used_bytes < size_bytes:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the agent made no slots of {size_bytes} bytes in {_PATIENCE_SECONDS:.0f} s")
        time.sleep(0.05)


def memory_limit(size_bytes: int, *, slots: int, ranks: int = 1) -> int:
    """Room for so many slots of each rank's state: its file has a header, and each tensor its place, beside it."""
    return ranks * slots * (size_bytes + size_bytes // 50 + 8 * MIB)


def agent_command(socket: Path, memory: Path, limit_bytes: int, *more: str) -> list[str]:
    """The command line of an agent; a memory folder that is there is taken over."""
    return [
        sys.executable, "-m", "stepfast_sidecar", "--socket", str(socket), "--memory-dir", str(memory),
        "--memory-limit", str(limit_bytes), "--node", "bench", *more,
    ]  # fmt: skip


def is_answering(socket: Path) -> bool:
    """Whether an agent serves the socket."""
    try:
        NodeClient(str(socket)).status()
    except AgentUnavailable:
        return False
    return True


def start_agent(socket: Path, memory: Path, limit_bytes: int, *more: str) -> Agent:
    """Starts an agent and waits until it answers. Raises AgentUnavailable when it ends instead, or never does."""
    process = subprocess.Popen(agent_command(socket, memory, limit_bytes, *more))
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not is_answering(socket):
        if process.poll() is not None:
            raise AgentUnavailable(f"the agent at {socket} ended with status {process.returncode}")
        if time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise AgentUnavailable(f"the agent at {socket} did not answer in {_PATIENCE_SECONDS:.0f} s")
        time.sleep(0.02)
    return Agent(socket=str(socket), memory=memory, process=process)


@contextmanager
def running_agent(folder: Path, limit_bytes: int, *more: str) -> Iterator[Agent]:
    """An agent whose memory folder is removed at the end."""
    memory = Path(tempfile.mkdtemp(prefix="stepfast-bench-", dir="/dev/shm"))
    agent = start_agent(folder / "agent.sock", memory, limit_bytes, *more)
    try:
        yield agent
    finally:
        agent.process.terminate()
        agent.process.wait()
        shutil.rmtree(memory)
