"""Lightning's Trainer; its asynchronous way is AsyncCheckpointIO."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from benchmarks.frameworks.clock import Clock, Task, loss_of, make_batch, make_model
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import AsyncCheckpointIO

from stepfast.integrations.lightning import StepfastCheckpointIO


class Model(LightningModule):
    """The benchmark's."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.net = make_model(layers)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return loss_of(self.net, batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Saving(Callback):
    """Saves when it is due."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_train_batch_start(self, *_: Any) -> None:
        self._clock.tick()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._clock.is_due:
            trainer.save_checkpoint(f"lightning/{trainer.global_step}.ckpt")

    def on_train_end(self, *_: Any) -> None:
        self._clock.tell()


def main() -> None:
    warnings.filterwarnings("ignore")
    task = Task.read()
    clock = Clock(task)
    kinds: dict[str, list[Any]] = {"default": [], "async": [AsyncCheckpointIO], "stepfast": [StepfastCheckpointIO]}
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=task.iterations, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Saving(clock)],
        plugins=[kind() for kind in kinds[task.way]],
    )  # fmt: skip
    trainer.fit(Model(task.layers), [make_batch()[None]] * task.iterations)


if __name__ == "__main__":
    main()
