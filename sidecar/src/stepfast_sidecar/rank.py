"""Serves one rank's connection: takes its messages to the job's room and answers them."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any, TypeAlias

from stepfast.errors import AgentError, ObjectNotFound, ProtocolError, StepfastError
from stepfast.layout import is_readable_path
from stepfast.messages import (
    VERSION,
    Borrow,
    Bye,
    CommittedSteps,
    Expect,
    Failure,
    Fetch,
    Fetched,
    FinalSaved,
    GaveUp,
    Hello,
    Message,
    Progress,
    Referable,
    Remove,
    Reserve,
    Reserved,
    Restored,
    SaveRequested,
    SetAside,
    Sharers,
    Skipped,
    SlotReady,
    Staged,
    Steps,
    Supersede,
    Want,
    Welcome,
)
from stepfast.ranks import RankSet
from stepfast.slot import CONTROL_BYTES, SlotRecord, SlotState
from stepfast.slotplan import MAX_SLOTS, SlotPlan, plan_slots
from stepfast.step import Tier
from stepfast_sidecar.growth import cut_back, grown
from stepfast_sidecar.holdings import Held, Holding
from stepfast_sidecar.intake import Peer
from stepfast_sidecar.persisterprocess import PersisterLost, RequestFailed
from stepfast_sidecar.room import Room
from stepfast_sidecar.run import Run, Session
from stepfast_sidecar.slots import refusal
from stepfast_sidecar.tenants import Volume

if TYPE_CHECKING:
    from stepfast_sidecar.agent import Agent

log = logging.getLogger(__name__)

_Request: TypeAlias = Reserve | Steps | Supersede | SetAside | Remove | Fetch | Borrow
_MAX_REQUESTS = 256  # of one rank at once; the SDK has a handful
_FETCH_ATTEMPTS = 3  # the persister may die under a request


async def serve_rank(
    agent: Agent, peer: Peer, hello: Hello, messages: AsyncIterator[Message], volume: Volume | None
) -> None:
    """Until the rank says goodbye or dies. `volume` is the pod's that it is a process of.

    Raises ProtocolError for what no rank may say.
    """
    room = agent.room_for(hello, volume.credentials if volume is not None else {})
    volume_id = volume.id if volume is not None else ""
    known = room.session_of(hello)
    if known is not None and known.alive:
        # Of a process in a pod the kernel tells no pid here, and the pods' own pids are alike.
        was = (known.hello.pid, known.peer.credentials(), known.volume_id)
        if was != (hello.pid, peer.credentials(), volume_id):
            raise ProtocolError(f"rank {hello.rank} of {hello.run} is here already, as process {known.hello.pid}")
        known.peer.close()  # it lost the connection before we noticed
        known.clean = True
    run = room.run_of(hello)
    session = Session(hello=hello, peer=peer, joined_time=time.time(), volume_id=volume_id)
    if known is not None:
        session.restored_step, session.restored_tier = known.restored_step, known.restored_tier
        session.restored_time, session.restore_seconds = known.restored_time, known.restore_seconds
        session.global_step, session.step_time = known.global_step, known.step_time
        session.referable = known.referable
        session.file_bytes = known.file_bytes
    run.sessions[hello.rank] = session
    run.flow.ranks.add(hello.rank)
    agent.end_flush(room.job, run)
    await _RankServer(agent, room, run, session).serve(messages)


class _RankServer:
    def __init__(self, agent: Agent, room: Room, run: Run, session: Session) -> None:
        self._agent, self._room, self._run, self._session = agent, room, run, session
        hello = session.hello
        self._rank = hello.rank
        self._slots = room.slots.of(hello.rank)
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, messages: AsyncIterator[Message]) -> None:
        self._take_over_slots()
        self._agent.lending.put_slots_first()  # shares are smaller by one more job
        self._session.peer.send(Welcome(version=VERSION, share_bytes=self._share))
        if self._agent.is_save_requested(self._room.job, self._run.flow.run):
            self._session.peer.send(SaveRequested())
        self._room.carry_out(self._run, self._run.flow.retry())  # what an earlier agent left of this run
        self._agent.changed(True)
        try:
            async for message in messages:
                if isinstance(message, Bye):
                    self._session.clean = True
                    break
                self._handle(message)
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._run.sessions.get(self._rank) is self._session:
                self._room.rank_ended(self._run, self._session)
            await cut_back(self._slots.grown())  # an agent that ends looks no more

    def _handle(self, message: Message) -> None:  # noqa: C901, PLR0912  # a table: one case a message
        room, run, session = self._room, self._run, self._session
        match message:
            case Progress():
                session.global_step, session.step_time = message.step, message.time
                session.metrics = message.metrics or session.metrics
                session.total_steps = message.total_steps or session.total_steps
                self._agent.changed(False)
            case Staged():
                self._staged(message)
            case Sharers():
                self._shared(message)
            case GaveUp():
                self._room.carry_out(run, run.flow.rank_gave_up(self._rank, message.step))
            case Reserve() | Steps() | Supersede() | SetAside() | Remove() | Fetch() | Borrow():
                self._spawn(self._answering(message))
            case Expect():
                self._spawn(self._expect(message))
            case Want():
                self._spawn(room.want(run, session, message.step))
            case Restored():
                session.restored_step, session.restored_tier = message.step, message.tier
                session.restored_time, session.restore_seconds = message.time, message.seconds
                self._agent.metrics.restored(message.tier, message.seconds)
                self._agent.changed(True)
            case Referable():
                session.referable = message.steps
            case FinalSaved():
                run.final_step = message.step
                self._agent.changed(True)
            case Skipped():
                if self._counts:
                    run.skipped += 1
            case _:
                raise ProtocolError(f"{type(message).__name__} from a rank")

    @property
    def _share(self) -> int:
        return self._agent.share_bytes(self._session.hello)

    @property
    def _counts(self) -> bool:
        """Whether this rank's saves stand for the gang's on this node: counted once, not by every rank."""
        return self._rank == min(self._run.sessions)

    # ------------------------------------------------------------ staging

    def _take_over_slots(self) -> None:
        """The rank's slots of earlier runs serve this one, unless they hold what is still to be persisted."""
        for index in self._slots.indexes:
            if (self._rank, index) in self._run.flow.holdings:
                continue
            keeper = self._keeper(index)
            if keeper is None:
                self._run.flow.add_slot(self._rank, index, self._slots.newest_seq(index))
                continue
            self._room.give_up_incomplete(keeper)
            holding = keeper.flow.holdings[(self._rank, index)]
            if holding.held in (Held.FREE, Held.RESERVED, Held.PERSISTED):
                keeper.flow.remove_slot(self._rank, index)
                self._run.flow.holdings[(self._rank, index)] = holding

    def _keeper(self, index: int) -> Run | None:
        for run in self._room.runs.values():
            if run is not self._run and (self._rank, index) in run.flow.holdings:
                return run
        return None

    async def _prepare(self, size_bytes: int, *, announce: bool = False) -> SlotPlan:
        flow, rank = self._run.flow, self._rank

        def added(index: int) -> None:
            flow.add_slot(rank, index)
            if announce:
                self._announce(index)
            self._room.wake()

        return await self._slots.prepare(
            size_bytes,
            self._share,
            reusable=lambda: flow.reusable_slots(rank),
            added=added,
            removed=lambda index: flow.remove_slot(rank, index),
            reclaim=lambda wanted: self._agent.reclaim(wanted, self._room),
        )

    def _hear_of(self, file_bytes: int) -> None:
        if self._session.speak_of(file_bytes):
            self._agent.lending.put_slots_first()

    async def _expect(self, message: Expect) -> None:
        self._hear_of(message.size_bytes)
        try:
            plan = plan_slots(self._share, message.size_bytes)
            for index in self._slots.indexes:
                if self._slots.fits(index, plan):
                    self._announce(index)
            await self._prepare(message.size_bytes, announce=True)
        except AgentError as error:
            log.warning("rank %s of %s: %s", self._rank, self._run.flow.run, error)

    def _announce(self, index: int) -> None:
        file = self._slots.file(index)
        ready = SlotReady(slot=index, capacity_bytes=file.capacity_bytes)
        self._session.peer.send(ready, file.open(writable=True))

    async def _reserve(self, message: Reserve) -> None:
        self._hear_of(message.size_bytes)
        if message.window_begin == 0:
            self._session.begin_stream()
            self._run.flow.rank_begins(self._rank, message.step)
        elif self._session.stream_broken:
            raise RequestFailed("StorageUnavailable", "the persister died with windows of this file: begin again")
        while True:
            self._take_over_slots()
            plan = plan_slots(self._share, message.size_bytes)
            holding = self._choose(message, plan)
            if holding is None:
                await self._prepare(message.size_bytes)
            async with self._room.freed:
                holding = holding or self._choose(message, plan)
                if holding is None:
                    if not self._session.waiting:
                        self._session.waiting = True
                        self._agent.changed(True)
                    # Woken by each slot that is persisted; looked at again in any case, for a lost run's slots.
                    try:
                        async with asyncio.timeout(1.0):
                            await self._room.freed.wait()
                    except TimeoutError:
                        self._free_abandoned()
                        self._room.carry_out(self._run, self._run.flow.relieve(self._rank))
                    continue
            if self._session.waiting:
                self._session.waiting, self._session.waited_time = False, time.time()
                self._agent.changed(True)
            file = self._slots.file(holding.slot)
            self._session.peer.send(
                Reserved(
                    id=message.id,
                    slot=holding.slot,
                    seq=holding.seq,
                    capacity_bytes=file.capacity_bytes,
                    slots=len(self._slots.indexes),
                    persisting=self._run.flow.persisting_steps(),
                    unpersisted=self._run.flow.unpersisted_of(self._rank),
                ),
                file.open(writable=True),
            )
            return

    def _choose(self, message: Reserve, plan: SlotPlan) -> Holding | None:
        if not any(self._slots.fits(index, plan) for index in self._slots.indexes):
            return None
        holding, effects = self._run.flow.reserve(self._rank, message.drop, message.copying)
        self._room.carry_out(self._run, effects)
        if holding is not None and not self._slots.fits(holding.slot, plan):
            return None  # it is reusable now, and is made anew to measure
        return holding

    def _free_abandoned(self) -> None:
        """Slots that a dead run cannot persist (the storage fails) are given up rather than block the living one."""
        for index in self._slots.indexes:
            keeper = self._keeper(index)
            if keeper is None or not keeper.is_over or self._run.flow.slots_of(self._rank):
                continue
            step = keeper.flow.holdings[(self._rank, index)].step
            if step is not None and step not in keeper.flow.persisting_steps():
                log.error("step %s of %s is given up: its memory is needed", step, keeper.flow.run)
                self._room.carry_out(keeper, keeper.flow.give_up(step))

    def _staged(self, message: Staged) -> None:
        run, record = self._run, self._offered(message)
        if record is None:
            return
        if record.window_begin > 0 and self._session.stream_broken:
            self._room.carry_out(run, run.flow.window_lost(self._rank, message.slot, record))
            return
        run.replicated = record.replicated
        run.saved.setdefault(record.step, (record.saved_time, 0))
        if self._counts and record.window_begin + record.window_bytes >= record.file_bytes:
            run.count_save(record.step, message.stall_seconds)
            self._agent.metrics.staged(record.file_bytes, message.stall_seconds)
        self._room.carry_out(run, run.flow.staged(self._rank, message.slot, record))
        if run.flow.is_committed(record.step):
            self._spawn(self._room.want(run, self._session, record.step))  # it may have joined since, and not know
        if self._session.waiting:
            self._room.wake()  # the rank's step before is its newest no longer

    def _shared(self, message: Sharers) -> None:
        try:
            sharers = RankSet.parse(message.ranks, self._run.world_size)
        except ValueError as error:
            raise ProtocolError(f"step {message.step}: {error}") from error
        if self._rank not in sharers:
            raise ProtocolError(f"step {message.step} is said to be of others than rank {self._rank}")
        self._room.carry_out(self._run, self._run.flow.share(message.step, sharers))

    def _offered(self, message: Staged) -> SlotRecord | None:
        """What the slot holds; None when it is not news. Raises ProtocolError when the rank may not say so."""
        if message.slot >= MAX_SLOTS:
            raise ProtocolError(f"slot {message.slot} is not this rank's")
        holding = self._run.flow.holdings.get((self._rank, message.slot))
        if holding is None or message.slot not in self._slots.indexes:
            return None
        if holding.held not in (Held.RESERVED, Held.FREE):
            return None  # offered again, after the connection was lost
        # A higher number in a free slot: an earlier agent reserved it, and this one took over during the copy.
        if message.seq != holding.seq and not (message.seq > holding.seq and holding.held is Held.FREE):
            log.info("rank %s offers use %s of slot %s, which is not its", self._rank, message.seq, message.slot)
            return None
        file = self._slots.file(message.slot)
        page = file.read_control()
        if file.has_grown():
            raise grown(file)
        if page.state in (SlotState.PERSISTED, SlotState.DROPPED):
            return None  # dealt with by an earlier agent
        record = page.record
        if record is None and holding.held is Held.FREE:
            return None  # said of a file that an earlier agent took with it; this one was made since
        if record is None or page.state is not SlotState.STAGED or record.seq != message.seq:
            raise ProtocolError(f"slot {message.slot} does not hold what its message says")
        if (reason := refusal(record, self._session.hello, file.capacity_bytes)) is not None:
            raise ProtocolError(f"slot {message.slot} {reason}")
        return record

    # ------------------------------------------------------------ reading

    async def _steps(self, message: Steps) -> None:
        answer = await self._ask("steps")
        self._session.peer.send(CommittedSteps(id=message.id, steps=tuple(answer["steps"])))

    async def _supersede(self, message: Supersede) -> None:
        superseded = await self._room.supersede_after(self._run, message.step)
        self._session.peer.send(CommittedSteps(id=message.id, steps=superseded))

    async def _set_aside(self, message: SetAside) -> None:
        answer = await self._ask("setAside", step=message.step)
        self._session.peer.send(CommittedSteps(id=message.id, steps=tuple(answer["steps"])))

    async def _remove(self, message: Remove) -> None:
        await self._ask("remove", step=message.step)
        self._session.peer.send(CommittedSteps(id=message.id, steps=(message.step,)))

    async def _fetch(self, message: Fetch) -> None:
        if not is_readable_path(message.path):
            raise ProtocolError(f"{message.path!r} is no file of a step")
        held = None if message.refresh else self._room.held_file(message.path)
        if held is not None:
            record = held.read_control().record
            if record is not None:
                fetched = Fetched(id=message.id, offset=CONTROL_BYTES, size_bytes=record.file_bytes, tier=Tier.MEMORY)
                self._session.peer.send(fetched, held.open(writable=False))
                return
        mirrored = (
            None if message.refresh else await self._agent.fetch_mirrored(self._room, message.path, self._run.flow.run)
        )
        if mirrored is not None:
            size = mirrored.size_bytes
            fetched = Fetched(id=message.id, offset=0, size_bytes=size, tier=Tier.MEMORY)
            self._session.peer.send(fetched, mirrored.open())
            return
        descriptor, size = await self._open(message.path)
        self._session.peer.send(Fetched(id=message.id, offset=0, size_bytes=size, tier=Tier.PERSISTENT), descriptor)

    async def _open(self, path: str) -> tuple[int, int]:
        """A descriptor of the object, and its size in bytes. Raises ObjectNotFound."""
        for _ in range(_FETCH_ATTEMPTS):
            answer = await self._ask("fetch", path=path)
            try:
                return os.open(answer["path"], os.O_RDONLY | os.O_CLOEXEC), answer["size"]
            except FileNotFoundError:  # removed since, or the copy of a persister that has ended since: ask again
                continue
        raise ObjectNotFound(f"{path} is removed whenever it is opened")

    async def _ask(self, command: str, **values: Any) -> Any:
        for _ in range(_FETCH_ATTEMPTS - 1):
            try:
                return await self._room.persister.request(command, **values)
            except PersisterLost:
                continue
        return await self._room.persister.request(command, **values)

    async def _answering(self, message: _Request) -> None:
        request = message.id
        try:
            await self._answer(message)
        except RequestFailed as error:
            self._session.peer.send(Failure(id=request, kind=error.kind, reason=error.reason))
        except ProtocolError as error:
            self._session.peer.send(Failure(id=request, kind=type(error).__name__, reason=str(error)))
            self._session.peer.close()
        except (StepfastError, OSError) as error:
            self._session.peer.send(Failure(id=request, kind=type(error).__name__, reason=str(error)))

    async def _answer(self, message: _Request) -> None:
        match message:
            case Reserve():
                await self._reserve(message)
            case Steps():
                await self._steps(message)
            case Supersede():
                await self._supersede(message)
            case SetAside():
                await self._set_aside(message)
            case Remove():
                await self._remove(message)
            case Fetch():
                await self._fetch(message)
            case Borrow():
                await self._agent.lending.answer(self._room, self._session, message)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if len(self._tasks) >= _MAX_REQUESTS:
            work.close()
            raise ProtocolError(f"rank {self._rank} has {_MAX_REQUESTS} requests under way")
        task = asyncio.create_task(work, name=f"rank {self._rank}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
