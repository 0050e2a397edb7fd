"""Fetches files for ranks out of the memory of their gang's other nodes, before the storage is asked for them."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Executor

from stepfast.errors import ProtocolError
from stepfast_sidecar import courier
from stepfast_sidecar.fetched import FetchedFile, NoRoom
from stepfast_sidecar.gangs import Address, Gang
from stepfast_sidecar.memory import MemoryTier
from stepfast_sidecar.metrics import Metrics
from stepfast_sidecar.mirrorhost import OnLoop
from stepfast_sidecar.neighbours import Credentials, NeighbourLost
from stepfast_sidecar.neighbourwire import Ask
from stepfast_sidecar.room import Room

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 1.0  # before an agent that was not there is asked a second time
_AWAY_SECONDS = 30.0  # how long one that was not there then, either, is left alone


class MirrorFetch:
    """For all jobs of this node."""

    def __init__(
        self, credentials: Credentials, node: str, memory: MemoryTier, *, threads: Executor, on_loop: OnLoop,
        metrics: Metrics,
    ) -> None:  # fmt: skip
        self._credentials, self._node, self._memory = credentials, node, memory
        self._threads, self._on_loop, self._metrics = threads, on_loop, metrics
        self._away: dict[Address, float] = {}  # until when (monotonic)

    async def get(self, gang: Gang, room: Room, path: str) -> FetchedFile | None:
        """The file, from the first of the gang's nodes that holds it; None when none does, or it cannot be had."""

        async def fetch() -> tuple[int, int] | None:
            for address in gang.neighbours:
                if self._away.get(address, float("-inf")) <= time.monotonic():
                    found = await self._ask(address, room, path)
                    if found is not None:
                        self._metrics.fetched_from_mirror(found[1])
                        return found
            return None

        return await room.fetched.get(path, fetch)

    async def _ask(self, address: Address, room: Room, path: str) -> tuple[int, int] | None:
        """The file, as `courier.fetch` has it. An agent that does not answer is asked again: where a gang starts anew
        it may be busy for a moment, and the storage is much farther away.
        """
        try:
            try:
                return await self._fetch(address, room, path)
            except NeighbourLost as error:
                log.info("%s: %s is asked again for %s: %s", room.job, address, path, error)
                await asyncio.sleep(_PAUSE_SECONDS)
                return await self._fetch(address, room, path)
        except NoRoom as error:
            log.warning("%s: %s", room.job, error)
        except (NeighbourLost, ProtocolError, OSError) as error:
            log.warning("%s: %s is not fetched from %s: %s", room.job, path, address, error)
            now = time.monotonic()
            self._away = {**{a: until for a, until in self._away.items() if until > now}, address: now + _AWAY_SECONDS}
        return None

    async def _fetch(self, address: Address, room: Room, path: str) -> tuple[int, int] | None:
        """Raises NeighbourLost, NoRoom, OSError, ProtocolError."""
        ask, taken = Ask(job=str(room.job), path=path), 0

        async def take(size_bytes: int) -> None:
            # Of what is free alone: the storage has the file, too, and what gave way for it might be there alone (I10).
            nonlocal taken
            if not await self._memory.budget.claim(size_bytes):
                raise NoRoom(f"the memory tier has no room for {path} of {size_bytes} bytes")
            taken = size_bytes

        def make(size_bytes: int) -> int:
            self._on_loop(take(size_bytes))
            return room.fetched.make(size_bytes)

        fetching = self._threads.submit(courier.fetch, address, self._credentials, self._node, ask, make)
        try:
            return await asyncio.wrap_future(fetching)
        except (NoRoom, NeighbourLost, ProtocolError, OSError):
            self._memory.budget.give_back(taken)
            raise
