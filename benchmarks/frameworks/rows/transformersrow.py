"""Transformers' Trainer, which has no asynchronous way of its own."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.frameworks.clock import Clock, Task, loss_of, make_batch, make_model
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from stepfast.integrations.transformers import StepfastTrainerMixin


class Model(nn.Module):
    """The benchmark's, that tells its loss as Trainer wants it."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.net = make_model(layers)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": loss_of(self.net, x)}


class Saving(TrainerCallback):
    """Asks for a save when it is due."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._clock.tick()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = self._clock.is_due

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._clock.tell()


class StepfastTrainer(StepfastTrainerMixin, Trainer):
    """Saves through Stepfast."""


def main() -> None:
    task = Task.read()
    clock = Clock(task)
    arguments = TrainingArguments(
        output_dir="transformers", max_steps=task.iterations, per_device_train_batch_size=1, save_strategy="no",
        report_to=[], disable_tqdm=True, use_cpu=True, logging_strategy="no", max_grad_norm=0,
    )  # fmt: skip
    kind = StepfastTrainer if task.way == "stepfast" else Trainer
    data = [{"x": make_batch()}] * task.iterations
    kind(model=Model(task.layers), args=arguments, train_dataset=data, callbacks=[Saving(clock)]).train()


if __name__ == "__main__":
    main()
