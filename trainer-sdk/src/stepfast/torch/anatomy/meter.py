"""A training job looked at while it runs: time of every step, memory and operations of a step now and then.

Between samples there is a clock alone. A sampled step is recorded as `measure` does, from the model's forward pass to
the end of the optimizer's step: what is done between steps (data loaders that start processes, evaluation, a profiler
of the user's own) is not within. Samples are so far apart that they cost less than one per cent.
"""

from __future__ import annotations

import logging
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from stepfast.torch.anatomy.batches import tensors_in
from stepfast.torch.anatomy.history import History
from stepfast.torch.anatomy.live import device_here, device_use, history_of, observed_run
from stepfast.torch.anatomy.modules import ModulePath
from stepfast.torch.anatomy.nvml import DeviceUse
from stepfast.torch.anatomy.recorder import Recorder, Sightings
from stepfast.torch.anatomy.replacing import backward_passes, replaced
from stepfast.torch.anatomy.report import Report
from stepfast.torch.anatomy.reporting import report_of
from stepfast.torch.anatomy.setting import Setting
from stepfast.torch.anatomy.spacing import FIRST_STEP, steps_between
from stepfast.torch.anatomy.timeline import Component, Phase
from stepfast.torch.anatomy.training import Loop, PlainTrainee, adopt_holdings, label_holdings

log = logging.getLogger("stepfast")

_RECENT = 100  # steps whose times count
_USE_SECONDS = 10.0  # between two looks at the GPU as a whole


class Meter:
    """Follows the steps of one optimizer.

    `samples_per_step`: of this rank; without it, it is the first dimension of what the model is given in a sampled
    step. `is_sampling`: False for a clock alone. Of ranks that wait for each other one should sample: each one's
    samples slow all of them down.

    What it finds does not end training: a sample that fails is logged, once, and is the last. `close` lets go of it
    all.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        samples_per_step: int | None = None,
        is_sampling: bool = True,
    ) -> None:
        self._model, self._optimizer = model, _unwrapped(optimizer)
        self._told_samples = self._samples_per_step = samples_per_step
        self._began = time.monotonic()
        self._ended: float | None = None  # when the step before ended
        self._times: deque[float] = deque(maxlen=_RECENT)
        self._steps, self._next_sample = 0, FIRST_STEP
        self._stepped_seconds = 0.0
        self._sample: _Sample | None = None
        self._report: Report | None = None
        self._use: DeviceUse | None = None
        self._use_time = -math.inf
        self._is_sampling = is_sampling
        self._waiting: Any = None  # for the forward pass of the step that is to be sampled
        self._hooks = [self._optimizer.register_step_post_hook(self._step_ended)]

    def close(self) -> None:
        """Looks no more."""
        self._stop_sampling()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def lost(self, seconds: float) -> None:
        """Time that passed between two steps and was not training's: a save that stalled it."""
        if self._ended is not None:
            self._ended += seconds

    def report(self) -> Report | None:
        """Of the last step that was sampled; None before the first one was."""
        return self._report

    def metrics(self) -> dict[str, float]:
        """What is known now, by names of a closed set; sizes in bytes, times in seconds, shares from 0 to 1.

        `goodput_ratio`: the share of this process's time since the meter began in which steps were made, stalls left
        out.
        """
        found: dict[str, float | None] = {}
        if self._times:
            step_seconds = statistics.median(self._times)
            found["step_seconds"] = step_seconds
            if self._samples_per_step is not None:
                found["samples_per_second"] = self._samples_per_step / step_seconds
            found["goodput_ratio"] = max(0.0, self._stepped_seconds) / max(1e-9, time.monotonic() - self._began)
        if self._report is not None:
            found["memory_peak_bytes"] = self._report.memory.peak_bytes
            found["memory_reserved_bytes"] = self._report.memory.reserved_bytes
            found["flops_utilisation"] = self._report.time.flops_utilisation
        self._look_at_device()
        if self._use is not None:
            found["device_memory_used_bytes"] = self._use.used_bytes
            found["device_utilisation"] = self._use.utilisation
        return {name: float(value) for name, value in found.items() if value is not None}

    def _look_at_device(self) -> None:
        now = time.monotonic()
        if self._place.type == "cuda" and now - self._use_time >= _USE_SECONDS:
            self._use, self._use_time = device_use(self._place), now

    @property
    def _place(self) -> torch.device:
        place: torch.device = self._optimizer.param_groups[0]["params"][0].device
        return place

    def _step_ended(self, *_: object) -> None:
        now = time.monotonic()
        sample, self._sample = self._sample, None
        if self._ended is not None:
            took = now - self._ended
            if sample is None:
                self._times.append(took)
            else:  # training did as much as in any other step
                took = min(took, statistics.median(self._times))
            self._stepped_seconds += took
        self._steps += 1
        if sample is not None:
            self._finish(sample)
        self._ended = time.monotonic()
        if self._is_sampling and self._waiting is None and self._steps >= self._next_sample and self._times:
            self._await_step()

    def _await_step(self) -> None:
        if _has_compiled():
            # A hook on the model would be a reason to compile it anew. Under a recorder it runs as it is written.
            if not _is_watched(self._place):
                self._begin(None)
            return
        self._waiting = self._model.register_forward_pre_hook(self._forward_begins, with_kwargs=True)

    def _forward_begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        is_trained = model.training and torch.is_grad_enabled()
        if self._waiting is None or not is_trained or _is_watched(self._place):
            return
        self._waiting.remove()
        self._waiting = None
        self._begin((args, kwargs))

    def _begin(self, given: tuple[Any, Any] | None) -> None:
        """`given`: to the forward pass that begins."""
        try:
            self._sample = _Sample(self._model, self._optimizer, self._steps + 1)
            if given is not None:
                self._sample.take(*given)
        except Exception:  # noqa: BLE001 - whatever it is, training goes on without
            self._give_up()

    def _finish(self, sample: _Sample) -> None:
        step_seconds = statistics.median(self._times)
        try:
            self._report = sample.report(step_seconds, self._told_samples)
            self._samples_per_step = self._report.time.samples_per_step
        except Exception:  # noqa: BLE001 - as above
            sample.drop()
            self._give_up()
        assert self._ended is not None
        extra = time.monotonic() - self._ended - step_seconds
        self._next_sample = self._steps + steps_between(max(0.0, extra), step_seconds)

    def _stop_sampling(self) -> None:
        self._is_sampling = False
        if self._waiting is not None:
            self._waiting.remove()
            self._waiting = None
        sample, self._sample = self._sample, None
        if sample is not None:
            sample.drop()

    def _give_up(self) -> None:
        log.exception("stepfast: the anatomy of this training is not measured any more")
        self._stop_sampling()


class _Sample:
    """One step under way that is recorded."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        self._place, self._step = next(model.parameters()).device, step
        self._samples = 0
        self._sightings = Sightings()
        modules = ModulePath()
        modules.name(model)
        self._recorder = Recorder(modules, self._sightings)
        self._trainee = PlainTrainee(model, optimizer, Loop())
        self._stack = ExitStack()
        with ExitStack() as stack:  # what fails here leaves nothing behind
            self._history: History = stack.enter_context(history_of(self._place))
            stack.callback(self._recorder.close)
            self._recorder.turn(Phase.SETUP, step)
            adopt_holdings(self._recorder, self._trainee)
            if not _has_compiled():  # torch warns of hooks on all modules there; nothing then has a module's name
                stack.enter_context(modules)
            stack.enter_context(self._recorder)
            for hook in (
                model.register_forward_pre_hook(lambda _, *given: self.take(*given), with_kwargs=True),
                optimizer.register_step_pre_hook(lambda *_: self._recorder.turn(Phase.OPTIMIZER, step)),
            ):
                stack.callback(hook.remove)
            stack.enter_context(backward_passes(self._phased))
            # The gradient that a backward pass begins with is made before it is run.
            stack.enter_context(replaced(torch.autograd, "backward", self._phased(torch.autograd.backward)))
            self._stack = stack.pop_all()

    def take(self, args: Any, kwargs: Any) -> None:
        """A forward pass begins, with these arguments."""
        tensors = tensors_in((args, kwargs))
        self._samples += next((tensor.shape[0] for tensor in tensors if tensor.dim()), 0)
        self._recorder.adopt(Component.INPUTS, tensors)
        self._recorder.turn(Phase.FORWARD, self._step)

    def _phased(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """The loss may be computed outside of the model, and gradients be clipped before the optimizer's step."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() != -1:  # within another one, for what is computed again
                return backward(*args, **kwargs)
            self._recorder.turn(Phase.BACKWARD, self._step)
            try:
                return backward(*args, **kwargs)
            finally:
                self._recorder.turn(Phase.OPTIMIZER, self._step)

        return run

    def report(self, step_seconds: float, samples_per_step: int | None) -> Report:
        """Ends it. Says nothing of how the training is made that cannot be seen from here."""
        label_holdings(self._recorder, self._trainee)
        self._stack.close()
        run = observed_run(self._trainee, self._recorder, self._sightings, self._history, step_seconds)
        setting = Setting(device=device_here(str(self._place)), loop=Loop(steps=self._step))
        samples = samples_per_step or self._samples or None
        made = report_of(run, setting, kind="measured", title=None, batch_size=samples)
        settings = {"device": made.device} if samples is None else {"samples": str(samples), "device": made.device}
        return replace(made, settings=settings)

    def drop(self) -> None:
        """Ends it without a report."""
        self._stack.close()


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that steps: Accelerate's is around it, and takes no hooks."""
    inner = getattr(optimizer, "optimizer", None)
    return _unwrapped(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def _is_watched(place: torch.device) -> bool:
    """Whether somebody else looks at what is done: of profilers, and of allocators' histories, there can be one."""
    is_profiled = torch._C._autograd._profiler_enabled() or torch._C._len_torch_dispatch_stack() > 0
    return is_profiled or (place.type == "cuda" and bool(torch._C._cuda_isHistoryEnabled()))


def _has_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"]["ok"])
