"""What lives in a device's memory, from its allocation to its end, in the order of events. Pure: no torch, no clock.

A prediction and a measurement are both such a timeline; reports, the allocator's simulation and comparisons read
nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Component(StrEnum):
    """What a block of memory is for.

    The first five and `context` are those of Hugging Face's "Model training anatomy" (weights, optimizer states,
    gradients, forward activations, temporary buffers); the others are what else a training step holds.
    """

    WEIGHTS = "weights"  # parameters, and autocast's copies of them in lower precision
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"  # made by a forward pass (or its recomputation) and kept for the backward pass
    TEMPORARY = "temporary"  # freed within the pass that made it; kernels' workspaces
    BUFFERS = "buffers"  # the modules' own, such as running means
    INPUTS = "inputs"  # the batch
    COMMUNICATION = "communication"  # buckets of DDP, unsharded parameters and what collectives read and write
    CONTEXT = "context"  # CUDA's own: kernels, libraries' handles; outside of the allocator


class Phase(StrEnum):
    """Which part of a training step the process is in."""

    SETUP = "setup"  # model, optimizer and batch are made
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"  # clipping, the optimizer's step, zero_grad


@dataclass(slots=True)
class Block:
    """One allocation. `module` is the dotted name of the module that asked for it ("" for none)."""

    size_bytes: int
    component: Component
    module: str
    operator: str  # as `aten.mm`
    phase: Phase
    step: int  # 0 for setup, then 1, 2, …


@dataclass(frozen=True, slots=True)
class Change:
    """A block begins (`is_birth`) or ends to be, in `phase` of `step`, `seconds` after the beginning."""

    block: int
    is_birth: bool
    phase: Phase
    step: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The memory at one point of a timeline, behind `change` (an index; -1 before all of them)."""

    change: int
    total_bytes: int
    components: Mapping[Component, int]
    live: frozenset[int]  # blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Blocks, and the changes that make and end them, in order."""

    blocks: Sequence[Block]
    changes: Sequence[Change]

    def totals(self) -> Iterator[int]:
        """Bytes allocated behind each change."""
        total = 0
        for change in self.changes:
            size = self.blocks[change.block].size_bytes
            total += size if change.is_birth else -size
            yield total

    def peak(self, *, since_step: int = 0) -> Moment:
        """The first moment at which most is allocated, from `since_step` on."""
        best, at = -1, -1
        for index, total in enumerate(self.totals()):
            if total > best and self.changes[index].step >= since_step:
                best, at = total, index
        return self.moment(at)

    def component_peaks(self) -> dict[Component, int]:
        """The most bytes of each component, each at a moment of its own."""
        held, most = dict.fromkeys(Component, 0), dict.fromkeys(Component, 0)
        for change in self.changes:
            block = self.blocks[change.block]
            held[block.component] += block.size_bytes if change.is_birth else -block.size_bytes
            most[block.component] = max(most[block.component], held[block.component])
        return most

    def steady(self) -> Moment:
        """Between two steps: what is left behind the last one."""
        return self.moment(len(self.changes) - 1)

    def moment(self, change: int) -> Moment:
        """The memory behind the change with that index."""
        live: set[int] = set()
        for each in self.changes[: change + 1]:
            if each.is_birth:
                live.add(each.block)
            else:
                live.discard(each.block)
        components = dict.fromkeys(Component, 0)
        for block in live:
            components[self.blocks[block].component] += self.blocks[block].size_bytes
        return Moment(change=change, total_bytes=sum(components.values()), components=components, live=frozenset(live))
