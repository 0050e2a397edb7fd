"""The supervisor's end of a job's persister: a child process that is started when needed and again when it dies, and
that ends while nobody needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stepfast.errors import AgentError

log = logging.getLogger(__name__)

_LINE_LIMIT = 64 * 1024 * 1024
_RESTART_SECONDS = (0.05, 0.2, 1.0, 5.0)
_END_SECONDS = 10.0
_TOLD_BYTES = 200  # of what is no answer
_RETRY_SECONDS = (0.2, 1.0, 2.0, 5.0, 10.0, 30.0)
_LONGEST_ASKED_SECONDS = 600.0  # that a storage is left alone for: what is staged is nowhere else


class PersisterLost(AgentError):
    """The persister died before it answered."""


class RequestFailed(AgentError):
    """The persister answered with an error. `kind` names a class of `stepfast.errors` (or SlotDamaged).

    `retry_after_seconds`: how long the storage asked to be left alone.
    """

    def __init__(self, kind: str, reason: str, retry_after_seconds: float = 0.0) -> None:
        self.kind = kind
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds
        super().__init__(reason)


class PersisterProcess:
    """Requests to one job's persister. `on_lost` is called each time that the process dies unasked."""

    def __init__(
        self,
        storage_uri: str,
        arguments: Sequence[str],
        *,
        on_lost: Callable[[PersisterLost], None],
        environment: Mapping[str, str],
        retry_limit_seconds: float,
    ) -> None:
        """`environment`: all that the process knows, instead of what this one does."""
        self._storage_uri, self._arguments = storage_uri, (f"--storage-uri={storage_uri}", *arguments)
        self._environment, self._retry_limit_seconds = environment, retry_limit_seconds
        self._on_lost = on_lost
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None
        self._used_time = 0.0  # monotonic
        self._deaths = 0
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process's id while it lives."""
        return self._process.pid if self._process is not None else None

    @property
    def is_closed(self) -> bool:
        return self._closed

    async def prepare(self) -> None:
        """Starts the process ahead of its first request, which will say why should it not start."""
        with contextlib.suppress(OSError, ValueError, PersisterLost):
            await self._start()

    async def request(self, command: str, **values: Any) -> Mapping[str, Any]:
        """Sends a command, returns its answer's values. Raises PersisterLost, RequestFailed."""
        try:
            process = await self._start()
        except (OSError, ValueError) as error:  # no memory or descriptors for a process, or no such arguments
            raise RequestFailed("StorageUnavailable", f"the persister does not start: {error}") from error
        request = next(self._ids)
        future: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._pending[request] = future
        self._used_time = time.monotonic()
        if process.stdin is None:
            raise PersisterLost("the persister has no input")
        process.stdin.write(json.dumps({"id": request, "command": command, "values": values}).encode() + b"\n")
        try:
            answer = await future
        finally:
            self._pending.pop(request, None)
            self._used_time = time.monotonic()
        if not answer["ok"]:
            raise RequestFailed(answer["kind"], answer["reason"], answer.get("retryAfter", 0.0))
        result: Mapping[str, Any] = answer["values"] or {}
        return result

    async def insist(self, command: str, tell: Callable[[str], None], **values: Any) -> Mapping[str, Any]:
        """The command's answer, however often it has to be asked for; `tell` hears why of each failure.

        Raises PersisterLost, RequestFailed once the persister is closed.
        """
        failures = 0
        while True:
            try:
                return await self.request(command, **values)
            except (PersisterLost, RequestFailed) as error:
                if self._closed:
                    raise
                failures += 1
                tell(self.why(error))
                await asyncio.sleep(self.retry_seconds(failures, error))

    def retry_seconds(self, failures: int, error: PersisterLost | RequestFailed) -> float:
        """How long to wait after so many failures in a row, of which that is the last."""
        pause = min(_RETRY_SECONDS[min(max(failures, 1), len(_RETRY_SECONDS)) - 1], self._retry_limit_seconds)
        asked = error.retry_after_seconds if isinstance(error, RequestFailed) else 0.0
        return pause + min(asked, _LONGEST_ASKED_SECONDS)

    def why(self, error: PersisterLost | RequestFailed) -> str:
        """The failure's cause and the storage that it is of; paths in it are relative to that."""
        return f"{self._storage_uri}: {error}" if isinstance(error, RequestFailed) else str(error)

    async def _start(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._closed:
                raise PersisterLost("the agent ends")
            if self._process is None:
                if self._deaths:
                    await asyncio.sleep(_RESTART_SECONDS[min(self._deaths, len(_RESTART_SECONDS)) - 1])
                environment = self._environment
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-m", "stepfast_sidecar.persister"),
                    *self._arguments,
                    *("--supervisor", str(os.getpid())),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    limit=_LINE_LIMIT,
                    env=environment,
                    start_new_session=True,  # a signal to the agent's group is the agent's to handle, in order
                )
                if self.is_closed:  # meanwhile
                    process.kill()
                    await process.wait()
                    raise PersisterLost("the agent ends")
                self._process, self._used_time = process, time.monotonic()
                self._reader = asyncio.create_task(self._read(process), name="persister-reader")
                if environment is not self._environment:  # it changed meanwhile
                    process.kill()
            return self._process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Until the process ends, or says what is no answer: nobody knows what became of its requests then, either."""
        strange: bytes | None = None
        while line := await _line_of(process):
            answer = _answer_in(line)
            if answer is None:
                strange = line[:_TOLD_BYTES]
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                break
            self._deaths = 0
            future = self._pending.get(answer["id"])
            if future is not None and not future.done():
                future.set_result(answer)
        status = await process.wait()
        if self._process is not process:
            return  # it rests
        self._process = None
        if self._closed:
            return
        self._deaths += 1
        end = f"died with status {status}" if strange is None else f"is ended: it said what is no answer, {strange!r}"
        log.error("the persister (pid %s) %s; it is started again", process.pid, end)
        lost = [future for future in self._pending.values() if not future.done()]
        # First the state, then those who wait: they ask again, and must find what was lost as staged.
        self._on_lost(PersisterLost(f"the persister {end}"))
        for future in lost:
            future.set_exception(PersisterLost(f"the persister {end}"))

    def use_environment(self, environment: Mapping[str, str]) -> None:
        """From now on. A process that runs is ended, and started again with it; what it had in hand is lost."""
        self._environment = environment
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def rest(self, unused_seconds: float) -> None:
        """Ends the process if nobody has asked it for anything for so long. The next request starts another one."""
        async with self._starting:
            process = self._process
            is_used = bool(self._pending) or time.monotonic() - self._used_time < unused_seconds
            if process is None or is_used or self._closed:
                return
            self._process = None
            await _end(process)

    async def close(self) -> None:
        """Ends the process in order, after that by force."""
        self._closed = True
        process = self._process
        if process is None:
            return
        await _end(process)
        if self._reader is not None:
            await self._reader
        for future in self._pending.values():
            if not future.done():
                future.set_exception(PersisterLost("the agent ends"))


async def _line_of(process: asyncio.subprocess.Process) -> bytes:
    """What the process says next; nothing once it has ended."""
    if process.stdout is None:
        return b""
    try:
        return await process.stdout.readline()
    except ValueError:  # longer than any answer
        return b"..."


def _answer_in(line: bytes) -> Mapping[str, Any] | None:
    """The answer that the line is; None when it is none, as the first half of one that its sender died over."""
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    if not line.endswith(b"\n") or not isinstance(answer, dict) or not isinstance(answer.get("id"), int):
        return None
    return answer if "ok" in answer else None


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(_END_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
