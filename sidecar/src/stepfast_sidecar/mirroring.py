"""Which step of a run its node's neighbour is to hold, too, and when that is tried: the sending half of mirrors. Pure.

One step at a time, the newest that is whole on this node and that the gang decided to persist. What is being sent is
finished though a newer one came meanwhile: else a run that saves faster than the network carries would have no mirror
at all. No save waits for it: a slot that is being copied is the last that a save is given, and when there is no other
the step is overtaken, and no harm is done. A neighbour that refuses or fails is tried again, later and later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stepfast_sidecar.gangs import Address
from stepfast_sidecar.holdings import Held, Holding

RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendStep:
    """Copy these files of the step to the neighbour."""

    step: int
    to: Address
    holdings: tuple[Holding, ...]


def whole_step(holdings: Iterable[Holding]) -> tuple[int, tuple[Holding, ...]] | None:
    """The step that these slots of a node's ranks hold, by rank; None when they are not all that the ranks have of it:
    a file that was larger than its slots went to the storage window by window, and memory never held it.
    """
    found = sorted((h for h in holdings if h.held in (Held.STAGED, Held.PERSISTING, Held.PERSISTED)), key=_place)
    steps = {h.step for h in found}
    if len(steps) != 1 or None in steps:
        return None
    names: dict[int, set[str]] = {}
    for holding in found:
        if holding.record is not None:
            names.setdefault(holding.rank, set()).add(holding.record.name)
    if any(h.record is None or len(names[h.rank]) < h.record.files for h in found):
        return None
    (step,) = steps
    return (step, tuple(found)) if step is not None else None


def _place(holding: Holding) -> tuple[int, int]:
    return holding.rank, holding.slot


class Mirroring:
    """What one run's neighbour holds, as far as it said so. Events are methods; `next` tells what is to be done now."""

    def __init__(self) -> None:
        self._neighbour: Address | None = None
        self._held: int | None = None  # the newest step that the neighbour holds whole
        self._sending: int | None = None
        self._failures = 0  # in a row
        self._not_before = float("-inf")

    @property
    def held_step(self) -> int | None:
        """The newest step that the neighbour said it holds."""
        return self._held

    def meet(self, neighbour: Address | None) -> None:
        """Who the neighbour is, from now on."""
        if neighbour == self._neighbour:
            return
        self._neighbour = neighbour
        self._failures, self._not_before = 0, float("-inf")
        self.lost()

    def lost(self) -> None:
        """The neighbour's connection ended: what it holds is not known any more."""
        self._held = None

    def next(self, newest: tuple[int, tuple[Holding, ...]] | None, now: float) -> SendStep | None:
        """What is to be sent, given the newest whole step of this node; it counts as begun."""
        if self._neighbour is None or self._sending is not None or newest is None or now < self._not_before:
            return None
        step, holdings = newest
        if self._held is not None and step <= self._held:
            return None
        self._sending = step
        return SendStep(step=step, to=self._neighbour, holdings=holdings)

    def sent(self, send: SendStep) -> None:
        """The neighbour holds all of it."""
        self._sending = None
        if send.to == self._neighbour:
            self._held, self._failures = send.step, 0

    def overtaken(self) -> None:
        """A slot was used again meanwhile: the next one is tried at once."""
        self._sending = None

    def failed(self, now: float) -> None:
        """The neighbour refused, or its connection ended: what it holds is not known any more."""
        self._sending, self._held = None, None
        self._not_before = now + RETRY_SECONDS[min(self._failures, len(RETRY_SECONDS) - 1)]
        self._failures += 1

    def wait_seconds(self, now: float) -> float:
        """How long nothing can be sent, whatever is staged; 0: it may be."""
        return max(0.0, self._not_before - now)
