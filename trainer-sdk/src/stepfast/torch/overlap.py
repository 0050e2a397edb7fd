"""Copies out of an accelerator that go on while training does: which may, that none is torn, when a step is complete.

Two kinds of tensors. Those that an optimizer of this checkpointer changes, in its step and nowhere else, are copied
beside the next forward and backward pass; a hook holds that step, on the device, until they are. All others a forward
pass may change: the device copies them first.

Never torn: what is copied late has the version that it had at the save when the hook runs, or, if none ran, when the
copy is done. If not, the step is given up, with an error, and from then on every save waits for its copies. Versions
are torch's own count of in-place changes; what is written past it (`tensor.data`, foreign kernels outside a step) it
does not count. An optimizer whose step was not seen since the save before (its hooks do not run: a replayed CUDA graph)
has nothing copied late.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch

from stepfast.torch.devicecopy import DeviceCopy, Pending
from stepfast.torch.dtypes import PLAIN_TENSORS
from stepfast.torch.plan import SavePlan
from stepfast.torch.sharing import span
from stepfast.torch.staging import MappedSlot

log = logging.getLogger("stepfast")

_version, _shape = attrgetter("_version"), attrgetter("shape")
_pointer, _stride = torch.Tensor.data_ptr, torch.Tensor.stride


class Copying:
    """One step's copies, on their way into one slot."""

    def __init__(
        self, step: int, slot: int, *, is_due: bool, pending: Pending, sources: Sequence[torch.Tensor],
        watch: Watch, names: Sequence[str],
    ) -> None:  # fmt: skip
        self.step, self.slot, self.is_due = step, slot, is_due
        self._pending = pending
        self._sources = sources  # held: their memory must not be given to others before it is read
        self._watch = watch
        self._names = names
        self._settled = threading.Lock()
        self._is_settled = False
        self.changed: str | None = None  # the name of a source that was changed too early

    def gate(self) -> None:
        """Before an optimizer's step: what changed so far changed too early; the step itself waits for the copies."""
        self._settle()
        self._pending.gate()

    def wait(self) -> None:
        """Until the bytes are there. Raises RuntimeError when a copy failed."""
        self._pending.wait()
        self._settle()

    def _settle(self) -> None:
        with self._settled:
            if not self._is_settled:
                self._is_settled = True
                changed = self._watch.changed()
                self.changed = self._names[changed] if changed is not None else None


class Overlap:
    """This rank's copies under way, oldest first, and the thread that sees them through."""

    def __init__(self, device: DeviceCopy | None, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._device, self._optimizers = device, optimizers
        self._hooks: list[Any] = []  # torch.utils.hooks.RemovableHandle
        self._stepped: set[int] = set()
        self._captured: set[int] = set()
        self._deferral: Deferral | None = None
        self._open: list[Copying] = []
        self._changed = threading.Condition()
        self._jobs: queue.SimpleQueue[tuple[Copying, Callable[[str | None], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self.is_off = device is None

    def takes(self, sources: Sequence[torch.Tensor]) -> bool:
        """Whether copies of these go on while training does."""
        device = self._device
        return not self.is_off and device is not None and device.is_in_use() and any(map(device.holds, sources))

    # ------------------------------------------------------------ under way

    @property
    def steps(self) -> dict[int, bool]:
        """The steps whose copies are under way, and whether each is due to be persisted."""
        return {copying.step: copying.is_due for copying in list(self._open)}

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots that are copied into."""
        return tuple(copying.slot for copying in list(self._open))

    def drain(self, *, keep: int = 0, timeout_seconds: float | None = None) -> bool:
        """Until no more than `keep` copies are under way; False when that took too long."""
        if not self._open or os.getpid() != self._pid:  # a forked child has no thread that would see them through
            return True
        with self._changed:
            return self._changed.wait_for(lambda: len(self._open) <= keep, timeout_seconds)

    def wait(self, step: int, timeout_seconds: float | None) -> bool:
        """Until the step's copies are complete, or given up; False when that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: step not in self.steps, timeout_seconds)

    def close(self, timeout_seconds: float) -> None:
        """Sees through what is under way, and lets go of the optimizers."""
        if not self.drain(timeout_seconds=timeout_seconds):
            log.error("stepfast: steps %s were still being copied: they are not staged", list(self.steps))
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._thread is not None:
            self._jobs.put(None)

    # ------------------------------------------------------------ one copy

    def plan(self, sources: Sequence[torch.Tensor]) -> tuple[Sequence[bool], Watch]:
        """Which of the sources may be copied late, and how they are now."""
        if not self._hooks:
            self._hooks = [optimizer.register_step_pre_hook(self._before_step) for optimizer in self._optimizers]
        stepped, self._stepped = self._stepped, set()
        seen = [o for o in self._optimizers if id(o) in stepped and id(o) not in self._captured]
        changing = [tensor for optimizer in seen for tensor in _tensors_of(optimizer)]
        if self._deferral is None or not self._deferral.is_still(sources, changing):
            self._deferral = Deferral(sources, changing)
        return self._deferral.is_deferrable, self._deferral.watch(sources, changing)

    def begin(
        self, slot: MappedSlot, plan: SavePlan, header_tail: bytes, sources: Sequence[torch.Tensor],
        deferrable: Sequence[bool],
    ) -> Pending | None:  # fmt: skip
        """Begins the copies into the slot; None: all is there."""
        if self._device is None:
            raise AssertionError("there is no device to copy from")
        return slot.begin(plan, header_tail, sources, self._device, deferrable)

    def follow(self, copying: Copying, finish: Callable[[str | None], None]) -> None:
        """Calls `finish` from a thread once the copies are complete, with why not when they are no good."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="stepfast-staging", daemon=True)
            self._thread.start()
        with self._changed:
            self._open.append(copying)
        self._jobs.put((copying, finish))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            copying, finish = job
            try:
                finish(self._complete(copying))
            except Exception:
                log.exception("stepfast: step %s is not staged", copying.step)
            with self._changed:
                self._open.remove(copying)
                self._changed.notify_all()
            del job, copying, finish  # with what they hold of the device's memory

    def _complete(self, copying: Copying) -> str | None:
        try:
            copying.wait()
        except RuntimeError as error:
            self.is_off = True
            log.exception("stepfast: a copy from the device failed")
            return f"a copy from the device failed: {error}"
        if copying.changed is None:
            return None
        self.is_off = True
        return f"{copying.changed} was changed outside its optimizer's step while it was copied"

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        device = self._device
        if device is not None and device.is_capturing():
            # What is recorded now changes tensors later, each time without a word.
            self._captured.add(id(optimizer))
            self.drain()
            return
        self._stepped.add(id(optimizer))
        for copying in list(self._open):
            copying.gate()


class Deferral:
    """Which sources may be copied late: those within the memory of tensors that optimizers change.

    Found once and used again while the same tensors lie at the same places: a save looks at lists alone. Holds none of
    them: an optimizer that loads a state would have its old one beside the new.
    """

    def __init__(self, sources: Sequence[torch.Tensor], changing: Sequence[torch.Tensor]) -> None:
        self._key = _key(sources, changing)
        self._changing = list(map(weakref.ref, changing))
        ends = sorted((*span(tensor), place) for place, tensor in enumerate(changing) if _is_watchable(tensor))
        begins = [begin for begin, _, _ in ends]
        self.is_deferrable = [False] * len(sources)
        self._late: list[int] = []
        self._owners: list[int] = []
        for index, source in enumerate(sources):
            if not _is_watchable(source, dense=False):
                continue
            begin, end = span(source)
            place = bisect_right(begins, begin) - 1
            if place >= 0 and end <= ends[place][1]:
                self.is_deferrable[index] = True
                self._late.append(index)
                self._owners.append(ends[place][2])

    def is_still(self, sources: Sequence[torch.Tensor], changing: Sequence[torch.Tensor]) -> bool:
        """Whether it holds for these too."""
        known = [ref() for ref in self._changing]
        is_same = len(known) == len(changing) and all(map(is_, known, changing))
        return is_same and self._key == _key(sources, changing)

    def watch(self, sources: Sequence[torch.Tensor], changing: Sequence[torch.Tensor]) -> Watch:
        """What is copied late of these, as it is now. Owners too: an alias made by `.data` has a count of its own."""
        late = [*map(sources.__getitem__, self._late), *map(changing.__getitem__, self._owners)]
        return Watch(indexes=self._late * 2, tensors=late, versions=list(map(_version, late)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Tensors, each with the index of the source that it is about and its version at the save."""

    indexes: Sequence[int]
    tensors: Sequence[torch.Tensor]
    versions: Sequence[int]

    def changed(self) -> int | None:
        """The index of one that is not as it was."""
        now = list(map(_version, self.tensors))
        if now == self.versions:
            return None
        pairs = zip(self.indexes, now, self.versions, strict=True)
        return next(index for index, version, was in pairs if version != was)


def _key(sources: Sequence[torch.Tensor], changing: Sequence[torch.Tensor]) -> list[list[object]]:
    both = [*sources, *changing]
    return [list(map(_pointer, both)), list(map(_stride, both)), list(map(_shape, both))]


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from (value for value in group["params"] if _is_known(value))
    for state in optimizer.state.values():
        yield from (value for value in state.values() if _is_known(value))


def _is_known(value: object) -> bool:
    return isinstance(value, torch.Tensor) and type(value) in PLAIN_TENSORS and value.layout is torch.strided


def _is_watchable(tensor: torch.Tensor, *, dense: bool = True) -> bool:
    if tensor.is_inference():
        return False
    begin, end = span(tensor)
    return tensor.numel() > 0 and (not dense or end - begin == tensor.numel() * tensor.element_size())


__all__ = ["Copying", "Deferral", "Overlap", "Watch"]
