"""A few steps of a training loop, as most loops are written; the same on fake tensors and on real ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from stepfast.errors import AnatomyError
from stepfast.torch.anatomy.modules import ModulePath
from stepfast.torch.anatomy.recorder import Recorder
from stepfast.torch.anatomy.timeline import Component, Phase

ModelFunction = Callable[[], nn.Module]
OptimizerFunction = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
BatchFunction = Callable[..., Any]
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
            f"{type(model).__name__} returns no loss (a {type(output).__name__}): give the batch its labels, or pass "
            "loss_fn=lambda model, batch: …"
        )
    return loss


def batch_of(batch_fn: BatchFunction, batch_size: int | None) -> Any:
    """What `batch_fn` makes, given `batch_size` when it takes an argument. Raises AnatomyError when it needs one."""
    takes = [
        parameter
        for parameter in inspect.signature(batch_fn).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if batch_size is None:
        if takes and takes[0].default is inspect.Parameter.empty:
            raise AnatomyError("batch_fn takes a batch size: pass batch_size=…")
        return batch_fn()
    if not takes:
        raise AnatomyError("batch_fn takes no argument, so it cannot follow batch_size: let it take the batch size")
    return batch_fn(batch_size)


class RecordedTraining:
    """Trains within a recorder's context and tells it what is what."""

    def __init__(
        self,
        recorder: Recorder,
        modules: ModulePath,
        *,
        loop: Loop,
        loss_fn: LossFunction = model_loss,
        cast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        scale: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss,
    ) -> None:
        self._recorder, self._modules, self._loop, self._loss_fn = recorder, modules, loop, loss_fn
        self._cast, self._scale = cast, scale
        self._owners: dict[torch.Tensor, str] = {}  # the module of each parameter: of a tied one the first

    def run(self, model: nn.Module, optimizer: torch.optim.Optimizer, make_batch: Callable[[], Any]) -> None:
        """Names live as long as in a plain loop: a batch and its loss until the next ones take their place."""
        phase = self._recorder.phase
        self._modules.name(model)
        self._adopt_model(model)
        for step in range(1, self._loop.steps + 1):
            for _ in range(self._loop.accumulation_steps):
                with phase(Phase.SETUP, step):
                    with self._recorder.paused():  # on the host, by a data loader
                        batch = make_batch()
                    self._recorder.adopt(Component.INPUTS, _tensors(batch), origin="batch")
                with phase(Phase.FORWARD, step):
                    with self._cast():
                        loss = self._loss_fn(model, batch)
                    if self._loop.accumulation_steps > 1:
                        loss = loss / self._loop.accumulation_steps
                    loss = self._scale(loss)
                with phase(Phase.BACKWARD, step):
                    loss.backward()
                    self._label_gradients(model)
            with phase(Phase.OPTIMIZER, step):
                self._update(model, optimizer)

    def _update(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if self._loop.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self._loop.clip_norm)
        optimizer.step()
        for parameter, state in optimizer.state.items():
            self._recorder.label(Component.OPTIMIZER, _tensors(state))
            self._recorder.place(self._owners.get(parameter, ""), _tensors(state))
        optimizer.zero_grad(set_to_none=not self._loop.keeps_gradients)

    def _adopt_model(self, model: nn.Module) -> None:
        self._recorder.adopt(Component.WEIGHTS, model.parameters(), origin="parameter")
        self._recorder.adopt(Component.BUFFERS, model.buffers(), origin="buffer")
        loose = (
            value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)
        )
        self._recorder.adopt(Component.BUFFERS, loose, origin="attribute")
        self._owners = {parameter: name.rpartition(".")[0] for name, parameter in model.named_parameters()}
        for parameter, module in self._owners.items():
            self._recorder.place(module, [parameter])
        for name, buffer in model.named_buffers():
            self._recorder.place(name.rpartition(".")[0], [buffer])

    def _label_gradients(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                self._recorder.label(Component.GRADIENTS, [parameter.grad])
                self._recorder.place(self._owners.get(parameter, ""), [parameter.grad])


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
