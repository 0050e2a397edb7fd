"""Slots and lent memory that were made larger than they were: whose rank is sent away, and what happens to the memory.

A rank has its slots to write, so it can also make them larger: memory of the node that nobody granted, which stays when
its process dies. Nothing in a tmpfs forbids that, so it is looked for, whatever the rank says or leaves unsaid, and
when it has no connection any more, too: a descriptor outlives it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

from stepfast.errors import ProtocolError
from stepfast.messages import Failure
from stepfast.step import JobKey
from stepfast_sidecar.memory import SlotFile
from stepfast_sidecar.room import Room
from stepfast_sidecar.run import Session

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0  # a tmpfs gives a few gigabytes in that time


def grown(slot: SlotFile) -> ProtocolError:
    """What a rank is sent away with."""
    return ProtocolError(f"slot {slot.index} was made larger than it is")


async def watch_growth(rooms: Mapping[JobKey, Room]) -> None:
    """For ever: sends ranks away whose slots have grown, and takes the memory back."""
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        for room in list(rooms.values()):
            for rank, slots in room.slots.grown().items():
                for session in [run.sessions[rank] for run in room.runs.values() if rank in run.sessions]:
                    if session.alive:
                        _send_away(session, grown(slots[0]))
                await cut_back(slots)
            await cut_back(room.mirrors.grown())
            if room.lent.has_grown():
                # Nobody knows which rank it was.
                for session in [session for run in room.runs.values() for session in run.sessions.values()]:
                    if session.alive:
                        _send_away(session, ProtocolError("memory that is lent was made larger than it is"))
                room.lent.take_back()


def _send_away(session: Session, error: ProtocolError) -> None:
    log.warning("rank %s of %s, %s: %s", session.hello.rank, session.hello.job, session.hello.run, error)
    session.peer.send(Failure(id=0, kind=type(error).__name__, reason=str(error)))
    session.peer.close()


async def cut_back(slots: Iterable[SlotFile]) -> None:
    """Frees what the slots have beyond their sizes; of many gigabytes that takes seconds, so it is done in a thread."""
    for slot in slots:
        try:
            await asyncio.to_thread(slot.cut_back)
        except OSError as error:
            log.error("%s is larger than it was made, and stays so: %s", slot.path, error)
        else:
            log.warning("%s was made larger by a rank, and is cut back", slot.path)
