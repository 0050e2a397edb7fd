"""What storage does to its users: a proxy that fails as networks and services do, file systems that are really full
or read-only, a file where a folder was, writes that stand still. Loaded by fixtures in conftest.py.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <stdio.h>


class FileInTheWay:
    """A file stands where a folder was, from `place` to `heal`.

    They change places in one system call: a writer that makes missing folders meets the one or the other, and
    never a moment in which it could put a folder of its own there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._aside = folder, folder.with_name(f"{folder.name}-aside")

    def place(self) -> None:
        self._aside.write_text("in the way")
        self._exchange()

    def heal(self) -> None:
        self._exchange()
        self._aside.unlink()

    def _exchange(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.renameat2(AT_FDCWD, bytes(self._folder), AT_FDCWD, bytes(self._aside), RENAME_EXCHANGE):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(self._folder))


class HeldStorage:
    """While it is held, the persisters that were started in its environment write nothing, as on a file server that
    hangs (heldstorage/sitecustomize.py).
    """

    def __init__(self, gate: Path, injected: Mapping[str, str]) -> None:
        self._gate, self._injected = gate, injected

    def environment(self, *, name: str | None = None) -> dict[str, str]:
        """`name`: only files that are called so are not written."""
        only = {"STEPFAST_HELD_NAME": name} if name is not None else {}
        return {**self._injected, "STEPFAST_HELD_WHILE": str(self._gate), **only}

    def hold(self) -> None:
        self._gate.touch()

    def release(self) -> None:
        self._gate.unlink()


class Proxy:
    """An HTTP/1.1 proxy for one server. Each request that matches takes the first fault of a list, or that
    of an outage:

    a number          this status, and the request never arrives; `503:2` asks to be retried after 2 seconds
    reset             the connection is reset, and the request never arrives
    cut               the response breaks off in its middle
    lost              the server acts, the connection ends without a response
    silent            the server acts, and no response ever comes
    deaf              the request's body is not read
    slow              the response comes a little later
    """

    def __init__(self, port: int, *, host: str = "127.0.0.1") -> None:
        """`host`: where the server listens at that port, and the proxy at another."""
        self.port = 0
        self.requests: list[str] = []
        self.faults: list[str] = []
        self.matching = ""
        self.outage = ""
        self._host, self._server_port = host, port
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="proxy")
        self._thread.start()
        assert started.wait(30)

    def fail(self, *faults: str, matching: str = "") -> None:
        self.matching = matching
        self.faults = list(faults)

    def break_down(self, fault: str, *, matching: str = "") -> None:
        """Every request that matches meets the fault, or one of several in turn, until `heal`."""
        self.matching = matching
        self.outage = fault

    def heal(self) -> None:
        self.outage = ""
        self.faults = []

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(30)
        self._loop.close()

    def _run(self, started: threading.Event) -> None:
        self._loop.run_until_complete(self._serve(started))

    async def _serve(self, started: threading.Event) -> None:
        self._over = asyncio.Event()
        server = await asyncio.start_server(self._accept, self._host, 0)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await self._over.wait()
        server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._exchange(reader, writer):
                    pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its response; False when the connection is over."""
        head = await reader.readuntil(b"\r\n\r\n")
        line = head.split(b"\r\n")[0].decode()
        self.requests.append(line)
        fault = self._fault_of(line)
        if fault == "deaf":
            await asyncio.sleep(3600)
        body = await reader.readexactly(_length(head))
        if fault == "reset":
            return False
        if fault is not None and fault[0].isdigit():
            writer.write(_refusal(fault))
            await writer.drain()
            return True
        response = await self._ask(head, body)
        if fault == "lost":
            return False
        if fault == "silent":
            await asyncio.sleep(3600)
        if fault == "slow":
            await asyncio.sleep(0.3)
        if fault == "cut":
            writer.write(response[: max(len(response) - 3, len(response) // 2)])
            await writer.drain()
            return False
        writer.write(response)
        await writer.drain()
        return True

    def _fault_of(self, line: str) -> str | None:
        if self.matching not in line:
            return None
        if self.faults:
            return self.faults.pop(0)
        outage = self.outage.split()
        return outage[len(self.requests) % len(outage)] if outage else None

    async def _ask(self, head: bytes, body: bytes) -> bytes:
        # The Host header is signed and stays the proxy's; the server is told to end with its response.
        reader, writer = await asyncio.open_connection(self._host, self._server_port)
        try:
            writer.write(head.replace(b"\r\nConnection: keep-alive", b"", 1) + body)
            await writer.drain()
            response = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"HEAD ") or b" 304 " in response.split(b"\r\n")[0]:
                return response
            if b"transfer-encoding: chunked" in response.lower():
                while not response.endswith(b"0\r\n\r\n"):
                    response += await reader.readuntil(b"\r\n")
                    if response.endswith(b"\r\n0\r\n"):
                        response += await reader.readexactly(2)
                return response
            return response + await reader.readexactly(_length(response))
        finally:
            writer.transport.abort()


def _refusal(fault: str) -> bytes:
    status, _, after_seconds = fault.partition(":")
    more = f"Retry-After: {after_seconds}\r\n" if after_seconds else ""
    if status == "503":  # as Azure says it
        more += "x-ms-error-code: ServerBusy\r\n"
    return f"HTTP/1.1 {status} Injected\r\n{more}Content-Length: 0\r\n\r\n".encode()


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.split(b":")[1])
    return 0


class Mounts:
    """Small file systems of their own, mounted in a folder for as long as a test lasts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mounted: list[Path] = []

    def __call__(self, options: str) -> Path:
        """Mounts a tmpfs with these options and returns where; where nobody may mount it skips the test, or fails it
        in CI.
        """
        place = self._folder / f"tmpfs{len(self._mounted)}"
        place.mkdir()
        done = _run("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place))
        if done.returncode != 0:
            reason = f"NOT TESTED HERE: a real full or read-only file system; no mount: {done.stderr}"
            if os.environ.get("CI"):
                pytest.fail(f"{reason}CI runs everything: give it the right to mount (CAP_SYS_ADMIN)")
            pytest.skip(reason)
        self._mounted.append(place)
        return place

    def remount(self, place: Path, options: str) -> bool:
        """False while somebody has a file open that the options would take from him."""
        return _run("mount", "-o", f"remount,{options}", str(place)).returncode == 0

    def close(self) -> None:
        for place in self._mounted:
            done = _run("umount", "-l", str(place))
            assert done.returncode == 0, done.stderr


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)
