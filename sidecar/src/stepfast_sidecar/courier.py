"""Carries a step's files to the agent of the next node, and fetches single ones from any: what is done in threads.

Slots are read, never mapped: a rank that cuts its own short makes a read end early, and harms nobody (I10). What a slot
held is sent as it lies there; whether it was one save's all the time is looked up afterwards, in its control page.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepfast.errors import ProtocolError
from stepfast.slot import CONTROL_BYTES, SlotRecord, SlotState, rank_record, read_control
from stepfast_sidecar.bandwidth import Bandwidth
from stepfast_sidecar.gangs import Address
from stepfast_sidecar.neighbours import Credentials, NeighbourLost, Wire, connect
from stepfast_sidecar.neighbourwire import Absent, Accepted, Alive, Ask, Found, Offer, Refusal, Refused, Sent

_BURST_BYTES = 4 << 20


class Overtaken(Exception):  # no error: a newer save came
    """The slot was used again, or cut short, while it was read."""


class NotTaken(NeighbourLost):
    """The other agent refuses the step, and says why. The connection is as good as before."""

    def __init__(self, refused: Refused) -> None:
        self.refusal = Refusal(refused.refusal)
        super().__init__(f"{self.refusal}: {refused.reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """One file to be mirrored. `descriptor` is of its slot; whoever made the parcel closes it."""

    offer: Offer
    record: SlotRecord
    descriptor: int


class Pace:
    """The bandwidth of all that this node copies, for many threads; `end` lets those go that wait for it."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bandwidth = Bandwidth(bytes_per_second, _BURST_BYTES)
        self._lock, self._ended = threading.Lock(), threading.Event()

    def wait(self, size_bytes: int) -> None:
        """Until so many bytes may go out. Raises NeighbourLost when the agent ends."""
        with self._lock:
            seconds = self._bandwidth.take(size_bytes, time.monotonic())
        if self._ended.wait(seconds) if seconds > 0 else self._ended.is_set():
            raise NeighbourLost("the agent ends")

    def end(self) -> None:
        self._ended.set()


class Courier:
    """This node's connection to the agent that mirrors it. One call at a time, but for `close`."""

    def __init__(self, address: Address, credentials: Credentials, node: str, pace: Pace) -> None:
        self.address = address
        self._credentials, self._node, self._pace = credentials, node, pace
        self._wire: Wire | None = None
        self._is_closed = False

    def deliver(self, parcels: Sequence[Parcel]) -> int:
        """Copies the files that the other has not; returns the bytes that went out.

        Raises Overtaken, NotTaken, NeighbourLost, ProtocolError.
        """
        sent = 0
        try:
            for parcel in parcels:
                sent += self._deliver(self._connected(), parcel)
        except NotTaken:
            raise
        except (NeighbourLost, ProtocolError):
            self._drop()
            raise
        return sent

    def say_alive(self) -> bool:
        """Whether the other answers; what was not connected stays so."""
        if self._wire is None:
            return True
        try:
            self._wire.send(Alive())
            if not isinstance(self._wire.read(), Alive):
                raise ProtocolError("no answer to Alive")
        except (NeighbourLost, ProtocolError):
            self._drop()
            return False
        return True

    def close(self) -> None:
        """Ends what is under way in another thread, too."""
        self._is_closed = True
        if self._wire is not None:
            self._wire.close()

    def _connected(self) -> Wire:
        if self._wire is None:
            self._wire = connect(self.address, self._credentials, self._node)
        if self._is_closed:
            self._drop()
            raise NeighbourLost("the agent ends")
        return self._wire

    def _drop(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def _deliver(self, wire: Wire, parcel: Parcel) -> int:
        record = parcel.record
        wire.send(parcel.offer, _page_of(record))
        answer = wire.read()
        if isinstance(answer, Refused) and answer.refusal == Refusal.HELD:
            return 0
        _check_accepted(answer)
        is_read = wire.send_file(parcel.descriptor, CONTROL_BYTES, record.file_bytes, self._pace.wait)
        is_whole = is_read and _is_still(parcel)
        wire.send(Sent(is_whole=is_whole))
        answer = wire.read()
        if not is_whole:
            raise Overtaken
        _check_accepted(answer)
        return record.file_bytes


def fetch(
    address: Address, credentials: Credentials, node: str, ask: Ask, make: Callable[[int], int]
) -> tuple[int, int] | None:
    """A descriptor of the file, and its size in bytes, from another node's memory; None when it is not held there.

    `make` is called with the size, and returns a descriptor to write to, or raises. Raises NeighbourLost, OSError,
    ProtocolError.
    """
    wire = connect(address, credentials, node)
    try:
        wire.send(ask)
        answer = wire.read()
        if isinstance(answer, Absent):
            return None
        if not isinstance(answer, Found):
            raise ProtocolError(f"{type(answer).__name__} to an Ask")
        descriptor = make(answer.size_bytes)
        try:
            wire.read_file(answer.size_bytes, lambda begin, piece: write_all(descriptor, begin, piece))
            sent = wire.read()
            if not isinstance(sent, Sent) or not sent.is_whole:
                raise NeighbourLost("it was overwritten there while it was read")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor, answer.size_bytes
    finally:
        wire.close()


def write_all(descriptor: int, offset: int, data: memoryview) -> None:
    """Raises OSError."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        offset, data = offset + written, data[written:]


def is_unchanged(descriptor: int, record: SlotRecord) -> bool:
    """Whether the slot's control page says still what it said."""
    page = os.pread(descriptor, CONTROL_BYTES, 0)
    return len(page) == CONTROL_BYTES and read_control(page).record == record


def _is_still(parcel: Parcel) -> bool:
    return is_unchanged(parcel.descriptor, parcel.record)


def _check_accepted(answer: object) -> None:
    if isinstance(answer, Refused):
        raise NotTaken(answer)
    if not isinstance(answer, Accepted):
        raise ProtocolError(f"{type(answer).__name__} to an Offer")


def _page_of(record: SlotRecord) -> bytes:
    """A control page that says this and nothing else."""
    if record.state is not SlotState.STAGED:
        raise ValueError(f"a slot that is {record.state}")
    page = bytearray(CONTROL_BYTES)
    offset, data = rank_record(record)
    page[offset : offset + len(data)] = data
    return bytes(page)
