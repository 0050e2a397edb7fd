"""A training job looked at while it runs: time of every step, memory and operations of a step now and then.

Between samples there is a clock alone. A sampled step is recorded as `measure` does, from one optimizer step's end to
the next one's; samples are so far apart that they cost less than one per cent.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections import deque
from contextlib import ExitStack

import torch
from torch import nn

from stepfast.errors import AnatomyError
from stepfast.torch.anatomy.history import History
from stepfast.torch.anatomy.live import device_here, history_of, observed_run
from stepfast.torch.anatomy.modules import ModulePath
from stepfast.torch.anatomy.nvml import DeviceUse, read
from stepfast.torch.anatomy.recorder import Recorder, Sightings
from stepfast.torch.anatomy.report import Report
from stepfast.torch.anatomy.reporting import report_of
from stepfast.torch.anatomy.setting import Setting
from stepfast.torch.anatomy.spacing import FIRST_STEP, steps_between
from stepfast.torch.anatomy.timeline import Phase
from stepfast.torch.anatomy.training import Loop, PlainTrainee

log = logging.getLogger("stepfast")

_RECENT = 100  # steps whose times count


class Meter:
    """Follows the steps of one optimizer. `samples_per_step`: of this rank; without it, no samples a second.

    What it finds does not end training: a sample that fails is logged, once, and is the last. `close` lets go of it
    all.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, samples_per_step: int | None = None
    ) -> None:
        self._model, self._optimizer, self._samples_per_step = model, optimizer, samples_per_step
        self._began = time.monotonic()
        self._ended: float | None = None  # when the step before ended
        self._times: deque[float] = deque(maxlen=_RECENT)
        self._steps, self._next_sample = 0, FIRST_STEP
        self._stepped_seconds = 0.0
        self._sample: _Sample | None = None
        self._report: Report | None = None
        self._use: DeviceUse | None = None
        self._is_open = True
        self._hooks = [optimizer.register_step_post_hook(self._step_ended)]

    def close(self) -> None:
        """Looks no more."""
        if self._sample is not None:
            self._sample.drop()
            self._sample = None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._is_open = False

    def lost(self, seconds: float) -> None:
        """Time that passed between two steps and was not training's: a save that stalled it."""
        self._stepped_seconds -= seconds
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
        if self._use is not None:
            found["device_memory_used_bytes"] = self._use.used_bytes
            found["device_utilisation"] = self._use.utilisation
        return {name: float(value) for name, value in found.items() if value is not None}

    def _step_ended(self, *_: object) -> None:
        now = time.monotonic()
        sample, self._sample = self._sample, None
        if sample is not None:
            self._finish(sample, now)
        elif self._ended is not None:
            self._times.append(now - self._ended)
        if self._ended is not None:
            self._stepped_seconds += now - self._ended
        self._steps += 1
        if self._is_open and self._steps >= self._next_sample and self._times:
            self._sample = self._begin()
        self._ended = time.monotonic()

    def _begin(self) -> _Sample | None:
        try:
            return _Sample(self._model, self._optimizer, self._steps + 1)
        except Exception:  # noqa: BLE001 - whatever it is, training goes on without
            self._give_up()
            return None

    def _finish(self, sample: _Sample, now: float) -> None:
        step_seconds = statistics.median(self._times)
        try:
            self._report = sample.report(step_seconds, self._samples_per_step)
            if self._report.device != "cpu":
                with contextlib.suppress(AnatomyError):  # no NVML: the other figures are there
                    self._use = read()
        except Exception:  # noqa: BLE001 - as above
            self._give_up()
        assert self._ended is not None
        extra = sample.began_seconds + (time.monotonic() - self._ended) - step_seconds
        self._next_sample = self._steps + 1 + steps_between(max(0.0, extra), step_seconds)
        self._stepped_seconds -= time.monotonic() - now

    def _give_up(self) -> None:
        log.exception("stepfast: the anatomy of this training is not measured any more")
        self.close()


class _Sample:
    """One step under way that is recorded, from the end of the optimizer's step before."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        started = time.monotonic()
        place = next(model.parameters()).device
        self._place, self._step = place, step
        self._sightings = Sightings()
        modules = ModulePath()
        modules.name(model)
        self._recorder = Recorder(modules, self._sightings)
        self._trainee = PlainTrainee(model, optimizer, Loop())
        self._stack = ExitStack()
        self._history: History = self._stack.enter_context(history_of(place))
        self._stack.callback(self._recorder.close)
        self._recorder.turn(Phase.SETUP, step)
        self._adopt()
        self._stack.enter_context(modules)
        self._stack.enter_context(self._recorder)
        for hook in (
            model.register_forward_pre_hook(lambda *_: self._recorder.turn(Phase.FORWARD, step)),
            model.register_forward_hook(lambda *_: self._recorder.turn(Phase.BACKWARD, step)),
            optimizer.register_step_pre_hook(lambda *_: self._recorder.turn(Phase.OPTIMIZER, step)),
        ):
            self._stack.callback(hook.remove)
        self.began_seconds = time.monotonic() - started

    def report(self, step_seconds: float, samples_per_step: int | None) -> Report:
        for component, tensors, module in self._trainee.holdings():
            self._recorder.label(component, tensors, module=module)
        self._stack.close()
        run = observed_run(self._trainee, self._recorder, self._sightings, self._history, step_seconds)
        setting = Setting(device=device_here(str(self._place)), loop=Loop(steps=self._step))
        return report_of(run, setting, kind="measured", title=None, batch_size=samples_per_step)

    def drop(self) -> None:
        self._stack.close()

    def _adopt(self) -> None:
        for component, tensors, module in self._trainee.holdings():
            self._recorder.adopt(component, tensors, module=module)
