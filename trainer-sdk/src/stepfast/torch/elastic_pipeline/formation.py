"""A rank's part in a shape: the groups that it is in, its share of a replica of the model, its gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from stepfast.torch.elastic_pipeline.gradients import Gradients
from stepfast.torch.elastic_pipeline.groups import ShapeGroups
from stepfast.torch.elastic_pipeline.microbatches import Schedule
from stepfast.torch.elastic_pipeline.replica import Loss, Replica
from stepfast.torch.elastic_pipeline.residence import Residence
from stepfast.torch.elastic_pipeline.shape import Shape
from stepfast.torch.rng import rng_state_kept


class Formation:
    """Made for each shape that is taken, and closed when it is left; every rank does both alike."""

    def __init__(self, residence: Residence, shape: Shape, loss: Loss, schedule: Schedule, *, rank: int) -> None:
        self._residence, self._shape, self._rank = residence, shape, rank
        self._groups = ShapeGroups(shape, rank)
        self.replica: Replica | None = None
        """None: the rank rests."""
        if shape.place(rank) is not None:
            self.replica = Replica(
                residence.layers, shape, loss, rank=rank, device=residence.device, group=self._groups.replica,
                schedule=schedule,
            )  # fmt: skip
        trained = {layer: list(residence.trained(layer).values()) for layer in sorted(shape.active_of(rank))}
        self.gradients = Gradients(trained, self._groups.device)

    @property
    def is_first(self) -> bool:
        """Whether this rank needs the input."""
        return self.replica is not None and self.replica.is_first

    @property
    def is_last(self) -> bool:
        """Whether this rank needs the target."""
        return self.replica is not None and self.replica.is_last

    def close(self) -> None:
        self.gradients.close()
        self._groups.close()

    def attempt(self, passes: Callable[[], object], micro_batches: int) -> None:
        """The passes of a step, which leave no trace."""
        buffers = [buffer for layer in self._residence.held for buffer in self._residence.buffers(layer)]
        before = [buffer.clone() for buffer in buffers]
        with rng_state_kept():
            self.gradients.begin(micro_batches)
            passes()
            self.gradients.finish()
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)

    def clip_gradients(self, limit: float) -> None:
        """Scales all gradients of the model to that 2-norm where theirs is larger."""
        square = self.gradients.square_sum().to(self._residence.device)
        if self._groups.replica is not None:
            dist.all_reduce(square, group=self._groups.replica)
        self.gradients.scale(float(torch.clamp(limit / (square.sqrt() + 1e-6), max=1.0)))

    def share_buffers(self) -> None:
        """Replicas go on with the first one's running statistics, as DistributedDataParallel's do."""
        if self._groups.device is None:
            return
        source = self._shape.ranks_of_device(self._rank % self._shape.block)[0]
        for layer in sorted(self._shape.active_of(self._rank)):
            for buffer in self._residence.buffers(layer):
                if buffer.is_floating_point():
                    dist.broadcast(buffer, src=source, group=self._groups.device)
