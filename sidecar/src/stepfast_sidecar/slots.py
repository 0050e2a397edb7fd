"""One rank's slots: which files there are, made to measure within the rank's share of the memory tier."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from stepfast.errors import MemoryBudgetTooSmall
from stepfast.layout import CHUNK_BYTES
from stepfast.messages import MAX_SAVE_BYTES, Hello
from stepfast.slot import CONTROL_BYTES, SlotRecord, SlotState
from stepfast.slotplan import SlotPlan, plan_slots
from stepfast.step import JobKey
from stepfast_sidecar.memory import MemoryTier, SlotFile

log = logging.getLogger(__name__)


def refusal(record: SlotRecord, hello: Hello, capacity_bytes: int) -> str | None:
    """Why this rank may not say that of a slot of so many bytes; None when it may."""
    said = (record.run, record.rank, record.world_size, record.node)
    if said != (hello.run, hello.rank, hello.world_size, hello.node):
        return f"says it is of {said}"
    return misfit(record, capacity_bytes)


def misfit(record: SlotRecord, capacity_bytes: int) -> str | None:
    """Why the record cannot be true of any slot of so many bytes; None when it can."""
    begin, size, whole = record.window_begin, record.window_bytes, record.file_bytes
    if not 0 < size <= capacity_bytes or not begin + size <= whole <= MAX_SAVE_BYTES or record.files < 1:
        return f"claims {size} bytes from {begin} of {whole}, one of {record.files} files"
    if begin % CHUNK_BYTES or (begin + size < whole and size % CHUNK_BYTES):
        return f"claims a window of {size} bytes from {begin}, which is not made of whole chunks"
    return None


class RankSlots:
    """The files behind a rank's slots. They outlive attempts: the pages are there already for the next one."""

    def __init__(self, job: JobKey, rank: int, memory: MemoryTier) -> None:
        self._job, self._rank, self._memory = job, rank, memory
        self._files: dict[int, SlotFile] = {}
        self._generation = 0
        self._making = asyncio.Lock()

    def add(self, file: SlotFile) -> None:
        """A file that an earlier agent made; of two generations the newer stays."""
        older = self._files.get(file.index)
        if older is not None and older.generation > file.generation:
            self._memory.remove(file)
            return
        if older is not None:
            self._memory.remove(older)
        self._files[file.index] = file
        self._generation = max(self._generation, file.generation)

    def newest_seq(self, index: int) -> int:
        """The highest sequence number in the slot's control page, of whatever run: a new one must be higher."""
        record = self._files[index].read_control().record
        return record.seq if record is not None else 0

    def file(self, index: int) -> SlotFile:
        return self._files[index]

    @property
    def indexes(self) -> list[int]:
        return sorted(self._files)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self._files.values())

    def grown(self) -> list[SlotFile]:
        """Those that are larger than they were handed out."""
        return [file for file in self._files.values() if file.has_grown()]

    def release(self, index: int) -> None:
        """Frees one slot for somebody who needs the memory more."""
        self._memory.remove(self._files.pop(index))

    def note(self, index: int, seq: int, verdict: SlotState) -> None:
        """Writes into the slot what became of its bytes."""
        file = self._files.get(index)
        if file is None:
            return
        try:
            file.write_verdict(seq, verdict)
        except OSError as error:
            log.warning("%s: the verdict was not written: %s", file.path, error)

    async def prepare(
        self, size_bytes: int, share_bytes: int, *,
        reusable: Callable[[], Collection[int]], added: Callable[[int], None],
        removed: Callable[[int], None], reclaim: Callable[[int], None],
    ) -> SlotPlan:  # fmt: skip
        """Makes the slots that a file of that size wants, as far as reusable slots, share and the node's limit allow.

        `reclaim` is asked for memory that others hold and do not need. Only slots that `reusable` names are removed
        or replaced. Raises MemoryBudgetTooSmall.
        """
        plan = plan_slots(share_bytes, size_bytes)
        async with self._making:
            fitting = [i for i, file in self._files.items() if self._fits(file, plan)]
            for index in [i for i in reusable() if i in self._files and i not in fitting]:
                self._drop(index, removed)
            for index in [i for i in reusable() if i in self._files]:
                if len(self._files) > plan.slots:
                    self._drop(index, removed)
            while len(self._files) < plan.slots:
                wanted = plan.capacity_bytes + CONTROL_BYTES
                if self.size_bytes + wanted > share_bytes:
                    break
                if not await self._memory.budget.claim(wanted, reclaim):
                    break
                index = next(i for i in range(plan.slots) if i not in self._files)
                try:
                    self._files[index] = await self._create(index, plan.capacity_bytes)
                except OSError as error:
                    if not self._files:
                        raise MemoryBudgetTooSmall(
                            f"the memory tier's folder has no room for a slot: {error}"
                        ) from error
                    log.warning("%s rank %s: one slot less than planned: %s", self._job, self._rank, error)
                    break
                added(index)
        return plan

    async def _create(self, index: int, capacity_bytes: int) -> SlotFile:
        """The slot, made in a thread. Who is cancelled meanwhile (his rank died) leaves nothing behind."""
        self._generation += 1
        making = asyncio.ensure_future(
            asyncio.to_thread(self._memory.create, self._job, self._rank, index, self._generation, capacity_bytes)
        )
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(lambda made: self._discard(made, capacity_bytes))
            raise
        except OSError:
            self._memory.budget.give_back(capacity_bytes + CONTROL_BYTES)
            raise

    def _discard(self, made: asyncio.Future[SlotFile], capacity_bytes: int) -> None:
        if made.cancelled() or made.exception() is not None:
            self._memory.budget.give_back(capacity_bytes + CONTROL_BYTES)
        else:
            self._memory.remove(made.result())

    def fits(self, index: int, plan: SlotPlan) -> bool:
        """Whether that slot is of the plan's measure, and whole."""
        return index in self._files and self._fits(self._files[index], plan)

    @staticmethod
    def _fits(file: SlotFile, plan: SlotPlan) -> bool:
        if not file.is_whole():
            return False
        if plan.streamed:
            return file.capacity_bytes == plan.capacity_bytes
        return plan.capacity_bytes <= file.capacity_bytes <= plan.capacity_bytes * 2

    def _drop(self, index: int, removed: Callable[[int], None]) -> None:
        self._memory.remove(self._files.pop(index))
        removed(index)
