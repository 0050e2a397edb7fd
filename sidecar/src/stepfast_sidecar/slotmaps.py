"""Slots as the persister reads them: mapped, and left mapped from one save to the next.

To map a GiB page by page, and to unmap it, takes a tenth of a second of what a save takes to its commit. What the agent
removes it also empties (`memory`), so that a mapping keeps none of its pages.
"""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass

from stepfast.errors import CheckpointError
from stepfast.slot import CONTROL_BYTES, SlotState, read_control


class SlotDamaged(CheckpointError):
    """A slot's file is not what its record said: its owner truncated or reused it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRef:
    """A slot's bytes as the persister is told of them. `seq` is the use of the slot that is meant."""

    path: str
    seq: int
    rank: int
    name: str
    file_bytes: int
    window_begin: int
    window_bytes: int


class MappedSlot:
    """One use of a slot. `data`: its bytes, read-only, page-aligned."""

    def __init__(self, ref: SlotRef, mapped: mmap.mmap) -> None:
        self._ref, self._map = ref, mapped
        self.data = memoryview(mapped)[CONTROL_BYTES : CONTROL_BYTES + ref.window_bytes]

    def check(self) -> None:
        """Raises SlotDamaged when the slot no longer holds what it is read for: what was read may be of two saves."""
        record = read_control(self._map[:CONTROL_BYTES]).record
        if record is None or record.seq != self._ref.seq or record.state is not SlotState.STAGED:
            raise SlotDamaged(f"the slot of rank {self._ref.rank} was reused while it was read")


class SlotMaps:
    """The mappings of one job's slots, by path: no two files of one path follow each other. For several threads."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}
        self._lock = threading.Lock()

    def map(self, ref: SlotRef) -> MappedSlot:
        """Raises SlotDamaged when the file is shorter than what it is to hold."""
        wanted = CONTROL_BYTES + ref.window_bytes
        with self._lock:
            self._forget_removed()
            descriptor = os.open(ref.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if os.fstat(descriptor).st_size < wanted:
                    raise SlotDamaged(f"the slot of rank {ref.rank} was truncated")
                mapped = self._maps.get(ref.path)
                if mapped is None or len(mapped) < wanted:
                    mapped = self._maps[ref.path] = mmap.mmap(descriptor, wanted, prot=mmap.PROT_READ)
            except ValueError as error:  # it became shorter meanwhile
                raise SlotDamaged(f"the slot of rank {ref.rank} was truncated") from error
            finally:
                os.close(descriptor)
        return MappedSlot(ref, mapped)

    def _forget_removed(self) -> None:
        """A mapping ends with the last that looks at it."""
        for path in [path for path in self._maps if not os.path.exists(path)]:
            del self._maps[path]
