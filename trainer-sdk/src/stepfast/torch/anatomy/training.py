"""A few steps of a training loop, as most loops are written; the same on fake tensors and on real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from stepfast.errors import AnatomyError
from stepfast.torch.anatomy.batches import tensors_in
from stepfast.torch.anatomy.recorder import Recorder
from stepfast.torch.anatomy.timeline import Component, Phase

ModelFunction = Callable[[], nn.Module]
OptimizerFunction = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
LossFunction = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """How a step is made of its parts.

    `accumulation_steps` batches make one step. `keeps_gradients`: zero_grad(set_to_none=False), as torch did up to
    1.13.
    """

    steps: int = 2
    accumulation_steps: int = 1
    clip_norm: float | None = None
    keeps_gradients: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1 or self.accumulation_steps < 1:
            raise AnatomyError("steps and accumulation_steps are at least 1")


def model_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a model that computes it itself, as those of Transformers do.

    The batch is a mapping of keyword arguments, a tuple of positional ones, or one argument. The model returns the
    loss, something with `.loss`, or a mapping with "loss". Raises AnatomyError for anything else.
    """
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, tuple | list):
        output = model(*batch)
    else:
        output = model(batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise AnatomyError(
            f"{type(model).__name__} returns no loss ({_kind(output)}): give the batch its labels, or say how "
            "the loss is computed, with loss_fn (--loss)"
        )
    return loss


def _kind(output: Any) -> str:
    if isinstance(output, torch.Tensor):
        return f"a tensor of {tuple(output.shape)}"
    return f"a {type(output).__name__}"


def loss_of(loss_fn: LossFunction, module: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a batch. Raises AnatomyError where it is none to go backward from."""
    loss = loss_fn(module, batch)
    if not isinstance(loss, torch.Tensor):
        raise AnatomyError(f"loss_fn returned a {type(loss).__name__}, not a tensor")
    if loss.numel() != 1:
        raise AnatomyError(
            f"loss_fn returned a tensor of {tuple(loss.shape)}, not one number: take its mean or its sum"
        )
    if not loss.requires_grad:
        raise AnatomyError("the loss does not depend on any parameter that is trained: there is no way backward")
    return loss


class Holding(NamedTuple):
    """What some tensors' memory is for, and whose: "" for no module's own, None where that is not known better."""

    component: Component
    tensors: Iterable[torch.Tensor]
    module: str | None = None


class Trainee(Protocol):
    """A model with its optimizer, as one rank trains them."""

    module: nn.Module  # what a batch is given to

    def backward(self, loss: torch.Tensor) -> None: ...

    def update(self) -> None:
        """The optimizer's step, with what belongs to it."""

    def release(self) -> None:
        """Lets go of gradients, as zero_grad does."""

    def holdings(self) -> Iterator[Holding]:
        """What it holds now and what for. What is named twice is what it was named first."""


class PlainTrainee:
    """torch's own: a module, an optimizer, gradients on the parameters."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, loop: Loop) -> None:
        self.module, self._optimizer, self._loop = module, optimizer, loop

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        if self._loop.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), self._loop.clip_norm)
        self._optimizer.step()

    def release(self) -> None:
        self._optimizer.zero_grad(set_to_none=not self._loop.keeps_gradients)

    def holdings(self) -> Iterator[Holding]:
        owners: dict[torch.Tensor, str] = {}  # the module of each parameter: of a tied one the first
        for name, parameter in self.module.named_parameters():
            owners[parameter] = name.rpartition(".")[0]
            yield Holding(Component.WEIGHTS, [parameter], owners[parameter])
        for name, buffer in self.module.named_buffers():
            yield Holding(Component.BUFFERS, [buffer], name.rpartition(".")[0])
        for name, module in self.module.named_modules():
            loose = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
            yield Holding(Component.BUFFERS, loose, name)
        for trained, owner in owners.items():
            if trained.grad is not None:
                yield Holding(Component.GRADIENTS, [trained.grad], owner)
        for trained, state in self._optimizer.state.items():
            yield Holding(Component.OPTIMIZER, tensors_in(state), owners.get(trained, ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPass:
    """From a batch to the loss that goes backward: `cast` is around the model, `scale` is applied to what it says."""

    loop: Loop
    loss_fn: LossFunction = model_loss
    cast: Callable[[], AbstractContextManager[Any]] = nullcontext
    scale: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss

    def __call__(self, module: nn.Module, batch: Any) -> torch.Tensor:
        with self.cast():
            loss = loss_of(self.loss_fn, module, batch)
        if self.loop.accumulation_steps > 1:
            loss = loss / self.loop.accumulation_steps
        return self.scale(loss)


class RecordedTraining:
    """Trains within a recorder's context and tells it what is what."""

    def __init__(self, recorder: Recorder, forward: ForwardPass) -> None:
        self._recorder, self._loop, self._forward = recorder, forward.loop, forward

    def run(self, trainee: Trainee, make_batch: Callable[[], Any]) -> None:
        """Names live as long as in a plain loop: a batch and its loss until the next ones take their place."""
        phase = self._recorder.phase
        adopt_holdings(self._recorder, trainee)
        for step in range(1, self._loop.steps + 1):
            for _ in range(self._loop.accumulation_steps):
                with phase(Phase.SETUP, step):
                    batch = self._next(make_batch)
                with phase(Phase.FORWARD, step):
                    loss = self._forward(trainee.module, batch)
                with phase(Phase.BACKWARD, step):
                    trainee.backward(loss)
                label_holdings(self._recorder, trainee)
            with phase(Phase.OPTIMIZER, step):
                trainee.update()
                label_holdings(self._recorder, trainee)
                trainee.release()

    def _next(self, make_batch: Callable[[], Any]) -> Any:
        """Seen as it arrives, while the batch before it is still there."""
        with self._recorder.paused():  # it is made on the host, by a data loader
            batch = make_batch()
        self._recorder.adopt(Component.INPUTS, tensors_in(batch))
        return batch


def adopt_holdings(recorder: Recorder, trainee: Trainee) -> None:
    """Takes in what was there before anything was recorded."""
    for component, tensors, module in trainee.holdings():
        recorder.adopt(component, tensors, module=module)


def label_holdings(recorder: Recorder, trainee: Trainee) -> None:
    """Says what is what of all that was recorded until now."""
    for component, tensors, module in trainee.holdings():
        recorder.label(component, tensors, module=module)
