"""What a training step will take, before there is a device: one process runs it on fake tensors.

`predict` needs the functions that make the model, its optimizer and a batch. Nothing is computed, so a model of any
size takes seconds; weights are never in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from stepfast.torch.anatomy.allocator import Reservation, reserve
from stepfast.torch.anatomy.assembly import assemble
from stepfast.torch.anatomy.attention import Attention
from stepfast.torch.anatomy.batches import BatchFunction, batch_of, tensors_in
from stepfast.torch.anatomy.cudaworkspaces import CudaWorkspaces, unknown
from stepfast.torch.anatomy.devices import Device, device_named
from stepfast.torch.anatomy.fakes import check_places, fake_tensors, on_fakes, taken_for_real
from stepfast.torch.anatomy.generators import states_seen
from stepfast.torch.anatomy.kernels import CpuKernels, CudaKernels, in_force
from stepfast.torch.anatomy.modules import ModulePath
from stepfast.torch.anatomy.operations import Costs
from stepfast.torch.anatomy.parallel.plan import Parallel, Sharing, parallel_from
from stepfast.torch.anatomy.parallel.trainees import Rank
from stepfast.torch.anatomy.parallel.world import imagined_world
from stepfast.torch.anatomy.recorder import Recorder
from stepfast.torch.anatomy.report import Report
from stepfast.torch.anatomy.reporting import report_of
from stepfast.torch.anatomy.setting import (
    TODAY,
    Checkpointed,
    Precision,
    Release,
    Run,
    Setting,
    choice,
    facts_of,
    prepared_model,
    prepared_optimizer,
)
from stepfast.torch.anatomy.timeline import Component, Timeline
from stepfast.torch.anatomy.training import (
    ForwardPass,
    Loop,
    LossFunction,
    ModelFunction,
    OptimizerFunction,
    RecordedTraining,
    model_loss,
)
from stepfast.torch.anatomy.workspaces import AskedWorkspaces, Workspaces


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
    setting = Setting(
        device=device if isinstance(device, Device) else device_named(device),
        precision=choice(Precision, precision, "precision"),
        attention=choice(Attention, attention, "attention"),
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
    run = simulate(model_fn, optimizer_fn, partial(batch_of, batch_fn, batch_size), loss_fn, setting)
    return report_of(run, setting, kind="predicted", title=title, batch_size=batch_size)


def simulate(
    model_fn: ModelFunction,
    optimizer_fn: OptimizerFunction,
    make_batch: Callable[[], Any],
    loss_fn: LossFunction,
    setting: Setting,
) -> Run:
    """Runs the step and puts its timeline together."""
    modules = ModulePath()
    recorder = Recorder(modules)
    costs = Costs()
    with ExitStack() as stack:
        mesh = None
        if setting.parallel.sharing is not Sharing.NONE:
            mesh = stack.enter_context(imagined_world(setting.parallel.world_size))
        stack.enter_context(fake_tensors())
        model = prepared_model(partial(on_fakes, model_fn), setting)
        facts = facts_of(model)
        stack.enter_context(taken_for_real())
        rank = Rank(
            plan=setting.parallel,
            loop=setting.loop,
            compute=setting.compute_dtype(),
            mesh=mesh,
            label=recorder.label,
        )
        optimizers: list[torch.optim.Optimizer] = []
        trainee = rank.trainee(model, partial(_optimizer, optimizer_fn, setting, optimizers), stack)
        modules.name(model)
        forward = ForwardPass(
            loop=setting.loop,
            loss_fn=loss_fn,
            cast=nullcontext if rank.casts_itself else partial(setting.autocast, "cpu"),
            scale=_as_it_is if rank.casts_itself else setting.scaled,
        )
        stack.enter_context(modules)
        stack.enter_context(recorder)
        stack.enter_context(in_force(_kernels(setting)))
        if not setting.device.is_cuda:  # elsewhere they are the host's
            stack.enter_context(states_seen(lambda state: recorder.adopt(Component.ACTIVATIONS, [state])))
        RecordedTraining(recorder, forward).run(trainee, partial(_on_cpu, make_batch))
        if setting.device.is_cuda:
            recorder.leave_out(_counters(optimizers))
        recorder.close()
        del trainee, model, optimizers
    assembled = assemble(recorder, _workspaces(setting), costs.seconds_on(setting.device))
    return Run(
        assembled=assembled,
        reservation=_reservation(assembled.timeline, setting.device),
        costs=costs,
        facts=facts,
        notes=unknown(recorder.calls, setting.device) if setting.device.is_cuda else (),
    )


def _on_cpu(make_batch: Callable[[], Any]) -> Any:
    batch = make_batch()
    check_places("batch_fn", tensors_in(batch))
    return batch


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


def _counters(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """Of steps, one for each parameter: torch keeps them on the host, unless a kernel on the device reads them."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if not group.get("capturable") and not group.get("fused"):
                steps = (optimizer.state.get(parameter, {}).get("step") for parameter in group["params"])
                yield from (step for step in steps if isinstance(step, torch.Tensor))


def _optimizer(
    optimizer_fn: OptimizerFunction, setting: Setting, made: list[torch.optim.Optimizer], model: nn.Module
) -> torch.optim.Optimizer:
    optimizer = prepared_optimizer(optimizer_fn, model)
    made.append(optimizer)
    # On a CUDA device torch chooses so by itself, in the optimizers that ask; its stand-ins are a CPU's tensors.
    if setting.device.is_cuda and _asks_the_device(optimizer):
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable"):
                group["foreach"] = setting.release.has_foreach
    return optimizer


def _asks_the_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether "foreach" left open is for the device to decide: Adafactor takes it for no."""
    ours = type(optimizer).__mro__
    kinds = ours[: ours.index(torch.optim.Optimizer)]
    return any(hasattr(sys.modules[kind.__module__], "_default_to_fused_or_foreach") for kind in kinds)


def _kernels(setting: Setting) -> TorchFunctionMode:
    if not setting.device.is_cuda:
        return CpuKernels()
    return CudaKernels(
        setting.device.capability,
        setting.attention,
        softmax_keeps_input=setting.release.softmax_keeps_input,
        fuses_rms_norm=setting.release.fuses_rms_norm,
    )


def _as_it_is(loss: torch.Tensor) -> torch.Tensor:
    return loss
