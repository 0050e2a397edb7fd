"""Who may borrow how much of the memory tier beside the slots, and when it is taken back. Slots come first, always.

Nobody knows what slots will need: a state may grow, another job may come. So two things hold together:

 - lent is only what is spare by all that is known (`stepfast_sidecar.spare`): while a rank of any living job has not
   said how large its files are, its whole share counts as needed; when in doubt nothing is lent;
 - what is lent can be taken back at once, without asking: the file's mark is removed, then its memory is freed. So a
   reservation of slots has all that it would have had if nothing had ever been lent.

A rank that goes on writing into a file that was taken back gives itself pages which nobody counts until it lets go of
the file: the SDK asks for the mark beside each piece that it writes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from stepfast.lentfile import lent_bytes, whole_pages
from stepfast.messages import Borrow, Hello, Lent
from stepfast.step import JobKey
from stepfast_sidecar.lent import MAX_NAMES
from stepfast_sidecar.memory import MemoryTier
from stepfast_sidecar.room import Room
from stepfast_sidecar.run import Run, Session, newest_run
from stepfast_sidecar.spare import JobClaim, job_need, overdrawn, spare_bytes

log = logging.getLogger(__name__)

_WAIT_SECONDS, _WAITS = 0.05, 20  # for ranks that have not said how large their files are


class Lending:
    """What of the memory tier is lent to the ranks of all rooms."""

    def __init__(
        self, rooms: Mapping[JobKey, Room], memory: MemoryTier, limit_bytes: int, *, share_of: Callable[[Hello], int]
    ) -> None:
        self._rooms, self._memory, self._limit, self._share_of = rooms, memory, limit_bytes, share_of

    async def answer(self, room: Room, session: Session, asked: Borrow) -> None:
        """Lends to the rank what its run has under that name on this node, or decides that now. Raises OSError."""
        run = session.hello.run
        for _ in range(_WAITS):
            # Ranks say what they need at about the same time, each over its own connection.
            if asked.name in room.lent.known(run) or _is_informed(room.runs[run]):
                break
            await asyncio.sleep(_WAIT_SECONDS)
        if asked.name not in room.lent.known(run):
            await self._memory.budget.settle()  # what another run borrowed may be on its way back
        known = room.lent.known(run)
        lent = known.get(asked.name)
        if asked.name not in known and run == newest_run(room.runs) and len(known) < MAX_NAMES:
            lent = room.lent.lend(run, asked.name, self._grant(room, asked.size_bytes))
            size = lent.data_bytes if lent is not None else 0
            log.info("%s, %s: %s bytes lent as %s; asked for %s", room.job, run, size, asked.name, asked.size_bytes)
        if lent is None:
            session.peer.send(Lent(id=asked.id, granted_bytes=0))
        else:
            session.peer.send(Lent(id=asked.id, granted_bytes=lent.data_bytes), lent.open())

    def put_slots_first(self) -> None:
        """Somebody came or said what he needs: what is lent and no longer spare is taken back."""
        rooms = list(self._rooms.values())
        if not any(room.lent.size_bytes for room in rooms):
            return
        for place in overdrawn(self._limit, [self._claim(room) for room in rooms]):
            self._take_back(rooms[place])

    def make_room(self, wanted_bytes: int, room: Room) -> int:
        """Takes back what is lent, of that room first, until so much is free; returns the bytes.

        Before any slot gives way, were it one that nobody needs: a step in it may be restored from there.
        """
        freed = 0
        for other in (room, *(other for other in self._rooms.values() if other is not room)):
            if freed < wanted_bytes:
                freed += self._take_back(other)
        return freed

    def _take_back(self, room: Room) -> int:
        freed = room.lent.take_back()
        if freed:
            log.warning("%s: %s bytes that were lent are taken back: they are needed for slots", room.job, freed)
        return freed

    def _grant(self, room: Room, size_bytes: int) -> int:
        """How much data of what is asked for is lent."""
        claims = {other.job: self._claim(other) for other in self._rooms.values()}
        lent = sum(claim.lent_bytes for claim in claims.values())
        slots = sum(claim.slots_bytes for claim in claims.values())
        unmade = max(0, slots - (self._memory.budget.taken_bytes - lent))
        # Files that are lent are sparse: their file system may count none of their pages yet.
        system = self._memory.system_free_bytes - unmade - lent
        spare = min(spare_bytes(self._limit, claims.values(), claims[room.job]), self._memory.budget.free_bytes, system)
        return min(whole_pages(size_bytes), lent_bytes(spare))

    def _claim(self, room: Room) -> JobClaim:
        held, lent = room.slots.held_bytes(), room.lent.size_bytes
        sessions = [session for run in room.runs.values() if not run.is_over for session in run.sessions.values()]
        if not sessions:
            slots = sum(held.values())
            return JobClaim(budget_bytes=slots, slots_bytes=slots, lent_bytes=lent)
        newest = sessions[-1].hello
        share = self._share_of(newest)
        sizes = {session.hello.rank: session.file_bytes for session in sessions}
        return JobClaim(
            budget_bytes=share * newest.local_world_size,
            slots_bytes=job_need(
                share_bytes=share, ranks=newest.local_world_size, file_bytes=sizes, held_bytes=held
            ),
            lent_bytes=lent,
        )  # fmt: skip


def _is_informed(run: Run) -> bool:
    """Whether all of its ranks on this node have said how large their files are."""
    known = [session for session in run.sessions.values() if session.file_bytes is not None]
    return len(known) >= run.flow.local_world_size
