"""The files of one job's mirrors in the memory tier: slots as their own node has them, control page and bytes.

    <memory folder>/<namespace>/<job>/mirrors/<node index>-<its ranks>/<rank>/slot-<index>-<data bytes>

A file gets its name once all of it is there (I4): what an agent that was killed left half done has none, and is
removed by the next. No pod ever has a descriptor to write into one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stepfast.ranks import RankSet
from stepfast.slot import CONTROL_BYTES, SlotRecord, rank_record
from stepfast.slotplan import slot_bytes
from stepfast.step import MAX_WORLD_SIZE, JobKey
from stepfast_sidecar.memory import MemoryTier, SlotFile, lay_out

_FOLDER = "mirrors"  # of a job's: no rank has a number like that
_FILE = re.compile(r"slot-([0-9]+)-([0-9]+)")
_NODE = re.compile(r"([0-9]+)-([0-9,:-]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Whose file it is: of that rank, on the gang's node of that index, which has these ranks."""

    node: int
    ranks: RankSet
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A file that is to be received, whose room is taken. No two of one job have the same index."""

    place: Place
    building: Path
    slot: SlotFile

    def make(self) -> int:
        """Makes the file; returns a descriptor to write to, the caller's to close.

        Touches nothing else: to be called in a thread. Raises OSError when there is no room for it now; there may be
        none any more when it is written.
        """
        self.building.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.building, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            lay_out(descriptor, self.slot.size_bytes)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor


class MirrorFiles:
    """Names and removes them. What they take is counted by the memory tier, as slots are."""

    def __init__(self, job: JobKey, memory: MemoryTier) -> None:
        self._folder, self._memory = memory.folder(job) / _FOLDER, memory
        self._next = 0

    async def expect(self, place: Place, file_bytes: int) -> Incoming | None:
        """Takes the room for a file of that size; None when there is none. Waits for what is about to be free."""
        size = slot_bytes(file_bytes)
        if not await self._memory.budget.claim(size):
            return None
        self._next += 1
        capacity = size - CONTROL_BYTES
        folder = self._folder / f"{place.node}-{place.ranks}" / f"{place.rank:05d}"
        path = folder / f"slot-{self._next}-{capacity}"
        return Incoming(
            place=place,
            building=folder / f".{path.name}",
            slot=SlotFile(path=path, index=self._next, generation=0, capacity_bytes=capacity),
        )

    def finish(self, incoming: Incoming, record: SlotRecord) -> SlotFile:
        """All bytes are there: says so in the control page, then gives the file its name. Raises OSError."""
        offset, data = rank_record(record)
        descriptor = os.open(incoming.building, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, data, offset)
        finally:
            os.close(descriptor)
        os.rename(incoming.building, incoming.slot.path)
        return incoming.slot

    def give_up(self, incoming: Incoming) -> None:
        """Frees what was received, if anything was."""
        self._memory.discard(incoming.building, incoming.slot.size_bytes)

    def remove(self, slot: SlotFile) -> None:
        """Frees a whole file."""
        self._memory.remove(slot)

    def adopt(self) -> Iterator[tuple[Place, SlotFile, float]]:
        """What an earlier agent held: whose, the file, and when it was finished. Removes what is none of these."""
        for path in sorted(self._folder.glob("*/*/*")):
            place, match = _place_of(path), _FILE.fullmatch(path.name)
            capacity = int(match[2]) if match is not None else 0
            if place is None or match is None or path.stat().st_size != CONTROL_BYTES + capacity:
                with contextlib.suppress(OSError):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                continue
            slot = SlotFile(path=path, index=int(match[1]), generation=0, capacity_bytes=capacity)
            self._next = max(self._next, slot.index)
            self._memory.budget.count(slot.size_bytes)
            yield place, slot, path.stat().st_mtime


def _place_of(path: Path) -> Place | None:
    match, rank = _NODE.fullmatch(path.parent.parent.name), path.parent.name
    if match is None or not rank.isascii() or not rank.isdigit():
        return None
    try:
        return Place(node=int(match[1]), ranks=RankSet.parse(match[2], MAX_WORLD_SIZE), rank=int(rank))
    except ValueError:
        return None
