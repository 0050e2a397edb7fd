"""Takes over what an earlier agent of this node left in one job's slots. What becomes of it is decided elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from stepfast.slot import ControlPage, SlotState
from stepfast_sidecar.flow import RunFlow
from stepfast_sidecar.holdings import Held, Holding
from stepfast_sidecar.jobslots import JobSlots
from stepfast_sidecar.memory import SlotFile
from stepfast_sidecar.run import Run
from stepfast_sidecar.slots import misfit


def adopt_slots(
    slots: JobSlots, runs: dict[str, Run], files: Mapping[int, list[SlotFile]], local_world_sizes: Mapping[str, object]
) -> None:
    """Adds the files, by rank, to the job's slots, and what they hold to its runs, the newest last.

    `local_world_sizes`: by run, how many ranks this node had, until they say so themselves.
    """
    found = [(rank, file, file.read_control()) for rank, ranks_files in files.items() for file in ranks_files]
    for rank, file, _ in found:
        slots.of(rank).add(file)
    whole = [
        (file, page.record, page.state)
        for rank, file, page in found
        if page.record is not None and _is_whole(rank, page, file.capacity_bytes)
    ]
    for file, record, state in sorted(whole, key=lambda one: one[1].saved_time):
        run = runs.setdefault(record.run, Run(flow=RunFlow(record.run, 0), world_size=record.world_size))
        run.saved[record.step] = (record.saved_time, 0)
        held = Held.PERSISTED if state is SlotState.PERSISTED else Held.STAGED
        holding = Holding(rank=record.rank, slot=file.index, held=held, seq=record.seq, record=record, due=record.due)
        run.flow.adopt(holding, parted=held is Held.PERSISTED)
    for rank, _, page in found:
        if page.record is not None and page.record.run in runs:
            runs[page.record.run].flow.ranks.add(rank)  # it may have been in the middle of a copy
    for name, run in runs.items():
        size = local_world_sizes.get(name)
        staged = len({holding.rank for holding in run.flow.holdings.values()})
        run.flow.local_world_size = size if isinstance(size, int) and size > 0 else staged


def _is_whole(rank: int, page: ControlPage, capacity_bytes: int) -> bool:
    """Whether the slot holds a whole file of that rank."""
    record = page.record
    if record is None or page.state not in (SlotState.STAGED, SlotState.PERSISTED) or record.rank != rank:
        return False
    return record.window_bytes == record.file_bytes and misfit(record, capacity_bytes) is None
