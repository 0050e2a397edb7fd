"""The agent's part in gangs that mirror their steps: listens for other agents, knows the gangs, has `mirrorsender` send
and `mirrorfetch` fetch, and looks after what is held of nodes that are gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from stepfast.layout import parse_data_path
from stepfast.slot import SlotRecord
from stepfast.step import JobKey
from stepfast_sidecar.config import MirrorSettings
from stepfast_sidecar.courier import Courier, Pace
from stepfast_sidecar.fetched import FetchedFile
from stepfast_sidecar.gangs import Address, Gang
from stepfast_sidecar.memory import MemoryTier
from stepfast_sidecar.metrics import Metrics
from stepfast_sidecar.mirrorfetch import MirrorFetch
from stepfast_sidecar.mirrorfiles import Incoming
from stepfast_sidecar.mirrorhost import Guest
from stepfast_sidecar.mirrorsender import MirrorSender
from stepfast_sidecar.neighbours import Credentials, Listener, NeighbourLost, Wire, give_way
from stepfast_sidecar.neighbourwire import Ask, Offer, Refusal, Refused
from stepfast_sidecar.room import Room
from stepfast_sidecar.run import newest_run

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_THREADS = 64  # each gang has one at most, and each file that is fetched
_GANG_SECONDS = 10.0  # how long the operator's word is waited for, of a job that mirrors its steps

T = TypeVar("T")


class Mirrors:
    """Of all jobs on this node. Made within the event loop; `close` ends all of it."""

    def __init__(
        self, rooms: Mapping[JobKey, Room], memory: MemoryTier, settings: MirrorSettings, node: str, *,
        is_expected: Callable[[JobKey], bool], metrics: Metrics, changed: Callable[[bool], None],
    ) -> None:  # fmt: skip
        """Listens from now on. `is_expected`: whether the job's pods say that its steps are mirrored.

        Raises AgentError when the port cannot be had.
        """
        self._rooms, self._settings, self._node = rooms, settings, node
        self._is_expected, self._metrics, self._changed = is_expected, metrics, changed
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="stepfast-mirror", initializer=give_way)
        self._credentials, self._pace = Credentials(folder=settings.credentials), Pace(settings.bytes_per_second)
        self._fetch = MirrorFetch(
            self._credentials, node, memory, threads=self._threads, on_loop=self._on_loop, metrics=metrics
        )
        self._gangs: tuple[Gang, ...] = ()
        self._senders: dict[Gang, MirrorSender] = {}
        self._sending: dict[Gang, asyncio.Task[None]] = {}
        self._ended: set[asyncio.Task[None]] = set()
        self._coming: dict[Path, Room] = {}  # files that are being received, and whose job's they are
        self._news = asyncio.Event()
        self._in_vain: set[tuple[JobKey, str]] = set()  # runs of which the operator said nothing in time
        self._listener = Listener(settings.host, settings.port, self._credentials, node, self._serve)

    @property
    def address(self) -> str:
        """Where other agents reach this one."""
        return str(Address(host=self._settings.host, port=self._listener.port))

    async def close(self) -> None:
        """Ends all connections, and what is under way."""
        self._pace.end()
        self.take(())
        await asyncio.to_thread(self._listener.close)
        await asyncio.gather(*self._ended, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    # ------------------------------------------------------------ gangs

    def take(self, gangs: tuple[Gang, ...]) -> None:
        """All gangs that mirror their steps and have this node, from now on."""
        self._gangs = gangs
        for gone in [gang for gang in self._sending if gang not in gangs]:
            del self._senders[gone]
            ending = self._sending.pop(gone)
            ending.cancel()
            self._ended.add(ending)
            ending.add_done_callback(self._ended.discard)
        for gang in gangs:
            if gang not in self._sending and gang.mirror is not None:
                self._start(gang, gang.mirror)
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _start(self, gang: Gang, mirror: Address) -> None:
        courier = Courier(mirror, self._credentials, self._node, self._pace)
        sender = self._senders[gang] = MirrorSender(
            gang, courier, lambda: self._rooms.get(gang.job), threads=self._threads, metrics=self._metrics,
            changed=self._changed,
        )  # fmt: skip
        task = self._sending[gang] = asyncio.create_task(sender.run(), name=f"mirror {gang.job}")
        task.add_done_callback(_tell_failure)

    def wake(self) -> None:
        """Something may have been staged."""
        for sender in self._senders.values():
            sender.wake()

    def _knows(self, job: JobKey, run: str) -> bool:
        return any(gang.is_of(job, run) for gang in self._gangs)

    async def fetch(self, room: Room, path: str, run: str) -> FetchedFile | None:
        """A rank's file from the memory of the gang's other nodes; None when it is not to be had there.

        Of a job that mirrors its steps the operator's word is waited for: it comes at about the time of the pods.
        """
        if parse_data_path(path) is None:
            return None
        if self._is_expected(room.job) and not self._knows(room.job, run) and (room.job, run) not in self._in_vain:
            try:
                async with asyncio.timeout(_GANG_SECONDS):
                    while not self._knows(room.job, run):
                        await self._news.wait()
            except TimeoutError:
                self._in_vain.add((room.job, run))
                log.warning("%s: nobody says which nodes %s has: its steps come from the storage", room.job, run)
        gangs = [gang for gang in self._gangs if gang.job == room.job]
        ours = [gang for gang in gangs if gang.is_of(room.job, run)] or gangs
        return await self._fetch.get(ours[-1], room, path) if ours else None

    # ------------------------------------------------------------ what is held for others

    async def look(self) -> None:
        """For ever: acts for nodes that are gone, lets go what is of no use."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for room in list(self._rooms.values()):
                self.act(room)

    def act(self, room: Room) -> None:
        """Does what is due for the nodes whose steps of that job are held here."""
        for run, effects in room.mirrors.take_over():
            room.carry_out(run, effects)
        newest = newest_run(room.runs)
        ours = room.runs[newest] if newest is not None else None
        room.mirrors.sweep(ours)
        room.fetched.sweep(has_saved=ours is not None and ours.flow.memory_step() is not None)
        if room.mirrors.runs:
            self._changed(False)

    async def hear(self, source: str) -> None:
        for room in self._rooms.values():
            room.mirrors.hear(source)

    async def expect(self, offer: Offer, record: SlotRecord, source: str) -> Incoming | Refused:
        job = JobKey.parse(offer.job)
        room = self._rooms.get(job)
        if room is None or not self._knows(job, offer.run):
            return Refused(refusal=Refusal.UNKNOWN, reason=f"no gang of {offer.run} is known to {self._node}")
        expected = await room.mirrors.expect(offer, record, source)
        if isinstance(expected, Incoming):
            self._coming[expected.slot.path] = room
        return expected

    async def finish(self, offer: Offer, incoming: Incoming, record: SlotRecord, source: str) -> None:
        room = self._coming[incoming.slot.path]
        if self._rooms.get(room.job) is not room:
            raise NeighbourLost(f"{offer.job} has left {self._node}")
        room.mirrors.finish(incoming, record, offer.sharers, source)
        del self._coming[incoming.slot.path]
        self.act(room)

    async def give_up(self, incoming: Incoming) -> None:
        self._coming.pop(incoming.slot.path).mirrors.give_up(incoming)

    async def open_held(self, ask: Ask) -> tuple[int, SlotRecord] | None:
        room = self._rooms.get(JobKey.parse(ask.job))
        if room is None or not any(gang.job == room.job for gang in self._gangs):
            return None
        held = room.held_file(ask.path)
        record = held.read_control().record if held is not None else None
        # Its rank may have written anything into the control page since the step was staged.
        if held is None or record is None or not 0 < record.file_bytes <= held.capacity_bytes:
            return None
        try:
            return held.open(writable=False), record
        except FileNotFoundError:  # freed meanwhile
            return None

    # ------------------------------------------------------------ threads

    def _serve(self, wire: Wire) -> None:
        Guest(self, wire, self._on_loop).serve()

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _tell_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s failed", task.get_name(), exc_info=error)
