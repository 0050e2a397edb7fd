"""Puts what a recorder saw of a real run and what the allocator did together into a timeline.

The allocator's history is the truth: what was taken, when, how much. The recorder knows what for: a block that it saw
at an address is the last that was taken there before. What it did not see is a kernel's own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence, Set
from heapq import merge

from torch.utils._pytree import tree_unflatten

from stepfast.torch.anatomy.assembly import Assembled
from stepfast.torch.anatomy.history import MemoryChange
from stepfast.torch.anatomy.recorder import Adopt, Call, Recorder, Sightings
from stepfast.torch.anatomy.timeline import Block, Change, Component, Phase, Timeline

_NUMBER_BYTES = 8


def observe(recorder: Recorder, sightings: Sightings, history: Sequence[MemoryChange]) -> Assembled:
    """The timeline of a recorded run. Calls come with the seconds that they took."""
    seconds = [(end - begin) / 1e9 for begin, end in sightings.calls]
    calls = list(zip(recorder.calls, seconds, strict=True))
    return Assembled(_Observation(recorder, sightings, history).timeline(), calls)


class _Observation:
    def __init__(self, recorder: Recorder, sightings: Sightings, history: Sequence[MemoryChange]) -> None:
        self._recorder, self._sightings, self._history = recorder, sightings, history
        self._blocks = list(recorder.blocks)
        self._changes: list[Change] = []
        self._living: dict[int, int] = {}  # blocks by address
        self._copies = [_numbers(call) for call in recorder.calls]  # still to come, see `_is_copy`
        self._starts = [since for since, _, _ in sightings.phases]
        self._call_starts = [begin for begin, _ in sightings.calls]

    def timeline(self) -> Timeline:
        births = self._births()
        known = set(births.values())
        begin = self._starts[0] if self._starts else 0
        adopted: set[int] = set()
        for entry in self._recorder.log:
            if isinstance(entry, Adopt) and entry.block not in known:  # it was there before the history began
                self._living[self._sightings.blocks[entry.block][0]] = entry.block
                adopted.add(entry.block)
                self._change(entry.block, True, begin, begin)
        for index, change in self._with_ends_of(adopted):
            old = self._living.pop(change.address, None)
            if old is not None:
                self._end(old, change.time_ns, begin)
            if change.size_bytes > 0 and not (index not in births and self._is_copy(change)):
                block = births[index] if index in births else self._unseen(change)
                self._blocks[block].size_bytes = change.size_bytes
                self._living[change.address] = block
                self._change(block, True, change.time_ns, begin)
        return Timeline(blocks=self._blocks, changes=self._changes)

    def _with_ends_of(self, adopted: Set[int]) -> Iterator[tuple[int, MemoryChange]]:
        """The history by index, and among it, in the order of time, the ends of what was there before: the CPU's
        profiler does not tell them.
        """
        ends = [
            (-1, MemoryChange(time_ns, self._sightings.blocks[block][0], -1))
            for block, time_ns in self._sightings.ends
            if block in adopted
        ]
        return merge(enumerate(self._history), ends, key=lambda each: each[1].time_ns)

    def _births(self) -> dict[int, int]:
        """The block that each taking of memory was for, by the taking's place in the history."""
        at_address: dict[int, list[int]] = {}
        for index, change in enumerate(self._history):
            if change.size_bytes > 0:
                at_address.setdefault(change.address, []).append(index)
        births: dict[int, int] = {}
        for block, (address, seen) in enumerate(self._sightings.blocks):
            taken = at_address.get(address, [])
            last = bisect_right(taken, seen, key=lambda index: self._history[index].time_ns) - 1
            if last >= 0:
                births.setdefault(taken[last], block)
        return births

    def _end(self, block: int, time_ns: int, begin: int) -> None:
        born = self._blocks[block]
        is_unseen = block >= len(self._recorder.blocks)
        if is_unseen and born.phase is Phase.FORWARD and self._phase(time_ns) != (Phase.FORWARD, born.step):
            born.component = Component.ACTIVATIONS  # a number that a product keeps for its backward pass
        self._change(block, False, time_ns, begin)

    def _is_copy(self, change: MemoryChange) -> bool:
        """A number in a tensor's place becomes a tensor of its own where torch is called, and again where the recorder
        hands the call on: that second one is the recorder's, not the step's."""
        at = self._call(change.time_ns)
        if at is None or change.size_bytes != _NUMBER_BYTES or not self._copies[at]:
            return False
        self._copies[at] -= 1
        return True

    def _call(self, time_ns: int) -> int | None:
        at = bisect_right(self._call_starts, time_ns) - 1
        return at if at >= 0 and time_ns <= self._sightings.calls[at][1] else None

    def _unseen(self, change: MemoryChange) -> int:
        at = self._call(change.time_ns)
        if at is None:  # what is between two calls is made for the next one
            at = bisect_right(self._call_starts, change.time_ns)
        call: Call | None = self._recorder.calls[at] if at < len(self._recorder.calls) else None
        phase, step = self._phase(change.time_ns)
        module, operator = ("", "") if call is None else (call.module, f"{call.signature.operator.name()} (workspace)")
        self._blocks.append(Block(change.size_bytes, Component.TEMPORARY, module, operator, phase, step))
        return len(self._blocks) - 1

    def _phase(self, time_ns: int) -> tuple[Phase, int]:
        at = bisect_right(self._starts, time_ns) - 1
        return (Phase.SETUP, 0) if at < 0 else self._sightings.phases[at][1:]

    def _change(self, block: int, is_birth: bool, time_ns: int, begin: int) -> None:
        phase, step = self._phase(time_ns)
        self._changes.append(Change(block, is_birth, phase, step, max(0, time_ns - begin) / 1e9))


def _numbers(call: Call) -> int:
    """Arguments of a call that are numbers where its operation takes tensors."""
    args, kwargs = tree_unflatten(list(call.signature.leaves), call.signature.spec)
    parameters = call.signature.operator._schema.arguments
    given = [*zip(parameters, args, strict=False), *((each, kwargs.get(each.name)) for each in parameters)]
    return sum(isinstance(value, int | float) and str(parameter.type) == "Tensor" for parameter, value in given)
