"""What a node holds of its neighbour's steps: which it takes, which it lets go, and when it persists them in the
neighbour's stead. The receiving half of mirrors. Pure.

Invariants owned here:
 I4 Of a node that is mirrored the newest whole step is let go only for a newer whole one, for slots of this node's own
    ranks, or when it is of no use any more; what is to be persisted for a node that is gone, for nothing.
 I2 A node that lives persists its steps itself. Whoever only seems to be gone does it a second time, which is harmless:
    both write the same bytes to the same names, and the part record that was there first stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

SILENCE_SECONDS = 5.0  # a neighbour that lives says so every second
_FRESH_SECONDS = 1.5  # nobody finds a node lost so soon after it was heard, but for those that hear it themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class MirroredStep:
    """A step of one other node, as far as it is held here. `is_needed`: it is to be persisted, and is not yet."""

    run: str
    node: int  # index in the gang
    step: int
    arrived_time: float  # of its last file, by this node's clock: others' may differ from each other
    size_bytes: int
    is_whole: bool
    is_needed: bool


def outdated(steps: Iterable[MirroredStep], *, run: str | None, committed: int | None) -> list[MirroredStep]:
    """Those that nobody will ask for again: a newer whole one of the same node is there, or, of an earlier run, the
    newest `run` has committed a step of its own.
    """
    known = list(steps)
    newest: dict[int, float] = {}
    for one in known:
        if one.is_whole:
            newest[one.node] = max(one.arrived_time, newest.get(one.node, float("-inf")))
    return [
        one
        for one in known
        if not one.is_needed
        and (
            one.arrived_time < newest.get(one.node, float("-inf"))
            or (run is not None and one.run != run and committed is not None)
        )
    ]


def abandoned(steps: Iterable[MirroredStep], *, run: str, node: int, step: int) -> list[MirroredStep]:
    """Those that never will be whole, now that the node offers files of that step: it sends one step at a time."""
    return [
        one
        for one in steps
        if one.node == node and not one.is_whole and not one.is_needed and (one.run, one.step) != (run, step)
    ]


def lacks_room(size_bytes: int, *, held_bytes: int, limit_bytes: int, free_bytes: int) -> str | None:
    """Why a file of that size is not taken, beside so many that are held for others; None when it is. `free_bytes`: of
    the memory tier, whose slots go first.
    """
    if held_bytes + size_bytes > limit_bytes:
        return f"{size_bytes} bytes beside {held_bytes} are more than the {limit_bytes} that mirrors may take here"
    if size_bytes > free_bytes:
        return f"the memory tier has {max(0, free_bytes)} bytes left, of {size_bytes}"
    return None


class Charge(StrEnum):
    """Who persists what is mirrored of a node. UNASKED: nobody asked for it. UNSURE: a flush was asked for, and the
    node has not been heard about then. ORIGIN: it has, so it does so itself. MIRROR: it is gone, so this node does.
    """

    UNASKED = "unasked"
    UNSURE = "unsure"
    ORIGIN = "origin"
    MIRROR = "mirror"


class Watch:
    """One node whose steps of one run are mirrored here. What was taken over stays so: the run is over."""

    def __init__(self, now: float) -> None:
        self._heard = now
        self._asked: float | None = None
        self._is_taken_over = False

    def heard(self, now: float) -> None:
        """Its agent said something."""
        self._heard = max(now, self._heard)

    def ask(self, now: float) -> None:
        """A flush of the run is asked for; asking again changes nothing."""
        if self._asked is None:
            self._asked = now

    def charge(self, now: float) -> Charge:
        """Who persists, now."""
        if self._asked is None:
            return Charge.UNASKED
        if self._is_taken_over or now - self._heard >= SILENCE_SECONDS:
            self._is_taken_over = True
            return Charge.MIRROR
        return Charge.ORIGIN if self._heard > self._asked - _FRESH_SECONDS else Charge.UNSURE
