"""How a gang trains a model at a moment: what is frozen, the stages of a pipeline, and whose rank each of them is. Pure.

The ranks of a pipeline are neighbours, so that it lies within a node; a pipeline that is packed into half of its ranks
leaves the other half to a replica, and both hold what the former pipeline held already.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Of a rank: which replica of the pipeline it belongs to, and which of its devices it is, each from 0."""

    replica: int
    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """`world_size` ranks as replicas of a pipeline of `length` devices, behind a frozen prefix of the model."""

    world_size: int
    frozen: int  # layers, from the first
    length: int
    stages: tuple[range, ...]  # active layers; `length` of them, or a multiple, which the devices take in turns

    def __post_init__(self) -> None:
        if self.world_size % self.length:
            raise ValueError(f"{self.world_size} ranks are no whole number of pipelines of {self.length}")
        if not self.stages or len(self.stages) % self.length:
            raise ValueError(f"{len(self.stages)} stages cannot be dealt to {self.length} devices")
        begin = self.frozen
        for stage in self.stages:
            if stage.start != begin or not stage:
                raise ValueError(f"the stages {list(self.stages)} are not one behind the other from layer {self.frozen}")
            begin = stage.stop

    @property
    def layers(self) -> int:
        return self.stages[-1].stop

    @property
    def replicas(self) -> int:
        return self.world_size // self.length

    def place(self, rank: int) -> Place:
        replica, device = divmod(rank, self.length)
        return Place(replica=replica, device=device)

    def ranks_of_replica(self, replica: int) -> range:
        return range(replica * self.length, (replica + 1) * self.length)

    def ranks_of_device(self, device: int) -> range:
        """The ranks that hold the same stages, one of each replica: gradients are summed over them."""
        return range(device, self.world_size, self.length)

    def stages_of(self, rank: int) -> range:
        """The numbers of a rank's stages."""
        return range(rank % self.length, len(self.stages), self.length)

    def held_by(self, rank: int) -> frozenset[int]:
        """The layers whose state a rank holds: its stages', and the frozen prefix where a pipeline begins."""
        held = {layer for stage in self.stages_of(rank) for layer in self.stages[stage]}
        return frozenset(held.union(range(self.frozen)) if rank % self.length == 0 else held)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A layer's state, from a rank that holds it to one that will."""

    layer: int
    source: int
    target: int


def moves(before: Shape, after: Shape) -> list[Move]:
    """What has to travel when one shape becomes another; equal on all ranks, in the order of layers and targets.

    A layer comes from a rank of the target's own former pipeline, whose node is the target's as a rule.

    Raises:
        ValueError: the shapes are of different models or gangs.
    """
    if (before.world_size, before.layers) != (after.world_size, after.layers):
        raise ValueError("the shapes are not of one model and one gang")
    found = []
    for target in range(after.world_size):
        former = {layer: rank for rank in before.ranks_of_replica(before.place(target).replica)
                  for layer in before.held_by(rank)}  # fmt: skip
        wanted = after.held_by(target) - before.held_by(target)
        found += [Move(layer=layer, source=former[layer], target=target) for layer in wanted]
    return sorted(found, key=lambda move: (move.layer, move.target))
