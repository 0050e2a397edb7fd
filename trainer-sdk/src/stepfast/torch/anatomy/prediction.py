"""What a training step will take, before there is a device: one process runs it on fake tensors.

`predict` needs the functions that make the model, its optimizer and a batch. Nothing is computed, so a model of any
size takes seconds; weights are never in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import nn

from stepfast.errors import AnatomyError
from stepfast.torch.anatomy.allocator import Reservation, reserve
from stepfast.torch.anatomy.assembly import Assembled, assemble
from stepfast.torch.anatomy.cudaworkspaces import CudaWorkspaces
from stepfast.torch.anatomy.devices import Device, device_named
from stepfast.torch.anatomy.fakes import fake_tensors
from stepfast.torch.anatomy.kernels import Attention, CpuKernels, CudaKernels
from stepfast.torch.anatomy.modules import ModulePath
from stepfast.torch.anatomy.operations import Costs
from stepfast.torch.anatomy.parallel.plan import Parallel, Sharing, parallel_from
from stepfast.torch.anatomy.parallel.trainees import Rank
from stepfast.torch.anatomy.parallel.world import imagined_world
from stepfast.torch.anatomy.recorder import Recorder
from stepfast.torch.anatomy.report import Report
from stepfast.torch.anatomy.timeline import Timeline
from stepfast.torch.anatomy.training import (
    BatchFunction,
    Loop,
    LossFunction,
    ModelFunction,
    OptimizerFunction,
    RecordedTraining,
    batch_of,
    model_loss,
)
from stepfast.torch.anatomy.workspaces import AskedWorkspaces, Workspaces


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


TODAY = Release()
TORCH_1_10 = Release(keeps_gradients=True, softmax_keeps_input=True, has_cublas_workspace=False, has_foreach=False)

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


def predict(
    model_fn: ModelFunction,
    optimizer_fn: OptimizerFunction,
    batch_fn: BatchFunction,
    *,
    batch_size: int | None = None,
    loss_fn: LossFunction = model_loss,
    device: str | Device = "a100-80gb",
    precision: str | Precision = Precision.FP32,
    parallel: str | Parallel = "none",
    attention: str | Attention = Attention.AUTO,
    checkpointing: Checkpointed = False,
    accumulation_steps: int = 1,
    clip_norm: float | None = None,
    steps: int = 2,
    release: Release = TODAY,
    title: str | None = None,
) -> Report:
    """Predicts memory and time of a training step on one device.

    `model_fn()` makes the model, `optimizer_fn(parameters)` its optimizer, as `torch.optim.AdamW` does, and
    `batch_fn()` or `batch_fn(batch_size)` a batch, which `loss_fn(model, batch)` turns into a loss (default: the
    model's own). All three run on fake tensors: they may build what no machine could hold. They make CPU tensors; the
    prediction takes these for the device's.

    `device`: a name of devices.DEVICES or a Device; "cpu" asks this machine's kernels what they take. `precision`:
    "fp32", "bf16-mixed", "fp16-mixed", "bf16". `attention`: the kernel of scaled_dot_product_attention.
    `checkpointing`: True for models of Transformers, or a predicate that says which modules are recomputed.
    `clip_norm`: gradients are clipped to it. Memory is in bytes, at the worst moment of `steps` steps.

    Raises AnatomyError where a step cannot be predicted, with what to change.
    """
    from stepfast.torch.anatomy.reporting import predicted_report

    if steps < 1 or accumulation_steps < 1:
        raise AnatomyError("steps and accumulation_steps are at least 1")
    setting = Setting(
        device=device if isinstance(device, Device) else device_named(device),
        precision=_choice(Precision, precision, "precision"),
        attention=_choice(Attention, attention, "attention"),
        checkpointing=checkpointing,
        parallel=parallel if isinstance(parallel, Parallel) else parallel_from(parallel),
        loop=Loop(
            steps=steps,
            accumulation_steps=accumulation_steps,
            clip_norm=clip_norm,
            keeps_gradients=release.keeps_gradients,
        ),
        release=release,
    )
    simulation = simulate(model_fn, optimizer_fn, partial(batch_of, batch_fn, batch_size), loss_fn, setting)
    return predicted_report(simulation, setting, title=title, batch_size=batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A step's run on fake tensors. `reservation` is None on a CPU, whose allocator reserves nothing."""

    assembled: Assembled
    reservation: Reservation | None
    costs: Costs
    parameters: int
    trainable_parameters: int
    module_kinds: dict[str, str]
    model_name: str


def simulate(
    model_fn: ModelFunction,
    optimizer_fn: OptimizerFunction,
    make_batch: Callable[[], Any],
    loss_fn: LossFunction,
    setting: Setting,
) -> Simulation:
    """Runs the step and puts its timeline together."""
    modules = ModulePath()
    recorder = Recorder(modules)
    costs = Costs()
    with ExitStack() as stack:
        mesh = None
        if setting.parallel.sharing is not Sharing.NONE:
            mesh = stack.enter_context(imagined_world(setting.parallel.world_size))
        stack.enter_context(fake_tensors())
        model = _model(model_fn, setting)
        facts = _facts(model)
        rank = Rank(
            plan=setting.parallel,
            loop=setting.loop,
            compute=_compute_dtype(setting.precision),
            mesh=mesh,
            label=recorder.label,
        )
        trainee = rank.trainee(model, partial(_optimizer, optimizer_fn, setting), stack)
        modules.name(model)
        training = RecordedTraining(
            recorder,
            loop=setting.loop,
            loss_fn=loss_fn,
            cast=nullcontext if rank.casts_itself else partial(_autocast, setting.precision),
            scale=_scaled if setting.precision is Precision.FP16_MIXED and not rank.casts_itself else _unscaled,
        )
        stack.enter_context(modules)
        stack.enter_context(recorder)
        stack.enter_context(_kernels(setting))
        training.run(trainee, make_batch)
        recorder.close()
        del trainee, training, model
    assembled = assemble(recorder, _workspaces(setting), costs.seconds_on(setting.device))
    return Simulation(
        assembled=assembled,
        reservation=_reservation(assembled.timeline, setting.device),
        costs=costs,
        **facts,
    )


def _workspaces(setting: Setting) -> Workspaces:
    if not setting.device.is_cuda:
        return AskedWorkspaces()
    device = setting.device
    return CudaWorkspaces(device if setting.release.has_cublas_workspace else replace(device, cublas_workspace_bytes=0))


def _reservation(timeline: Timeline, device: Device) -> Reservation | None:
    """What the allocator reserves on this device; where that is too small, what it would have to be."""
    if not device.is_cuda:
        return None
    if device.memory_bytes is not None:
        limited = reserve(timeline, limit_bytes=device.memory_bytes - device.context_bytes)
        if limited.failed_at is None:
            return limited
    return reserve(timeline)


def _model(model_fn: ModelFunction, setting: Setting) -> nn.Module:
    model = model_fn()
    if not isinstance(model, nn.Module):
        raise AnatomyError(f"model_fn returned a {type(model).__name__}, not a torch.nn.Module")
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
                f"{type(model).__name__} does not say which of its modules are recomputed: pass "
                "checkpointing=lambda module: isinstance(module, …)"
            )
        enable()
    return model


def _optimizer(optimizer_fn: OptimizerFunction, setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise AnatomyError("no parameter of the model requires a gradient: there is nothing to train")
    optimizer = optimizer_fn(trained)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise AnatomyError(f"optimizer_fn returned a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    for group in optimizer.param_groups:
        # On a CUDA device this is what torch chooses by itself; its stand-ins are a CPU's tensors.
        if setting.device.is_cuda and "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = setting.release.has_foreach
    return optimizer


def _kernels(setting: Setting) -> AbstractContextManager[Any]:
    if not setting.device.is_cuda:
        return CpuKernels()
    return CudaKernels(setting.attention, softmax_keeps_input=setting.release.softmax_keeps_input)


def _compute_dtype(precision: Precision) -> torch.dtype | None:
    """What is computed in, where that is not what weights are kept in."""
    return {Precision.BF16_MIXED: torch.bfloat16, Precision.FP16_MIXED: torch.float16}.get(precision)


def _autocast(precision: Precision) -> AbstractContextManager[Any]:
    dtype = _compute_dtype(precision)
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def _scaled(loss: torch.Tensor) -> torch.Tensor:
    return loss * 65536.0  # as torch.amp.GradScaler begins


def _unscaled(loss: torch.Tensor) -> torch.Tensor:
    return loss


def _facts(model: nn.Module) -> dict[str, Any]:
    parameters = list(model.parameters())
    return {
        "parameters": sum(each.numel() for each in parameters),
        "trainable_parameters": sum(each.numel() for each in parameters if each.requires_grad),
        "module_kinds": {name: type(module).__name__ for name, module in model.named_modules()},
        "model_name": type(model).__name__,
    }


def _choice(kind: type[StrEnum], value: str, name: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise AnatomyError(f"{name}: {value!r} is none of {', '.join(kind)}") from None
