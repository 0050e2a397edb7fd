"""The process groups of a gang: a static one for messages, and those of a shape, which are made anew with it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from stepfast.torch.elastic_pipeline.shape import Shape


class ShapeGroups:
    """Of one rank in one shape: its replica's, for the pipeline; that of its layers' ranks, for gradients.

    None where the rank is alone in it, or rests. Every rank of the gang makes one at the same time: torch names groups
    by how many a rank has seen made, so that all of them have to see all of them.
    """

    def __init__(self, shape: Shape, rank: int) -> None:
        replicas = [_group(shape.ranks_of_replica(replica)) for replica in range(shape.replicas)]
        devices = [_group(shape.ranks_of_device(device)) for device in range(shape.length)]
        place = shape.place(rank)
        self.replica = None if place is None else replicas[place.replica]
        self.device = None if place is None else devices[place.device]

    def close(self) -> None:
        """Ends them."""
        for group in (self.replica, self.device):
            if group is not None:
                dist.destroy_process_group(group)


class Messages:
    """All ranks, over gloo: small things that the whole gang has to know."""

    def __init__(self) -> None:
        self.group: Any = dist.new_group(backend="gloo")
        self._counts: Counter[str] = Counter()

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return dist.get_world_size(self.group)

    def count(self, topic: str) -> int:
        """How often all ranks together have asked so, where all ask alike: at least, this rank's turn included."""
        self._counts[topic] += 1
        return (self._counts[topic] - 1) * self.world_size + 1

    def exchange(self, topic: str, text: str) -> list[str]:
        """What each rank says, by rank; the topics of all are the same in the same order."""
        return self.all(text)

    def sum(self, values: list[float]) -> list[float]:
        """The sums over all ranks, in float64."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.group)
        return tensor.tolist()

    def largest(self, values: list[float]) -> list[float]:
        """The largest of all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor.tolist()

    def all(self, value: Any) -> list[Any]:
        """Every rank's, by rank."""
        said: list[Any] = [None] * self.world_size
        dist.all_gather_object(said, value, group=self.group)
        return said

    def from_first(self, value: Any) -> Any:
        """Rank 0's."""
        said = [value]
        dist.broadcast_object_list(said, src=0, group=self.group)
        return said[0]


def _group(ranks: range) -> Any:
    return dist.new_group(list(ranks)) if len(ranks) > 1 else None
