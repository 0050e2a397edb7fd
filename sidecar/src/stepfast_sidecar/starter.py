"""Whoever started the agent (`stepfast run`, on one machine), and what its death means for the memory tier."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping

from stepfast.step import JobKey
from stepfast_sidecar.room import Room

# A launcher, which is told to end when the agent is, gives its ranks 10 s; a rank with much memory takes some more.
_RANKS_END_SECONDS = 15.0
_POLL_SECONDS = 0.02


class Starter:
    """Of this process; made while it lives."""

    def __init__(self) -> None:
        self._pid = os.getppid()

    async def takes_ranks_along(self, rooms: Mapping[JobKey, Room]) -> bool:
        """Whether it is dead and ranks that still lived have ended by now: nobody else removes what they leave."""
        if os.getppid() == self._pid or not _has_ranks(rooms):
            return False
        begin = time.monotonic()
        while _has_ranks(rooms):
            if time.monotonic() - begin > _RANKS_END_SECONDS:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True


def _has_ranks(rooms: Mapping[JobKey, Room]) -> bool:
    return any(room.is_living for room in rooms.values())
