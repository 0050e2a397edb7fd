"""The node's agent as a child process: started, watched, asked, ended in order. One for each `stepfast run`.

The memory folder outlives the agent, so that what was staged is adopted by its successor; it is removed only when an
agent has ended and said, by its exit status, that the storage has all of it. Two agents on one folder must never be:
whatever is left of an earlier agent of this job is ended before the next one starts.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from stepfast.errors import AgentUnavailable, ProtocolError
from stepfast.nodestatus import NodeStatus
from stepfast.step import JobKey
from stepfast_operator.backends import processes, tether
from stepfast_operator.backends.blocking import call_in_thread
from stepfast_operator.backends.memoryfolder import memory_folder, socket_folder
from stepfast_operator.observed import AgentState

MARKER = "STEPFAST_AGENT_OF"
_LONGEST_BACKOFF_SECONDS = 10.0
_END_GRACE_SECONDS = 10.0  # what an agent needs beside its flush: its persister ends
_KILL_SECONDS = 10.0
_REAP_SECONDS = 1.0
_CALL_SECONDS = 30.0
T = TypeVar("T")


class Client(Protocol):
    """What is used of `stepfast.nodeclient.NodeClient`."""

    def status(self) -> NodeStatus: ...
    def watch(self, on_status: Callable[[NodeStatus], None]) -> None: ...
    def request_save(self, job: JobKey, run: str) -> None: ...
    def flush(self, job: JobKey, run: str) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """`command` is the agent's program without arguments; `connect` makes a client for a socket path."""

    connect: Callable[[str], Client]
    memory_limit: int
    log: Path
    command: Sequence[str] = (sys.executable, "-m", "stepfast_sidecar")
    node: str = "local"
    end_seconds: float = 120.0  # how long an agent may flush when it is ended


class LocalAgent:
    """Belongs to the event loop's thread, which must be the main thread: the child is tied to its parent's
    thread.
    """

    def __init__(self, job: JobKey, uid: str, settings: AgentSettings, on_change: Callable[[], None]) -> None:
        self._job, self._uid, self._settings, self._on_change = job, uid, settings, on_change
        self._sockets = socket_folder()
        self.socket_path = str(self._sockets / "agent.sock")
        self.memory_folder = memory_folder(uid, settings.log.parent)
        self._process: subprocess.Popen[bytes] | None = None
        self._client: Client | None = None
        self._status: NodeStatus | None = None
        self._started = 0.0
        self._starts_in_vain = 0  # in a row

    def state(self) -> AgentState:
        """READY only once this very process has told its status: what an earlier one said says nothing any
        more.
        """
        if self._process is None:
            return AgentState.GONE
        if self._process.poll() is not None:
            self._status = None
            is_waiting = time.monotonic() < self._started + self._backoff_seconds()
            return AgentState.STARTING if is_waiting else AgentState.GONE
        return AgentState.READY if self._status is not None else AgentState.STARTING

    @property
    def status(self) -> NodeStatus | None:
        return self._status

    @property
    def pid(self) -> int | None:
        """The living agent's pid."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    async def start(self) -> None:
        """Starts the agent unless one lives. Blocks until what is left of an earlier one has ended."""
        if self.pid is not None:
            return
        await call_in_thread(self._end_earlier, name="stepfast-agent-end")
        self._status = None
        self._started = time.monotonic()
        self._starts_in_vain += 1
        self._clear_way()
        settings = self._settings
        arguments = [
            "--socket", self.socket_path, "--memory-dir", str(self.memory_folder),
            "--memory-limit", str(settings.memory_limit), "--node", settings.node,
            # Should we be killed and never started again, the orphan flushes and takes its memory with it.
            "--remove-memory", "--flush-timeout", str(settings.end_seconds),
        ]  # fmt: skip
        with settings.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - a fork, from the main thread on purpose
                [
                    sys.executable,
                    "-I",
                    "-S",
                    tether.__file__,
                    str(os.getpid()),
                    *settings.command,
                    *arguments,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, MARKER: self._uid},
                start_new_session=True,  # Ctrl-C is for `stepfast run` alone
            )
        if self._client is None:
            self._client = settings.connect(self.socket_path)
            self._client.watch(self._taker(asyncio.get_running_loop()))

    def _taker(self, loop: asyncio.AbstractEventLoop) -> Callable[[NodeStatus], None]:
        """What the watching thread calls: hands the status over to the loop's thread."""

        def take(status: NodeStatus) -> None:
            with suppress(RuntimeError):  # the loop may have closed just now
                loop.call_soon_threadsafe(self._take, status)

        return take

    async def flush(self, run: str) -> None:
        """Raises AgentUnavailable. On return the status is newer than the request."""
        client = self._connected()
        await self._call(lambda: client.flush(self._job, run))
        self._status = await self._call(client.status)

    async def request_save(self, run: str) -> None:
        """Raises AgentUnavailable."""
        client = self._connected()
        await self._call(lambda: client.request_save(self._job, run))

    async def end(self) -> bool:
        """SIGTERM, which flushes, then SIGKILL; removes the socket, and the memory folder when nothing in it is
        needed. False when it stays, for the next `stepfast run` of this job: it may hold what the storage does not.
        """
        is_idle = await call_in_thread(self._end_now, name="stepfast-agent-end")
        if self._client is not None:
            self._client.close()
        if is_idle:
            shutil.rmtree(self.memory_folder, ignore_errors=True)
            with suppress(OSError):  # another job's folder may be beside it
                self.memory_folder.parent.rmdir()
        shutil.rmtree(self._sockets, ignore_errors=True)
        return not self.memory_folder.exists()

    async def _call(self, call: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(_CALL_SECONDS):
                return await call_in_thread(call, name="stepfast-agent-call")
        except TimeoutError:
            raise AgentUnavailable(f"the agent does not answer within {_CALL_SECONDS:g} s") from None
        except ProtocolError as error:
            raise AgentUnavailable(f"the agent's answer is broken: {error}") from error

    def _take(self, status: NodeStatus) -> None:
        # What the loop delivers after the process has died, or before its successor lives, is old.
        if self.pid is not None and Path(self.socket_path).exists():
            self._status = status
            self._starts_in_vain = 0
            self._on_change()

    def _connected(self) -> Client:
        if self._client is None:
            raise AgentUnavailable("the agent was never started")
        return self._client

    def _backoff_seconds(self) -> float:
        """An agent that had lived is replaced at once; one that dies while it starts is tried ever less
        often.
        """
        if self._starts_in_vain == 0:
            return 0.0
        return min(_LONGEST_BACKOFF_SECONDS, 0.5 * 2.0**self._starts_in_vain)

    def _clear_way(self) -> None:
        Path(self.socket_path).unlink(missing_ok=True)
        self.memory_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._settings.log.parent.mkdir(parents=True, exist_ok=True)

    def _end_earlier(self) -> None:
        """An agent whose `stepfast run` was killed is flushing: it gets its time. What our own dead agent
        left is killed: it would only hold the successor up, and what was staged is still in memory.
        """
        if self._process is None:
            descriptors = processes.signal_marked(MARKER, self._is_ours, signal.SIGTERM)
            try:
                processes.wait_ended(descriptors, self._settings.end_seconds + _END_GRACE_SECONDS)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        processes.kill_marked(MARKER, self._is_ours, timeout_seconds=10)

    def _is_ours(self, uid: str) -> bool:
        return uid == self._uid

    def _end_now(self) -> bool:
        """Whether an agent that was started here has ended with nothing left to persist."""
        if self._process is None:
            return False  # nobody has looked at what the memory holds; an orphan that flushes it goes by itself
        self._process.terminate()
        is_idle = False
        with suppress(subprocess.TimeoutExpired):
            is_idle = self._process.wait(timeout=self._settings.end_seconds + _END_GRACE_SECONDS) == 0
        processes.kill_marked(MARKER, self._is_ours, timeout_seconds=_KILL_SECONDS)
        with suppress(subprocess.TimeoutExpired):  # unkillable: it goes when the kernel lets it
            self._process.wait(_REAP_SECONDS)
        return is_idle
