"""The connection between an operator and the API server, as networks treat it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_READ_BYTES = 65536


class Wire:
    """A TCP proxy in front of an API server. What is stalled stays open, and nothing passes any more."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._is_cut = self._is_silent = False
        self._open: dict[asyncio.Task[None], asyncio.Event] = {}
        self.accepted = 0
        self.url = ""

    @asynccontextmanager
    async def laid(self) -> AsyncIterator[Wire]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            self._hang_up()
            await asyncio.gather(*self._open, return_exceptions=True)

    def stall(self) -> None:
        """The connections that there are fall silent; new ones work."""
        for passing in self._open.values():
            passing.clear()

    def silence(self) -> None:
        """New connections are silent, too."""
        self._is_silent = True
        self.stall()

    def cut(self) -> None:
        """Every connection ends, and new ones end at once."""
        self._is_cut = True
        self._hang_up()

    def mend(self) -> None:
        """New connections work."""
        self._is_cut = self._is_silent = False

    def _hang_up(self) -> None:
        for task in self._open:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        self.accepted += 1
        task = asyncio.current_task()
        assert task is not None
        passing = self._open[task] = asyncio.Event()
        if not self._is_silent:
            passing.set()
        try:
            with suppress(OSError, asyncio.CancelledError):
                await self._connect(reader, writer, passing)
        finally:
            del self._open[task]
            writer.transport.abort()

    async def _connect(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passing: asyncio.Event
    ) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pass_on(reader, far_writer, passing))
                group.create_task(_pass_on(far_reader, writer, passing))
        finally:
            far_writer.transport.abort()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passing: asyncio.Event) -> None:
    with suppress(OSError):
        while data := await reader.read(_READ_BYTES):
            await passing.wait()
            writer.write(data)
            await writer.drain()
    writer.transport.abort()
