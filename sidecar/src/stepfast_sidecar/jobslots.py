"""All slots of one job on this node: which file holds what, and which may go when somebody else needs the memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from stepfast.layout import DataName
from stepfast.messages import Hello
from stepfast.slot import SlotState
from stepfast.step import JobKey
from stepfast_sidecar.holdings import Held, Holding
from stepfast_sidecar.memory import MemoryTier, SlotFile
from stepfast_sidecar.run import Run
from stepfast_sidecar.slots import RankSlots


class JobSlots:
    """The slots of each rank, by its number, and what the job's runs hold in them."""

    def __init__(self, job: JobKey, memory: MemoryTier, runs: Mapping[str, Run]) -> None:
        self._job, self._memory, self._runs = job, memory, runs
        self._ranks: dict[int, RankSlots] = {}

    def of(self, rank: int) -> RankSlots:
        """The rank's slots, which may be none yet."""
        if rank not in self._ranks:
            self._ranks[rank] = RankSlots(self._job, rank, self._memory)
        return self._ranks[rank]

    def file(self, holding: Holding) -> SlotFile:
        """The slot's file."""
        return self.of(holding.rank).file(holding.slot)

    def note(self, holding: Holding, verdict: SlotState) -> None:
        """Writes into the slot, if it is still there, what became of its bytes."""
        self.of(holding.rank).note(holding.slot, holding.seq, verdict)

    def held_file(self, wanted: DataName) -> SlotFile | None:
        """The slot that holds exactly that persisted file, if one still does."""
        asked = (wanted.step, wanted.run, wanted.name, wanted.world_size)
        for run in self._runs.values():
            for holding in run.flow.slots_of(wanted.rank):
                record = holding.record
                if record is None or holding.step is None or record.window_bytes != record.file_bytes:
                    continue
                if (record.step, record.run, record.name, record.world_size) == asked:
                    return self.file(holding)
        return None

    def grown(self) -> dict[int, list[SlotFile]]:
        """By rank, the slots that are larger than they were handed out."""
        found = {rank: slots.grown() for rank, slots in self._ranks.items()}
        return {rank: files for rank, files in found.items() if files}

    @property
    def size_bytes(self) -> int:
        """What they take of the memory tier."""
        return sum(slots.size_bytes for slots in self._ranks.values())

    def held_bytes(self) -> dict[int, int]:
        """By rank, what its slots take."""
        return {rank: slots.size_bytes for rank, slots in self._ranks.items()}

    def release_idle(self, wanted_bytes: int) -> int:
        """Frees slots of ranks that are gone, when nothing in them is still to be persisted; returns the bytes."""
        alive = {rank for run in self._runs.values() for rank, session in run.sessions.items() if session.alive}
        idle = (Held.FREE, Held.RESERVED, Held.PERSISTED)
        return self._release([rank for rank in self._ranks if rank not in alive], idle, wanted_bytes)

    def release_excess(self, wanted_bytes: int, share_of: Callable[[Hello], int]) -> int:
        """Frees slots beyond the shares of living ranks, when nothing in them is needed; returns the bytes."""
        freed = 0
        for session in [session for run in self._runs.values() for session in run.sessions.values() if session.alive]:
            excess = self.of(session.hello.rank).size_bytes - share_of(session.hello)
            if excess > 0 and freed < wanted_bytes:
                wanted = min(excess, wanted_bytes - freed)
                freed += self._release([session.hello.rank], (Held.FREE, Held.PERSISTED), wanted)
        return freed

    def release_all(self) -> None:
        """Frees every slot: the job is over here."""
        for slots in self._ranks.values():
            for index in slots.indexes:
                slots.release(index)

    def _release(self, ranks: Iterable[int], states: Collection[Held], wanted_bytes: int) -> int:
        freed = 0
        for rank in ranks:
            for index in self._ranks[rank].indexes:
                holders = [run for run in self._runs.values() if (rank, index) in run.flow.holdings]
                if freed >= wanted_bytes or any(r.flow.holdings[(rank, index)].held not in states for r in holders):
                    continue
                freed += self._ranks[rank].file(index).size_bytes
                for run in holders:
                    run.flow.remove_slot(rank, index)
                self._ranks[rank].release(index)
        return freed
