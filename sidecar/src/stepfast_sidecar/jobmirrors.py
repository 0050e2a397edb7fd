"""What this node holds of one job's other nodes: their newest steps, each node's with a flow of its own, as `mirrored`
decides. The job's room persists what a flow here makes due, as if it were this node's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from stepfast.layout import DataName
from stepfast.nodestatus import JobStatus, MirrorStatus
from stepfast.ranks import EVERY_RANK, UNKNOWN, RankSet
from stepfast.slot import MAX_SHARERS_BYTES, ControlPage, SlotRecord, SlotState, rank_record
from stepfast.slotplan import slot_bytes
from stepfast.step import JobKey
from stepfast_sidecar.flow import RunFlow
from stepfast_sidecar.holdings import Effect, Held, Holding
from stepfast_sidecar.memory import MemoryTier, SlotFile
from stepfast_sidecar.mirrored import Charge, MirroredStep, Watch, abandoned, lacks_room, outdated
from stepfast_sidecar.mirrorfiles import Incoming, MirrorFiles, Place
from stepfast_sidecar.neighbourwire import Offer, Refusal, Refused
from stepfast_sidecar.run import Run
from stepfast_sidecar.slots import misfit

log = logging.getLogger(__name__)

_HOLDS = (Held.STAGED, Held.PERSISTING, Held.PERSISTED)


@dataclass(slots=True, kw_only=True)
class MirrorRoom:
    """What mirrors of all jobs may take of this node's memory tier, and take."""

    limit_bytes: int
    used_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class _Origin:
    """One node of one run whose steps are held here. `source`: its name in the cluster, once it has said so."""

    node: int
    run: Run
    watch: Watch
    source: str | None = None
    arrived: dict[int, float] = field(default_factory=dict)  # by step, when its last file came


class JobMirrors:
    """The mirrors of one job on this node. Times are Unix seconds, but for those of a Watch, which are monotonic."""

    def __init__(
        self, job: JobKey, memory: MemoryTier, room: MirrorRoom, *, clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._job, self._memory, self._room = job, memory, room
        self._clock, self._monotonic = clock, monotonic
        self._made = MirrorFiles(job, memory)
        self._files: dict[int, SlotFile] = {}  # by slot: no two of one job's have the same
        self._origins: dict[tuple[str, int], _Origin] = {}

    @property
    def runs(self) -> list[Run]:
        """One for each other node and run of which something is held."""
        return [origin.run for origin in self._origins.values()]

    @property
    def size_bytes(self) -> int:
        """What they take of the memory tier."""
        return sum(file.size_bytes for file in self._files.values())

    # ------------------------------------------------------------ what comes

    def adopt(self) -> None:
        """Takes over what an earlier agent held."""
        for place, file, finished_time in self._made.adopt():
            self._room.used_bytes += file.size_bytes
            page = file.read_control()
            if page.record is None or page.state not in (SlotState.STAGED, SlotState.PERSISTED):
                self._remove(file)
                continue
            self._keep(place, file, page, page.record.sharers, finished_time)

    async def expect(self, offer: Offer, record: SlotRecord, source: str) -> Incoming | Refused:
        """Room for a file that another node's agent offers. Whoever gets it finishes it, or gives it up."""
        try:
            ranks = RankSet.parse(offer.ranks, record.world_size)
            sharers = RankSet.parse(offer.sharers, record.world_size) if offer.sharers != EVERY_RANK else None
        except ValueError as error:
            return Refused(refusal=Refusal.DAMAGED, reason=str(error))
        place = Place(node=offer.node, ranks=ranks, rank=record.rank)
        if reason := _unfit(offer, record, place, sharers):
            return Refused(refusal=Refusal.DAMAGED, reason=reason)
        origin = self._origins.get((offer.run, offer.node))
        if origin is not None:
            self._hear(origin, source)
            if self._holds(origin, record):
                # An earlier agent may have been told of them, whose file has no room to say so.
                if sharers is not None and origin.run.flow.sharers_of(record.step) is None:
                    origin.run.flow.share(record.step, sharers)
                return Refused(refusal=Refusal.HELD, reason="it is held")
        for step in abandoned(self._steps(), run=offer.run, node=offer.node, step=record.step):
            self._let_go(step)
        room, size = self._room, slot_bytes(record.file_bytes)
        reason = lacks_room(
            size,
            held_bytes=room.used_bytes, limit_bytes=room.limit_bytes, free_bytes=self._memory.budget.coming_bytes,
        )  # fmt: skip
        if reason is not None:
            return Refused(refusal=Refusal.FULL, reason=reason)
        room.used_bytes += size  # now: others of whom something is expected meanwhile have that much less
        incoming = await self._made.expect(place, record.file_bytes)
        if incoming is None:
            room.used_bytes -= size
            return Refused(refusal=Refusal.FULL, reason="the memory tier is full")
        return incoming

    def finish(self, incoming: Incoming, record: SlotRecord, sharers: str, source: str) -> None:
        """All of the file has come, and is what was sent. Raises OSError."""
        record = _with_sharers(record, sharers)
        file = self._made.finish(incoming, record)
        page = ControlPage(record=record, verdict=None)
        origin = self._keep(incoming.place, file, page, sharers, self._clock())
        self._hear(origin, source)
        if origin.run.flow.is_whole(record.step):
            log.info("%s: step %s of node %s is mirrored here", self._job, record.step, origin.node)

    def give_up(self, incoming: Incoming) -> None:
        """Something is wrong with it, or its node's connection ended."""
        self._made.give_up(incoming)
        self._room.used_bytes -= incoming.slot.size_bytes

    def hear(self, source: str) -> None:
        """The agent of that node lives."""
        for origin in self._origins.values():
            if origin.source == source:
                origin.watch.heard(self._monotonic())

    # ------------------------------------------------------------ what becomes of it

    def flush(self, is_meant: Callable[[str], bool]) -> None:
        """What is held of these runs is to be persisted, by whoever is there to do so: see `take_over`."""
        for origin in self._origins.values():
            if is_meant(origin.run.flow.run):
                origin.watch.ask(self._monotonic())

    def take_over(self) -> Iterator[tuple[Run, list[Effect]]]:
        """What is to be done now in the stead of nodes that are gone."""
        for origin in list(self._origins.values()):
            flow = origin.run.flow
            if flow.is_flushing or origin.watch.charge(self._monotonic()) is not Charge.MIRROR:
                continue
            for step in self._steps():
                if (step.run, step.node) == (flow.run, origin.node) and not step.is_whole:
                    self._let_go(step)  # the rest of it went with the node
            log.warning(
                "%s: node %s of %s is gone: its step %s is persisted here", self._job, origin.node, flow.run,
                flow.memory_step(),
            )  # fmt: skip
            yield origin.run, flow.flush()

    def with_mirrors(self, status: JobStatus) -> JobStatus:
        """What the node says of a run of its own, with what it holds of the run's other nodes. What is persisted in
        their stead is pending here, and so is what may have to be: their node has not been heard since the flush.
        """
        origins = [origin for origin in self._origins.values() if origin.run.flow.run == status.run]
        if not origins:
            return status
        pending, size = set(status.pending_steps), status.pending_bytes
        unknown = pending.difference(status.incomplete_steps or ())
        mirrors = []
        for origin in origins:
            flow, step = origin.run.flow, origin.run.flow.memory_step()
            pending |= set(flow.pending_steps())
            unknown |= set(flow.pending_steps()) - origin.run.incomplete
            size += flow.pending_bytes()
            if step is None:
                continue
            held = sum(self._files[holding.slot].size_bytes for holding in flow.holdings.values())
            mirrors.append(MirrorStatus(node=origin.node, step=step, size_bytes=held))
            if origin.watch.charge(self._monotonic()) is Charge.UNSURE:
                pending.add(step)
                unknown.add(step)
                size += sum(holding.record.file_bytes for holding in flow.held(step) if holding.record is not None)
        errors = (origin.run.persist_error for origin in origins)
        return replace(
            status,
            pending_steps=tuple(sorted(pending)),
            incomplete_steps=tuple(sorted(pending - unknown)),
            pending_bytes=size,
            persist_error=next(filter(None, (status.persist_error, *errors)), None),
            mirrors=tuple(sorted(mirrors, key=lambda mirror: mirror.node)),
        )

    def sweep(self, newest_run: Run | None) -> None:
        """Lets go what nobody will ask for any more."""
        self._let_go_given_up()
        run = newest_run.flow.run if newest_run is not None else None
        committed = newest_run.persisted_step if newest_run is not None else None
        for step in outdated(self._steps(), run=run, committed=committed):
            self._let_go(step)

    def release(self, wanted_bytes: int) -> int:
        """Frees memory for slots, whatever was mirrored there, unless it is to be persisted; returns the bytes."""
        freed = self._let_go_given_up()
        for step in sorted(self._steps(), key=lambda one: one.arrived_time):
            if freed < wanted_bytes and not step.is_needed:
                log.warning("%s: step %s of node %s is mirrored no more: slots need the memory", self._job, step.step,
                            step.node)  # fmt: skip
                freed += self._let_go(step)
        return freed

    def release_all(self) -> None:
        """The job is over here."""
        for file in list(self._files.values()):
            self._remove(file)
        self._files.clear()
        self._origins.clear()

    # ------------------------------------------------------------ what is held

    def file(self, holding: Holding) -> SlotFile:
        return self._files[holding.slot]

    def note(self, holding: Holding, verdict: SlotState) -> None:
        """Writes into the file, if it is still there, what became of its bytes."""
        file = self._files.get(holding.slot)
        if file is None:
            return
        try:
            file.write_verdict(holding.seq, verdict)
        except OSError as error:
            log.warning("%s: the verdict was not written: %s", file.path, error)

    def grown(self) -> list[SlotFile]:
        """Those that are larger than they were made: a rank with root's rights may have done so, which read one."""
        return [file for file in self._files.values() if file.has_grown()]

    def held_file(self, wanted: DataName) -> SlotFile | None:
        """The file of that name, if one is held."""
        for origin in self._origins.values():
            for holding in origin.run.flow.slots_of(wanted.rank):
                record = holding.record
                if record is not None and holding.held in _HOLDS and _name_of(record) == wanted:
                    return self._files.get(holding.slot)
        return None

    # ------------------------------------------------------------ inside

    def _keep(self, place: Place, file: SlotFile, page: ControlPage, sharers: str, arrived_time: float) -> _Origin:
        record = page.record
        if record is None:
            raise ValueError("a mirror without a record")
        key = (record.run, place.node)
        if key not in self._origins:
            flow = RunFlow(record.run, sum(1 for _ in place.ranks))
            flow.ranks = set(place.ranks)
            run = Run(flow=flow, world_size=record.world_size, origin=place.node)
            self._origins[key] = _Origin(node=place.node, run=run, watch=Watch(self._monotonic()))
        origin = self._origins[key]
        is_persisted = page.state is SlotState.PERSISTED
        held = Held.PERSISTED if is_persisted else Held.STAGED
        # Of its own node's flush alone it becomes due here.
        holding = Holding(rank=record.rank, slot=file.index, held=held, seq=record.seq, record=record)
        self._files[file.index] = file
        origin.run.saved[record.step] = (record.saved_time, 0)
        origin.arrived[record.step] = max(arrived_time, origin.arrived.get(record.step, arrived_time))
        origin.run.flow.adopt(holding, parted=is_persisted)
        if sharers not in (EVERY_RANK, record.sharers):
            origin.run.flow.share(record.step, RankSet.parse(sharers, record.world_size))
        return origin

    def _hear(self, origin: _Origin, source: str) -> None:
        origin.source = source
        origin.watch.heard(self._monotonic())

    def _holds(self, origin: _Origin, record: SlotRecord) -> bool:
        wanted = _name_of(record)
        return any(
            h.record is not None and h.held in _HOLDS and _name_of(h.record) == wanted
            for h in origin.run.flow.slots_of(record.rank)
        )

    def _steps(self) -> list[MirroredStep]:
        found = []
        for origin in self._origins.values():
            flow = origin.run.flow
            for step in {h.step for h in flow.holdings.values() if h.step is not None}:
                held = flow.held(step)
                found.append(
                    MirroredStep(
                        run=flow.run,
                        node=origin.node,
                        step=step,
                        arrived_time=origin.arrived.get(step, 0.0),
                        size_bytes=sum(self._files[h.slot].size_bytes for h in held),
                        is_whole=flow.is_whole(step),
                        is_needed=any(h.due and h.held is not Held.PERSISTED for h in held),
                    )
                )
        return found

    def _let_go(self, step: MirroredStep) -> int:
        """Frees what is held of the step; returns the bytes."""
        origin, freed = self._origins[(step.run, step.node)], 0
        flow = origin.run.flow
        for holding in flow.held(step.step):
            file = self._files.pop(holding.slot)
            freed += file.size_bytes
            self._remove(file)
            flow.remove_slot(holding.rank, holding.slot)
        origin.arrived.pop(step.step, None)
        uncommitted = flow.uncommitted_parts()
        if step.step not in uncommitted:
            origin.run.saved.pop(step.step, None)
        if not uncommitted:
            flow.give_up(step.step)
        self._forget_empty(origin)
        return freed

    def _let_go_given_up(self) -> int:
        """Frees what is left of steps that were to be persisted here and were given up; returns the bytes."""
        freed = 0
        for origin in list(self._origins.values()):
            flow = origin.run.flow
            for holding in [one for one in flow.holdings.values() if one.held is Held.FREE]:
                file = self._files.pop(holding.slot)
                freed += file.size_bytes
                self._remove(file)
                flow.remove_slot(holding.rank, holding.slot)
            self._forget_empty(origin)
        return freed

    def _forget_empty(self, origin: _Origin) -> None:
        """Of a node of which nothing is held nothing has to be known, unless a step of it is still to be committed."""
        flow = origin.run.flow
        if not flow.holdings and not flow.uncommitted_parts():
            del self._origins[(flow.run, origin.node)]

    def _remove(self, file: SlotFile) -> None:
        self._made.remove(file)
        self._room.used_bytes -= file.size_bytes


def _unfit(offer: Offer, record: SlotRecord, place: Place, sharers: RankSet | None) -> str | None:
    """Why the file cannot be what the offer says; None when it can."""
    if record.state is not SlotState.STAGED or (record.run, record.node) != (offer.run, offer.node):
        return f"it is of {record.run}, node {record.node}, {record.state}"
    if record.rank not in place.ranks or record.window_bytes != record.file_bytes:
        return f"rank {record.rank} with {record.window_bytes} of {record.file_bytes} bytes"
    if sharers is not None and record.rank not in sharers:
        return f"rank {record.rank} of a step that is of ranks {sharers}"
    return misfit(record, record.file_bytes)


def _with_sharers(record: SlotRecord, sharers: str) -> SlotRecord:
    """The record with the ranks that share in its step, which may be known since it was staged: for the next agent,
    whom nobody may be left to tell. The same record where its page has no room for them.
    """
    if record.sharers != UNKNOWN or sharers == EVERY_RANK or len(sharers) > MAX_SHARERS_BYTES:
        return record
    told = replace(record, sharers=sharers)
    try:
        rank_record(told)
    except ValueError:
        return record
    return told


def _name_of(record: SlotRecord) -> DataName:
    return DataName(
        step=record.step, run=record.run, name=record.name, rank=record.rank, world_size=record.world_size
    )  # fmt: skip
