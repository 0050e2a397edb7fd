"""How a gang trains a model at a moment: what is frozen, a pipeline's stages, and whose rank each of them is. Pure.

Every replica of the pipeline has a block of neighbouring ranks to itself, so that it lies within a node. A pipeline
that is packed into half of its ranks leaves the other half to a replica, and both hold what the former held already;
where no replica may be added, they rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Of a rank: which replica of the pipeline it belongs to, and which of its devices it is, each from 0."""

    replica: int
    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """`world_size` ranks as `replicas` of a pipeline of `length` devices, behind a frozen prefix of the model."""

    world_size: int
    replicas: int
    frozen: int  # layers, from the first
    length: int
    stages: tuple[range, ...]  # active layers; `length` of them, or a multiple, which the devices take in turns

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.world_size % self.replicas:
            raise ValueError(f"{self.world_size} ranks cannot be divided among {self.replicas} replicas")
        if not 1 <= self.length <= self.block:
            raise ValueError(f"a pipeline of {self.length} devices does not fit into {self.block} ranks")
        if not self.stages or len(self.stages) % self.length:
            raise ValueError(f"{len(self.stages)} stages cannot be dealt to {self.length} devices")
        begin = self.frozen
        for stage in self.stages:
            if stage.start != begin or not stage:
                raise ValueError(
                    f"the stages {list(self.stages)} are not one behind the other from layer {self.frozen}"
                )
            begin = stage.stop

    @property
    def layers(self) -> int:
        return self.stages[-1].stop

    @property
    def block(self) -> int:
        """Ranks of each replica; those beyond `length` rest."""
        return self.world_size // self.replicas

    def place(self, rank: int) -> Place | None:
        """None: the rank rests."""
        replica, device = divmod(rank, self.block)
        return Place(replica=replica, device=device) if device < self.length else None

    def ranks_of_replica(self, replica: int) -> range:
        return range(replica * self.block, replica * self.block + self.length)

    def ranks_of_device(self, device: int) -> range:
        """The ranks that hold the same stages, one of each replica: gradients are summed over them."""
        return range(device, self.world_size, self.block)

    def device_of(self, layer: int) -> int:
        """Which device of its replica holds the layer: the first, if it is frozen."""
        if layer < self.frozen:
            return 0
        return next(number for number, stage in enumerate(self.stages) if layer in stage) % self.length

    def stages_of(self, rank: int) -> range:
        """The numbers of a rank's stages."""
        place = self.place(rank)
        return range(0) if place is None else range(place.device, len(self.stages), self.length)

    def active_of(self, rank: int) -> frozenset[int]:
        """The layers that a rank trains."""
        return frozenset(layer for stage in self.stages_of(rank) for layer in self.stages[stage])

    def held_by(self, rank: int) -> frozenset[int]:
        """The layers whose weights a rank holds: those that it trains, and the frozen ones where a pipeline begins."""
        place = self.place(rank)
        is_first = place is not None and place.device == 0
        return self.active_of(rank).union(range(self.frozen)) if is_first else self.active_of(rank)

    def optimized_by(self, rank: int) -> frozenset[int]:
        """The layers whose optimizer state a rank holds: those that it trains; rank 0 keeps the frozen ones' too."""
        return self.active_of(rank).union(range(self.frozen)) if rank == 0 else self.active_of(rank)

    def owners(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """For each layer the rank that saves it, of those that hold all of it: as many bytes each as can be.

        `sizes`: of the layers, in bytes. Frozen ones are rank 0's.
        """
        loads = [0] * self.world_size
        found = [0] * self.layers
        for layer in range(self.frozen, self.layers):
            ranks = self.ranks_of_device(self.device_of(layer))
            found[layer] = min(ranks, key=lambda rank: (loads[rank], rank))
            loads[found[layer]] += sizes[layer]
        return tuple(found)

    def to_document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "worldSize": self.world_size, "replicas": self.replicas, "frozen": self.frozen, "length": self.length,
            "stages": [[stage.start, stage.stop] for stage in self.stages],
        }  # fmt: skip

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Shape:
        """Raises ValueError for one that no shape has; KeyError, TypeError for what `to_document` did not give."""
        return cls(
            world_size=document["worldSize"], replicas=document["replicas"], frozen=document["frozen"],
            length=document["length"], stages=tuple(range(begin, end) for begin, end in document["stages"]),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Something of a layer, from a rank that has it to one that will."""

    layer: int
    source: int
    target: int


Held = Callable[[int], Collection[int]]  # the layers of which a rank has it


def moves(before: Shape, has: Held, after: Shape, wants: Held) -> list[Move]:
    """What has to travel when one shape becomes another; equal on all ranks, in the order of layers and targets.

    It comes from a rank of the target's own block where one has it, whose node is the target's as a rule, else from
    the first rank that has it.

    Raises:
        ValueError: the shapes are of different models or gangs.
    """
    if (before.world_size, before.layers) != (after.world_size, after.layers):
        raise ValueError("the shapes are not of one model and one gang")
    owners: dict[int, list[int]] = {}
    for rank in range(before.world_size):
        for layer in has(rank):
            owners.setdefault(layer, []).append(rank)
    found = []
    for target in range(after.world_size):
        block = target // before.block
        for layer in set(wants(target)) - set(has(target)):
            source = next((rank for rank in owners[layer] if rank // before.block == block), owners[layer][0])
            found.append(Move(layer=layer, source=source, target=target))
    return sorted(found, key=lambda move: (move.layer, move.target))
