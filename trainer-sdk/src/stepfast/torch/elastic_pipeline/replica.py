"""One rank's work in one replica of the pipeline: the forward and backward passes of a batch, in micro-batches.

A pipeline of one device needs no pipelining: the passes follow each other. For longer ones there are the schedules of
torch.distributed.pipelining. Frozen layers run at the head of the first stage, without gradients, and overlap with the
other stages so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from stepfast.torch.elastic_pipeline.layers import Layer
from stepfast.torch.elastic_pipeline.microbatches import Schedule, micro_batch_counts
from stepfast.torch.elastic_pipeline.shape import Shape
from stepfast.torch.elastic_pipeline.values import Value, mapped, parts

Loss = Callable[[Any, Any], torch.Tensor]  # (output, target) → the mean over the samples


class Replica:
    """This rank's stages in its replica, for one shape; a rank that rests has none of it."""

    def __init__(
        self, layers: Sequence[Layer], shape: Shape, loss: Loss, *, rank: int, device: torch.device, group: Any,
        schedule: Schedule,
    ) -> None:  # fmt: skip
        if shape.length > 1 and "arg_mbs" not in inspect.signature(ScheduleGPipe.step).parameters:
            raise RuntimeError(
                f"torch {torch.__version__} divides batches into micro-batches itself: a pipeline of more than one "
                "device needs a newer one"
            )
        place = shape.place(rank)
        assert place is not None
        self._shape, self._loss, self._device, self._group, self._kind = shape, loss, device, group, schedule
        self._place = place
        self._numbers = list(shape.stages_of(rank))
        self._modules = [
            _Stage([layers[i].module for i in ([*range(shape.frozen)] if number == 0 else [])],
                   [layers[i].module for i in shape.stages[number]])
            for number in self._numbers
        ]  # fmt: skip
        self._headless = [_Stage([], [layers[i].module for i in shape.stages[0]]), *self._modules[1:]]
        # A schedule knows what its tensors look like: there is one for each look of a micro-batch, and number of them.
        self._schedules: dict[Any, Any] = {}
        self._weight = 0.0
        self._losses: list[torch.Tensor] = []

    @property
    def is_first(self) -> bool:
        """Whether this rank needs the input."""
        return self._place.device == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank needs the target, and has the loss and the output."""
        return self._place.device == self._shape.length - 1

    def forward_backward(
        self, batch: Value | None, target: Value | None, samples: int, micro_batches: int, *, weight: float,
        is_cached: bool,
    ) -> torch.Tensor | None:  # fmt: skip
        """The gradients of the batch's mean loss times `weight`, added to what is there; the last device's sum of it.

        batch: on the first device; target: on the last one. samples: how many there are.
        micro_batches: a divisor of `samples`. is_cached: the batch is what the frozen layers give.
        """
        sizes = [samples // micro_batches] * micro_batches
        batches = None if batch is None else parts(batch, sizes)
        targets = None if target is None else parts(target, sizes)
        share = weight / micro_batches
        if self._shape.length == 1:
            assert batches is not None  # its first device is its last
            assert targets is not None
            losses = []
            for inputs, wanted in zip(batches, targets, strict=True):
                loss = self._loss(self._run(inputs, is_cached=is_cached), wanted) * share
                loss.backward()  # type: ignore[no-untyped-call] # torch's
                losses.append(loss.detach())
            return torch.stack(losses).sum()
        self._weight = share
        losses = []
        self._schedule(samples, micro_batches, trains=True, is_cached=is_cached).step(
            arg_mbs=None if batches is None else [_arguments(inputs) for inputs in batches],
            kwarg_mbs=[{}] * micro_batches, target_mbs=targets, losses=losses, return_outputs=False,
        )  # fmt: skip
        return torch.stack([loss.detach() for loss in losses]).sum() if self.is_last else None

    @torch.no_grad()
    def output(self, batch: Value | None, samples: int) -> Value | None:
        """What the model gives, on the last device."""
        if self._shape.length == 1:
            return self._run(batch, is_cached=False)
        devices = self._shape.length
        pieces = micro_batch_counts(samples, devices, devices, devices=devices, schedule=self._kind)[0]
        batches = None if batch is None else parts(batch, [samples // pieces] * pieces)
        return self._schedule(samples, pieces, trains=False, is_cached=False).step(
            arg_mbs=None if batches is None else [_arguments(inputs) for inputs in batches],
            kwarg_mbs=[{}] * pieces,
        )  # fmt: skip

    def _run(self, inputs: Value, *, is_cached: bool) -> Value:
        for module in self._stages(is_cached=is_cached):
            inputs = module(*_arguments(inputs))
        return inputs

    def _stages(self, *, is_cached: bool) -> Sequence[_Stage]:
        return self._headless if is_cached and self.is_first else self._modules

    def _schedule(self, samples: int, micro_batches: int, *, trains: bool, is_cached: bool) -> Any:
        key = (samples, micro_batches, trains, is_cached)
        if key not in self._schedules:
            stages = [
                PipelineStage(module, number, len(self._shape.stages), self._device, group=self._group)
                for number, module in zip(self._numbers, self._stages(is_cached=is_cached), strict=True)
            ]
            loss = self._weighed_loss if trains else None
            kind: Any
            if len(stages) > 1:
                # Its rounds are of as many micro-batches as there are devices, or it takes them all in one.
                kind = ScheduleInterleaved1F1B
                self._schedules[key] = kind(stages, micro_batches, loss_fn=loss, scale_grads=False)
            else:
                can_alternate = trains and micro_batches >= len(self._shape.stages)
                kind = Schedule1F1B if self._kind is Schedule.ONE_F_ONE_B and can_alternate else ScheduleGPipe
                self._schedules[key] = kind(stages[0], micro_batches, loss_fn=loss, scale_grads=False)
        return self._schedules[key]

    def _weighed_loss(self, output: Any, target: Any) -> torch.Tensor:
        return self._loss(output, target) * self._weight


class _Stage(nn.Module):
    """Frozen layers without gradients, then active ones."""

    def __init__(self, frozen: Sequence[nn.Module], active: Sequence[nn.Module]) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(frozen)
        self.active = nn.ModuleList(active)

    def forward(self, *inputs: Any) -> Any:
        value: Any = inputs[0] if len(inputs) == 1 else inputs
        value = mapped(value, _Contiguous.apply)
        with torch.no_grad():
            for layer in self.frozen:
                value = layer(value)
        for layer in self.active:
            value = layer(value)
        return mapped(value, torch.Tensor.contiguous)


class _Contiguous(torch.autograd.Function):
    """The tensor as it is, and its gradient in one piece: what travels between ranks must be."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()


def _arguments(value: Value) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
