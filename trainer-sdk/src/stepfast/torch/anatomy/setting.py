"""How a training step is run, and what a run leaves: shared by predictions and measurements."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from stepfast.errors import AnatomyError, AnatomyOptionError
from stepfast.torch.anatomy.allocator import Reservation
from stepfast.torch.anatomy.assembly import Assembled
from stepfast.torch.anatomy.attention import Attention
from stepfast.torch.anatomy.devices import Device
from stepfast.torch.anatomy.fakes import NO_LAZY_MODULES
from stepfast.torch.anatomy.operations import Costs
from stepfast.torch.anatomy.parallel.plan import Parallel
from stepfast.torch.anatomy.training import Loop, ModelFunction, OptimizerFunction


class Precision(StrEnum):
    """What weights are kept in, and what autocast computes in."""

    FP32 = "fp32"
    BF16_MIXED = "bf16-mixed"
    FP16_MIXED = "fp16-mixed"
    BF16 = "bf16"  # weights, gradients and optimizer states, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What torch did at the time of a release, where that changes what a step holds."""

    keeps_gradients: bool = False  # zero_grad() filled gradients with zeros up to 1.13
    softmax_keeps_input: bool = False  # up to 1.10
    has_cublas_workspace: bool = True  # given to cuBLAS by torch, not taken by itself, since 1.11
    has_foreach: bool = True  # optimizers step all parameters at once on CUDA since 1.13
    fuses_rms_norm: bool = True


_OPTIONAL = inspect.Parameter("closure", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)

TODAY = Release()
TORCH_1_10 = Release(
    keeps_gradients=True, softmax_keeps_input=True, has_cublas_workspace=False, has_foreach=False, fuses_rms_norm=False
)

Checkpointed = bool | Callable[[nn.Module], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the step is run. See `predict`."""

    device: Device
    precision: Precision = Precision.FP32
    attention: Attention = Attention.AUTO
    checkpointing: Checkpointed = False
    parallel: Parallel = field(default_factory=Parallel)
    loop: Loop = field(default_factory=Loop)
    release: Release = TODAY

    def compute_dtype(self) -> torch.dtype | None:
        """What is computed in, where that is not what weights are kept in."""
        return {Precision.BF16_MIXED: torch.bfloat16, Precision.FP16_MIXED: torch.float16}.get(self.precision)

    def autocast(self, device_type: str) -> AbstractContextManager[Any]:
        """Mixed precision by autocast."""
        dtype = self.compute_dtype()
        # torch's default, whatever else in this process turned off: Lightning does, while it trains.
        return nullcontext() if dtype is None else torch.autocast(device_type, dtype, cache_enabled=True)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as it goes backward: fp16 is scaled, as torch.amp.GradScaler begins."""
        return loss * 65536.0 if self.precision is Precision.FP16_MIXED else loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a model is. `module_kinds`: the class of each module, by its dotted name."""

    name: str
    parameters: int
    trainable_parameters: int
    module_kinds: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Training steps that were run, on fake tensors or real ones.

    `reservation`: None on a CPU, whose allocator reserves nothing. `step_seconds`: what a step took without anyone
    looking (None: nobody measured it).
    """

    assembled: Assembled
    reservation: Reservation | None
    costs: Costs
    facts: Facts
    step_seconds: float | None = None
    notes: Sequence[str] = ()  # what is to be known of the figures


def prepared_model(model_fn: ModelFunction, setting: Setting) -> nn.Module:
    """The model, ready to be trained. Raises AnatomyError where it is none, or does not say what is recomputed."""
    model = model_fn()
    if not isinstance(model, nn.Module):
        raise AnatomyError(f"model_fn returned a {type(model).__name__}, not a torch.nn.Module")
    if any(
        isinstance(each, UninitializedParameter | UninitializedBuffer)
        for each in (*model.parameters(), *model.buffers())
    ):
        raise AnatomyError(NO_LAZY_MODULES)
    if setting.precision is Precision.BF16:
        model = model.to(torch.bfloat16)
    model.train()
    if callable(setting.checkpointing):
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

        apply_activation_checkpointing(model, check_fn=setting.checkpointing)
    elif setting.checkpointing:
        enable = getattr(model, "gradient_checkpointing_enable", None)
        if enable is None:
            raise AnatomyError(
                f"{type(model).__name__} does not say what is recomputed of it, as models of Transformers do: "
                "in Python checkpointing takes a function of a module that says so"
            )
        enable()
    return model


def prepared_optimizer(optimizer_fn: OptimizerFunction, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of what the model trains. Raises AnatomyError where there is nothing, or it is none."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise AnatomyError("no parameter of the model requires a gradient: there is nothing to train")
    optimizer = optimizer_fn(trained)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise AnatomyError(f"optimizer_fn returned a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    if next(iter(inspect.signature(optimizer.step).parameters.values()), _OPTIONAL).default is inspect.Parameter.empty:
        raise AnatomyError(f"{type(optimizer).__name__} steps with a closure, which computes losses of its own")
    return optimizer


def facts_of(model: nn.Module) -> Facts:
    """What the model is, before anything wraps or shards it."""
    parameters = list(model.parameters())
    return Facts(
        name=type(model).__name__,
        parameters=sum(each.numel() for each in parameters),
        trainable_parameters=sum(each.numel() for each in parameters if each.requires_grad),
        module_kinds={name: type(module).__name__ for name, module in model.named_modules()},
    )


def choice(kind: type[StrEnum], value: str, name: str) -> Any:
    """The member of this value. Raises AnatomyError, with the values that there are."""
    try:
        return kind(value)
    except ValueError:
        raise AnatomyOptionError(f"{name}: {value!r} is none of {', '.join(kind)}") from None
