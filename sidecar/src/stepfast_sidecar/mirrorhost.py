"""Serves another agent, in a thread of its own: takes its steps in, hands files out. What is known of jobs is the event
loop's, and asked there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from stepfast.errors import ProtocolError
from stepfast.slot import CONTROL_BYTES, SlotRecord, read_control
from stepfast_sidecar.courier import is_unchanged, write_all
from stepfast_sidecar.mirrorfiles import Incoming
from stepfast_sidecar.neighbours import Wire
from stepfast_sidecar.neighbourwire import Absent, Accepted, Alive, Ask, Found, Offer, Refusal, Refused, Sent

_HEAR_SECONDS = 1.0

T = TypeVar("T")


class OnLoop(Protocol):
    """Has something done on the event loop, and waits for it. Raises NeighbourLost when the agent ends."""

    def __call__(self, work: Coroutine[Any, Any, T]) -> T: ...


class Host(Protocol):
    """What is asked on the event loop. Implemented by `mirrors.Mirrors`."""

    async def hear(self, source: str) -> None:
        """The agent of that node lives."""

    async def expect(self, offer: Offer, record: SlotRecord, source: str) -> Incoming | Refused:
        """Room for what is offered; whoever gets it finishes it, or gives it up."""

    async def finish(self, offer: Offer, incoming: Incoming, record: SlotRecord, source: str) -> None:
        """All of it is there. Raises OSError."""

    async def give_up(self, incoming: Incoming) -> None:
        """It is not, and will not be."""

    async def open_held(self, ask: Ask) -> tuple[int, SlotRecord] | None:
        """A descriptor of the slot that holds the file, and what it says; whoever gets it closes it."""


class Guest:
    """One other agent's connection."""

    def __init__(self, host: Host, wire: Wire, on_loop: OnLoop) -> None:
        self._host, self._wire, self._on_loop = host, wire, on_loop
        self._heard = float("-inf")

    def serve(self) -> None:
        """Until it ends. Raises NeighbourLost, ProtocolError."""
        while True:
            message = self._wire.read()
            self._hear()
            match message:
                case Alive():
                    self._wire.send(Alive())
                case Offer():
                    self._receive(message)
                case Ask():
                    self._hand_out(message)
                case _:
                    raise ProtocolError(f"{type(message).__name__} from another agent")

    def _hear(self) -> None:
        now = time.monotonic()
        if now - self._heard >= _HEAR_SECONDS:
            self._heard = now
            self._on_loop(self._host.hear(self._wire.other))

    # ------------------------------------------------------------ taking in

    def _receive(self, offer: Offer) -> None:
        record = read_control(bytes(self._wire.read_bytes(CONTROL_BYTES))).record
        if record is None:
            raise ProtocolError("an offer without a control page")
        expected = self._on_loop(self._host.expect(offer, record, self._wire.other))
        if isinstance(expected, Refused):
            self._wire.send(expected)
            return
        is_held = False
        try:
            is_held = self._take_in(offer, record, expected)
        finally:
            if not is_held:
                self._on_loop(self._host.give_up(expected))
        if is_held:
            self._wire.send(Accepted())

    def _take_in(self, offer: Offer, record: SlotRecord, expected: Incoming) -> bool:
        """Whether all of it came, and was kept."""
        try:
            descriptor = expected.make()
        except OSError as error:
            self._wire.send(Refused(refusal=Refusal.FULL, reason=f"no memory: {error}"))
            return False
        try:
            self._wire.send(Accepted())

            def take(begin: int, piece: memoryview) -> None:
                write_all(descriptor, CONTROL_BYTES + begin, piece)
                self._hear()

            self._wire.read_file(record.file_bytes, take)
        finally:
            os.close(descriptor)
        sent = self._wire.read()
        if not isinstance(sent, Sent):
            raise ProtocolError(f"{type(sent).__name__} after a file")
        if not sent.is_whole:
            self._wire.send(Refused(refusal=Refusal.DAMAGED, reason="a newer save overtook it"))
            return False
        self._on_loop(self._host.finish(offer, expected, record, self._wire.other))
        return True

    # ------------------------------------------------------------ handing out

    def _hand_out(self, ask: Ask) -> None:
        held = self._on_loop(self._host.open_held(ask))
        if held is None:
            self._wire.send(Absent())
            return
        descriptor, record = held
        try:
            self._wire.send(Found(size_bytes=record.file_bytes))
            is_read = self._wire.send_file(descriptor, CONTROL_BYTES, record.file_bytes, lambda _: None)
            self._wire.send(Sent(is_whole=is_read and is_unchanged(descriptor, record)))
        finally:
            os.close(descriptor)
