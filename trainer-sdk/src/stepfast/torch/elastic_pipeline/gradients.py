"""The gradients of a rank's layers: where they lie, their sum over the replicas, and what they say of each layer.

They lie side by side in buckets, which are summed over the ranks that hold the same layers as soon as the last
micro-batch's backward pass has filled them, while it goes on with the others: last layers first, always in one order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's


class Gradients:
    """Of the parameters of some layers, by layer in ascending order.

    group: of the ranks that hold the same layers; None: no other rank does.
    """

    def __init__(self, layers: Mapping[int, Sequence[nn.Parameter]], group: Any) -> None:
        self._group = group
        self._layers = {layer: list(parameters) for layer, parameters in layers.items()}
        self._buckets = [_Bucket(parameters) for parameters in _divided(self._layers)]
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call] # torch's
            for parameters in self._layers.values()
            for parameter in parameters
        ]
        self._used_here: set[int] = set()
        self._unused = set(self._bucket_of)  # as all replicas know it
        self._next = 0  # bucket to be summed
        self._works: list[Any] = []
        self._squares: dict[int, torch.Tensor] = {}
        self._steps = 0

    def close(self) -> None:
        """Lets the parameters go."""
        for hook in self._hooks:
            hook.remove()
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.grad = None

    def begin(self, passes: int) -> None:
        """Before the backward passes of a step: all are zero. `passes`: how many there will be of each layer."""
        self._next, self._works = 0, []
        for bucket in self._buckets:
            bucket.begin(passes)

    def finish(self) -> None:
        """After them: the sum over the replicas is there. Parameters that no replica has used so far have none."""
        for bucket in self._buckets:
            bucket.left = 0
        self._sum_ready()
        for work in self._works:
            work.wait()
        if self._unused:
            self._agree_on_unused()
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                if id(parameter) in self._unused:
                    parameter.grad = None

    def square_sum(self) -> torch.Tensor:
        """Of all of this rank's gradients: float64, one element."""
        norms = [torch.linalg.vector_norm(bucket.flat, dtype=torch.float64) for bucket in self._buckets]
        return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiplies all of them."""
        for bucket in self._buckets:
            bucket.flat.mul_(factor)

    def note_norms(self) -> None:
        """Adds this step's to what `mean_squares` tells."""
        self._steps += 1
        for layer, parameters in self._layers.items():
            norms = torch._foreach_norm([p.grad for p in parameters if p.grad is not None])
            square = torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)
            known = self._squares.get(layer)
            self._squares[layer] = square if known is None else known + square

    def noted(self) -> tuple[int, dict[int, torch.Tensor]]:
        """Steps, and the sum of squared norms for each layer, of what `mean_squares` would tell."""
        return self._steps, self._squares

    def take_up(self, steps: int, squares: Mapping[int, torch.Tensor]) -> None:
        """Goes on from what `noted` said."""
        self._steps, self._squares = steps, dict(squares) if steps else {}

    def mean_squares(self) -> dict[int, float]:
        """The mean over the noted steps of each layer's squared 2-norm; and forgets them."""
        found = {layer: float(square) / self._steps for layer, square in self._squares.items()}
        self._squares, self._steps = {}, 0
        return found

    def _note(self, parameter: nn.Parameter) -> None:
        self._used_here.add(id(parameter))
        self._bucket_of[id(parameter)].left -= 1
        self._sum_ready()

    def _sum_ready(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].left <= 0:
            if self._group is not None:
                flat = self._buckets[self._next].flat
                self._works.append(dist.all_reduce(flat, group=self._group, async_op=True))
            self._next += 1

    def _agree_on_unused(self) -> None:
        parameters = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        device = self._buckets[0].flat.device
        is_used = [id(p) in self._used_here or id(p) not in self._unused for p in parameters]
        used = torch.tensor(is_used, dtype=torch.uint8, device=device)
        if self._group is not None:
            dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._group)
        self._unused = {id(p) for p, is_used_somewhere in zip(parameters, used.tolist(), strict=True)
                        if not is_used_somewhere}  # fmt: skip


class _Bucket:
    """Parameters whose gradients are views into one tensor."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.left = 0  # gradients to come in this step
        first = parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        parts = torch.split(self.flat, [p.numel() for p in parameters])
        self._views = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]

    def begin(self, passes: int) -> None:
        self.left = passes * len(self.parameters)
        self.flat.zero_()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view


def _divided(layers: Mapping[int, Sequence[nn.Parameter]]) -> list[list[nn.Parameter]]:
    """Parameters by bucket, of one dtype each, the last first."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameters in reversed(list(layers.values())):
        for parameter in reversed(parameters):
            is_other = bool(buckets) and buckets[-1][0].dtype != parameter.dtype
            if not buckets or is_other or size >= BUCKET_BYTES:
                buckets.append([])
                size = 0
            buckets[-1].append(parameter)
            size += parameter.nbytes
    return buckets
