"""Tensors that do not change any more: who says so, and which files of older steps hold them, so that later steps need
not save them again but refer to those.

Nothing is guessed. A tensor is left out of a save only when its object says that it is settled, said so when the file
that holds it was saved, and has said so, with the same number, at each save since; torch's own count of changes can
only veto that. Tensors are known by their identity: a name may stand for another one after layers have moved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch

from stepfast.admission import RankReport, steps_to_refer_to
from stepfast.environment import Environment
from stepfast.layout import data_path
from stepfast.messages import MAX_REFERABLE
from stepfast.references import Reference
from stepfast.torch.plan import Entry, SavePlan
from stepfast.torch.writer import Writer

_SMALLEST_BYTES = 4096  # of a tensor that is left out: to say where it is, and to read it there, has its price, too
_STEPS_KNOWN = 16  # in which tensors are known to be held: what only older ones hold is saved again
_DECISIONS_KEPT = 16

Settlements: TypeAlias = Iterable[tuple[torch.Tensor, int]]


class Settling(Protocol):
    """An object, given to a Checkpointer, some of whose tensors stay as they are for a long time: frozen layers."""

    def settled(self) -> Settlements:
        """The tensors of the object's state that do not change, each with a number that tells when it settled.

        They are the tensors themselves, the same objects at every call: parameters, where `state_dict()` gives
        detached ones of the same memory. From the moment that one is named, no byte of it may change as long as it is
        named with the same number: one that was trained again, or loaded anew, in between is named with another
        number (an epoch, a count of changes), and is not named while it is trained. Called at each save, after
        `state_dict()`. A tensor that is named although it changes is restored as it was.
        """


@dataclass(slots=True)
class _Known:
    """A tensor that is settled, as `mark` says, and by what name the files of which steps hold it."""

    tensor: weakref.ref[torch.Tensor]
    mark: Hashable
    held: dict[int, str] = field(default_factory=dict)


class Ledger:
    """One rank's account of its settled tensors. Told of each save, in order."""

    def __init__(self, settled: Callable[[], Settlements], environment: Environment, name: str) -> None:
        self._settled, self._environment, self._name = settled, environment, name
        self._known: dict[int, _Known] = {}  # by identity
        self._now: dict[int, _Known] = {}  # by the number of the plan's entry
        self._plan: SavePlan | None = None  # whose entries and names these are
        self._entries: list[Entry] = []
        self._names: list[str] = []
        self._chosen: dict[int, int] = {}  # of the save that is planned: by entry, the step that holds it

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that a later one might refer to, if they are committed, ascending."""
        return tuple(sorted({step for known in self._known.values() for step in known.held})[-_STEPS_KNOWN:])

    def forget(self) -> None:
        """The tensors hold something else: a restore has written to them."""
        self._known, self._now, self._chosen = {}, {}, {}

    def references(
        self, plan: SavePlan, tensors: Sequence[torch.Tensor], steps: Collection[int]
    ) -> dict[int, Reference]:
        """What a save of these tensors leaves out, by the number of the plan's entry, when it may refer to the steps.

        Looks anew at what is settled: a tensor that is not, or not as it was, is forgotten.
        """
        self._look(plan, tensors)
        held = {index: [step for step in known.held if step in steps] for index, known in self._now.items()}
        self._chosen = {index: max(found) for index, found in held.items() if found}
        return {
            index: Reference(path=self._path(step), name=self._now[index].held[step])
            for index, step in self._chosen.items()
        }

    def record(self, step: int, *, is_sure: bool, lost: Collection[int]) -> None:
        """The save that was planned last was written, as that step; the steps `lost` will never be committed.

        Unless it is sure, nothing relies on it: it stays in memory for now, or the step was saved before, and what is
        committed of it may be that save's file.
        """
        for index, known in self._now.items():
            if not is_sure:
                known.held.pop(step, None)
            elif index in self._chosen:
                # What is committed is enough: older steps may go.
                known.held = {other: name for other, name in known.held.items() if other >= self._chosen[index]}
            else:
                known.held[step] = self._names[index]
        # Those on their way are no more than there are slots: among them is the one that is committed next.
        for known in self._known.values():
            known.held = {other: name for other, name in known.held.items() if other not in lost}
        kept = self.steps
        for known in self._known.values():
            known.held = {other: name for other, name in known.held.items() if other in kept}

    def _look(self, plan: SavePlan, tensors: Sequence[torch.Tensor]) -> None:
        given = {tensor.data_ptr(): (tensor, since) for tensor, since in self._settled() if _has_bytes(tensor)}
        known: dict[int, _Known] = {}
        self._now = {}
        if given and plan is not self._plan:
            self._plan, self._entries, self._names = plan, plan.entries, plan.names
        for index, entry in enumerate(self._entries if given else ()):
            if entry.tensor < 0 or entry.size_bytes < _SMALLEST_BYTES:
                continue
            tensor, since = given.get(tensors[entry.tensor].data_ptr(), (None, 0))
            if tensor is None or not _are_one(tensor, tensors[entry.tensor]):
                continue
            mark = (since, None if tensor.is_inference() else tensor._version, entry.form)
            item = self._known.get(id(tensor))
            if item is None or item.tensor() is not tensor or item.mark != mark:
                item = _Known(weakref.ref(tensor), mark)
            self._now[index] = known[id(tensor)] = item
        self._known = known

    def _path(self, step: int) -> str:
        environment = self._environment
        return data_path(step, environment.run, self._name, environment.rank, environment.world_size)


class Referring:
    """Rank 0's part (I7): which steps the gang may refer to, and that retention keeps them meanwhile."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._newest: tuple[int, tuple[int, ...]] = (-1, ())  # the step that was decided on last, and its decision
        self._open: dict[int, tuple[int, ...]] = {}  # of steps that may refer to some, until their fate is known

    def choose(self, step: int, reports: Sequence[RankReport]) -> tuple[int, ...]:
        """The steps that the save of this one may refer to: committed ones alone, so that nothing hangs on what may be
        dropped. Saved again, it refers to what it did before: it is the same file.
        """
        referable = {other for report in reports for other in report.referable if other < step}
        for other in [other for other in self._open if other != step and self._writer.is_settled(other)]:
            del self._open[other]
        if step != self._newest[0]:
            self._newest = step, steps_to_refer_to(referable, self._writer.committed_among(referable))
        refers = self._newest[1]
        if refers:
            self._open[step] = refers
        while len(self._open) > _DECISIONS_KEPT:
            del self._open[min(self._open)]
        # Before the decision is known, and so before any step can be committed after which these would go.
        self._writer.keep_referable(sorted(referable.union(*self._open.values()))[-MAX_REFERABLE:])
        return refers


def checked_settlements(name: str, given: object) -> list[tuple[torch.Tensor, int]]:
    """What an object's `settled()` gave. Raises TypeError, naming the object."""
    found = []
    for pair in given if isinstance(given, Iterable) else (given,):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(f"{name}.settled() gives {type(pair).__name__} where pairs of a tensor and a number belong")
        tensor, since = pair
        if not isinstance(tensor, torch.Tensor) or not isinstance(since, int):
            kinds = f"{type(tensor).__name__} and {type(since).__name__}"
            raise TypeError(f"{name}.settled() gives a pair of {kinds} where a tensor and a number belong")
        found.append((tensor, since))
    return found


def _has_bytes(tensor: torch.Tensor) -> bool:
    """Whether it lies in memory as it is: what does not is never taken for another."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta and tensor.numel() > 0


def _are_one(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors that begin at one address are the same elements."""
    if (tensor.device, tensor.dtype, tensor.shape, tensor.stride()) != (
        other.device, other.dtype, other.shape, other.stride()
    ):  # fmt: skip
        return False
    return (tensor.is_conj(), tensor.is_neg()) == (other.is_conj(), other.is_neg())
