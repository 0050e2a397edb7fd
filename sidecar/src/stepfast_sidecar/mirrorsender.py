"""Keeps one gang's neighbour supplied with this node's newest step, as `mirroring` decides, and tells it that this node
lives.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future

from stepfast.errors import ProtocolError
from stepfast.ranks import EVERY_RANK, RankSet
from stepfast_sidecar.courier import Courier, NotTaken, Overtaken, Parcel
from stepfast_sidecar.gangs import Gang
from stepfast_sidecar.holdings import Holding
from stepfast_sidecar.metrics import Metrics, MirrorOutcome
from stepfast_sidecar.mirroring import Mirroring, SendStep, whole_step
from stepfast_sidecar.neighbours import NeighbourLost
from stepfast_sidecar.neighbourwire import MAX_RANKS_TEXT, Offer, Refusal
from stepfast_sidecar.room import Room
from stepfast_sidecar.run import Run

log = logging.getLogger(__name__)

ALIVE_SECONDS = 1.0


class MirrorSender:
    """`room_of` is asked each time: a job's room comes with its first rank, and may be another one later."""

    def __init__(
        self, gang: Gang, courier: Courier, room_of: Callable[[], Room | None], *, threads: Executor,
        metrics: Metrics, changed: Callable[[bool], None],
    ) -> None:  # fmt: skip
        self._gang, self._courier, self._room_of = gang, courier, room_of
        self._threads, self._metrics, self._changed = threads, metrics, changed
        self._mirroring = Mirroring()
        self._mirroring.meet(courier.address)
        self._launch: Run | None = None  # whose steps are sent at present
        self._spoke_time = float("-inf")
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Something may have been staged."""
        self._woken.set()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                self._woken.clear()
                room, run = self._room_of(), self._newest_run()
                if run is not self._launch:
                    self._launch = run
                    self._mirroring.lost()  # launched again in its pods, it may save lower steps
                send = self._mirroring.next(_sendable(run), time.monotonic())
                if room is not None and run is not None and send is not None:
                    await self._send(room, run, send)
                else:
                    await self._idle()
        finally:
            self._courier.close()

    def _newest_run(self) -> Run | None:
        room = self._room_of()
        ours = [run for name, run in room.runs.items() if self._gang.is_of(room.job, name)] if room else []
        return ours[-1] if ours else None

    async def _idle(self) -> None:
        """Until something may be sent, at most until it is time to say that this node lives."""
        try:
            async with asyncio.timeout(ALIVE_SECONDS):
                await self._woken.wait()
        except TimeoutError:
            pass
        now = time.monotonic()
        if now - self._spoke_time >= ALIVE_SECONDS:
            self._spoke_time = now
            if not await self._in_thread(self._courier.say_alive):
                self._mirroring.lost()

    async def _send(self, room: Room, run: Run, send: SendStep) -> None:
        begin, job = time.monotonic(), room.job
        self._spoke_time = begin
        run.flow.spared = frozenset((holding.rank, holding.slot) for holding in send.holdings)
        try:
            sent_bytes = await self._deliver(_parcels(self._gang, room, run, send))
        except Overtaken:
            self._mirroring.overtaken()
            self._metrics.mirrored(MirrorOutcome.OVERTAKEN, 0, 0.0)
            log.info("%s: step %s was overtaken before it was mirrored", job, send.step)
        except (NeighbourLost, ProtocolError, OSError) as error:
            self._mirroring.failed(time.monotonic())
            self._metrics.mirrored(
                MirrorOutcome.REFUSED if isinstance(error, NotTaken) else MirrorOutcome.FAILED, 0, 0.0
            )
            self._tell(run, f"step {send.step} is not mirrored by {send.to}: {error}", error)
        else:
            self._mirroring.sent(send)
            self._metrics.mirrored(MirrorOutcome.HELD, sent_bytes, time.monotonic() - begin)
            run.mirrored_step, run.mirror_error = send.step, None
            self._changed(False)
        finally:
            run.flow.spared = frozenset()

    def _tell(self, run: Run, reason: str, error: Exception) -> None:
        is_expected = isinstance(error, NotTaken) and error.refusal is Refusal.UNKNOWN  # it will hear of the gang soon
        if run.mirror_error is None and not is_expected:
            log.warning("%s: %s", self._gang.job, reason)
        run.mirror_error = reason
        self._changed(False)

    async def _deliver(self, parcels: Sequence[Parcel]) -> int:
        def deliver() -> int:
            try:
                return self._courier.deliver(parcels)
            finally:
                _close(parcels)  # here: no other file may get their numbers while this thread reads

        delivering = self._threads.submit(deliver)
        delivering.add_done_callback(lambda done: _close(parcels) if done.cancelled() else None)
        return await asyncio.wrap_future(delivering)

    async def _in_thread(self, work: Callable[[], bool]) -> bool:
        working: Future[bool] = self._threads.submit(work)
        return await asyncio.wrap_future(working)


def _sendable(run: Run | None) -> tuple[int, tuple[Holding, ...]] | None:
    """The newest step of the run that is whole on this node and to be persisted."""
    step = run.flow.memory_step(due=True) if run is not None else None
    return whole_step(run.flow.held(step)) if run is not None and step is not None else None


def _parcels(gang: Gang, room: Room, run: Run, send: SendStep) -> list[Parcel]:
    """Raises Overtaken when a slot is gone, OSError."""
    ranks, sharers = str(RankSet.of(run.flow.ranks)), run.flow.sharers_of(send.step)
    if len(ranks) > MAX_RANKS_TEXT:
        raise ProtocolError(f"ranks {ranks} of one node are numbered without any order")
    offer = Offer(
        job=str(gang.job), run=run.flow.run, node=run.node, ranks=ranks,
        sharers=EVERY_RANK if sharers is None else str(sharers),
    )  # fmt: skip
    parcels: list[Parcel] = []
    try:
        for holding in send.holdings:
            if holding.record is not None:
                descriptor = room.slots.file(holding).open(writable=False)
                parcels.append(Parcel(offer=offer, record=holding.record, descriptor=descriptor))
    except (KeyError, FileNotFoundError) as error:
        _close(parcels)
        raise Overtaken from error
    return parcels


def _close(parcels: Sequence[Parcel]) -> None:
    for parcel in parcels:
        os.close(parcel.descriptor)
