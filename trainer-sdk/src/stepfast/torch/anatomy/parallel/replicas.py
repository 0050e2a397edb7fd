"""DistributedDataParallel's memory on one rank: buckets for gradients, beside the gradients or in their place.

Its reducer is written in C++ and reads tensors' contents, so it cannot run on fake ones: what it does to memory is done
here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from stepfast.torch.anatomy.timeline import Component
from stepfast.torch.anatomy.training import Holding, Loop, PlainTrainee

_FIRST_BUCKET_BYTES = 1 << 20  # smaller than the others, so that the first reduction starts early


class ReplicatedTrainee(PlainTrainee):
    """Each rank has the whole model. Gradients are copied into buckets as they come, reduced, and copied back."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        loop: Loop,
        *,
        bucket_megabytes: int,
        gradients_in_buckets: bool,
    ) -> None:
        super().__init__(module, optimizer, loop)
        self._in_buckets = gradients_in_buckets
        trained: list[torch.Tensor] = [each for each in module.parameters() if each.requires_grad]
        # The last parameters come first: their gradients do.
        order = trained[::-1]
        limits = [_FIRST_BUCKET_BYTES, bucket_megabytes << 20]
        groups, _ = torch._C._distributed_c10d._compute_bucket_assignment_by_size(order, limits, [False] * len(order))
        self._buckets: list[torch.Tensor] = []
        self._places: dict[torch.Tensor, torch.Tensor] = {}
        for group in groups:
            members = [order[index] for index in group]
            bucket = torch.empty(sum(each.numel() for each in members), dtype=members[0].dtype)
            self._buckets.append(bucket)
            offset = 0
            for each in members:
                self._places[each] = bucket[offset : offset + each.numel()].view_as(each)
                offset += each.numel()
                each.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, parameter: torch.Tensor) -> None:
        place = self._places[parameter]
        assert parameter.grad is not None
        if parameter.grad.untyped_storage() is not place.untyped_storage():
            place.copy_(parameter.grad)
            if self._in_buckets:
                parameter.grad = place

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        for bucket in self._buckets:
            dist.all_reduce(bucket)
        if not self._in_buckets:
            for parameter, place in self._places.items():
                if parameter.grad is not None:
                    parameter.grad.copy_(place)

    def holdings(self) -> Iterator[Holding]:
        yield Holding(Component.GRADIENTS if self._in_buckets else Component.COMMUNICATION, self._buckets)
        yield from super().holdings()
