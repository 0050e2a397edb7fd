"""What training steps take on this machine: the same report as a prediction, of steps that are really run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from stepfast.errors import AnatomyError
from stepfast.torch.anatomy.allocator import Reservation
from stepfast.torch.anatomy.assembly import Assembled
from stepfast.torch.anatomy.batches import BatchFunction, batch_of, moved
from stepfast.torch.anatomy.devices import CPU, Device, device_called
from stepfast.torch.anatomy.history import History, cpu_history, cuda_history
from stepfast.torch.anatomy.modules import ModulePath
from stepfast.torch.anatomy.nvml import DeviceUse, read
from stepfast.torch.anatomy.observation import observe
from stepfast.torch.anatomy.operations import Costs
from stepfast.torch.anatomy.recorder import Recorder, Sightings
from stepfast.torch.anatomy.report import Report
from stepfast.torch.anatomy.reporting import report_of
from stepfast.torch.anatomy.setting import (
    Checkpointed,
    Precision,
    Run,
    Setting,
    choice,
    facts_of,
    prepared_model,
    prepared_optimizer,
)
from stepfast.torch.anatomy.training import (
    ForwardPass,
    Loop,
    LossFunction,
    ModelFunction,
    OptimizerFunction,
    PlainTrainee,
    RecordedTraining,
    Trainee,
    model_loss,
)

_TIMED_STEPS = 5


def measure(
    model_fn: ModelFunction,
    optimizer_fn: OptimizerFunction,
    batch_fn: BatchFunction,
    *,
    batch_size: int | None = None,
    loss_fn: LossFunction = model_loss,
    device: str | None = None,
    precision: str | Precision = Precision.FP32,
    checkpointing: Checkpointed = False,
    accumulation_steps: int = 1,
    clip_norm: float | None = None,
    steps: int = 2,
    title: str | None = None,
) -> Report:
    """Measures memory and time of a training step: the counterpart of `predict`, with the same functions.

    `steps` steps are recorded, with the allocator's own history; a few more are only timed. `device`: "cpu", "cuda" or
    "cuda:1" (default: a CUDA device where there is one); what the functions make is moved there. Sizes are in bytes,
    times in seconds. Raises AnatomyError.
    """
    place = _place(device)
    setting = Setting(
        device=_device(place),
        precision=choice(Precision, precision, "precision"),
        checkpointing=checkpointing,
        loop=Loop(steps=steps, accumulation_steps=accumulation_steps, clip_norm=clip_norm),
    )
    make_batch = partial(_arriving, partial(batch_of, batch_fn, batch_size), place)
    model = prepared_model(model_fn, setting).to(place)
    trainee = PlainTrainee(model, prepared_optimizer(optimizer_fn, model), setting.loop)
    forward = ForwardPass(
        loop=setting.loop, loss_fn=loss_fn, cast=partial(setting.autocast, place.type), scale=setting.scaled
    )
    run = _run(trainee, make_batch, forward, place)
    return report_of(run, setting, kind="measured", title=title, batch_size=batch_size)


def _run(trainee: Trainee, make_batch: Callable[[], Any], forward: ForwardPass, place: torch.device) -> Run:
    modules, sightings = ModulePath(), Sightings()
    recorder = Recorder(modules, sightings)
    modules.name(trainee.module)
    with history_of(place) as history:
        with modules, recorder:
            RecordedTraining(recorder, forward).run(trainee, make_batch)
        recorder.close()
    step_seconds = _seconds(trainee, make_batch, forward, place)
    return observed_run(trainee, recorder, sightings, history, step_seconds)


def observed_run(
    trainee: Trainee, recorder: Recorder, sightings: Sightings, history: History, step_seconds: float
) -> Run:
    """What was recorded of a real run, put together. `step_seconds`: what a step takes that nobody records."""
    assembled = observe(recorder, sightings, history.changes)
    return Run(
        assembled=assembled,
        reservation=_reservation(assembled, history, sightings) if history.reserved else None,
        costs=Costs(),
        facts=facts_of(trainee.module),
        step_seconds=step_seconds,
    )


def _seconds(trainee: Trainee, make_batch: Callable[[], Any], forward: ForwardPass, place: torch.device) -> float:
    """The median of a few steps that nobody records."""
    times: list[float] = []
    for _ in range(_TIMED_STEPS):
        batches = [make_batch() for _ in range(forward.loop.accumulation_steps)]  # a loader's work, beside the step
        _synchronize(place)
        started = time.perf_counter()
        for batch in batches:
            trainee.backward(forward(trainee.module, batch))
        trainee.update()
        trainee.release()
        _synchronize(place)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _reservation(assembled: Assembled, history: History, sightings: Sightings) -> Reservation:
    """What CUDA's allocator had of the device behind each change of the timeline."""
    timeline = assembled.timeline
    begin = sightings.phases[0][0]
    reserved: list[int] = []
    at = 0
    for change in timeline.changes:
        now = begin + change.seconds * 1e9
        while at + 1 < len(history.reserved) and history.reserved[at + 1][0] <= now:
            at += 1
        reserved.append(history.reserved[at][1])
    return Reservation(allocated=list(timeline.totals()), reserved=reserved, failed_at=None)


def _place(device: str | None) -> torch.device:
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise AnatomyError(f"device: {device!r} is none of torch's: cpu, cuda, cuda:1") from error
    if place.type not in ("cpu", "cuda"):
        raise AnatomyError(f"device: {place.type} cannot be measured: cpu or cuda")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise AnatomyError("device: there is no CUDA device here: measure on the cpu, or predict")
    return torch.device("cuda", torch.cuda.current_device()) if place == torch.device("cuda") else place


def device_here(device: str | None = None) -> Device:
    """What this machine trains on, for a prediction of it. `device` as in `measure`. Raises AnatomyError."""
    return _device(_place(device))


def device_use(place: torch.device) -> DeviceUse | None:
    """What NVML says of a CUDA device, whatever number it has among those that this process sees; None without NVML."""
    try:
        return read(uuid=f"GPU-{torch.cuda.get_device_properties(place).uuid}")
    except AnatomyError:
        return None


def _device(place: torch.device) -> Device:
    if place.type == "cpu":
        return CPU
    total = torch.cuda.get_device_properties(place).total_memory
    found = device_called(torch.cuda.get_device_name(place), total)
    context = max(0, torch.cuda.device_memory_used(place) - torch.cuda.memory_reserved(place))
    return replace(found, memory_bytes=total, context_bytes=context)


def history_of(place: torch.device) -> AbstractContextManager[History]:
    """The history of the allocator of a device."""
    return cpu_history() if place.type == "cpu" else cuda_history(place.index)


def _synchronize(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def _arriving(make_batch: Callable[[], Any], place: torch.device) -> Any:
    batch = make_batch()
    return batch if place.type == "cpu" else moved(batch, place)
