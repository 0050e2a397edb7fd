"""A small network that learns handwriting's digits, with Lightning's Trainer.

What Stepfast asks of a Trainer is a strategy and a callback: look for "Stepfast:". Killed at any moment and started
again, also where the disk is empty, it goes on bit for bit.

    stepfast run train.py
    stepfast run --nproc-per-node 2 train.py --crash-at-step 60      see a recovery
    stepfast run --nproc-per-node 2 train.py --fsdp                  the model divided over the ranks (FSDP2)
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from stepfast.integrations.lightning import StepfastCallback, StepfastDDPStrategy, StepfastModelParallelStrategy

CLASSES, PIXELS = 10, 64


class Digits(LightningModule):
    """Two layers; divided over the ranks where the strategy has a mesh for it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(PIXELS, 128), nn.Dropout(0.1), nn.ReLU(), nn.Linear(128, CLASSES))

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        images, digits = batch
        loss = nn.functional.cross_entropy(self.net(images), digits)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Crash(Callback):
    """The last rank kills itself, in the first attempt."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        is_first = os.environ.get("STEPFAST_ATTEMPT") == "1"
        if trainer.global_step == self._step and is_first and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def digits() -> TensorDataset:
    """1,024 noisy pictures of ten patterns."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.rand(CLASSES, PIXELS, generator=generator)
    labels = torch.randint(CLASSES, (1024,), generator=generator)
    return TensorDataset(patterns[labels] + 0.3 * torch.randn(1024, PIXELS, generator=generator), labels)


def main(options: argparse.Namespace) -> None:
    """Trains, from the latest step on if there is one."""
    seed_everything(0, verbose=False)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    # Stepfast: in the place of DDPStrategy and ModelParallelStrategy.
    if options.fsdp:
        strategy: Any = StepfastModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    else:
        strategy = StepfastDDPStrategy()
    trainer = Trainer(
        accelerator="auto", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), strategy=strategy,
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")), max_steps=options.steps, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[
            StepfastCallback(),  # Stepfast: progress, random generators, the last step of a job that is to be stopped
            Crash(options.crash_at_step),
            ModelCheckpoint(options.output, every_n_train_steps=20, save_top_k=2, monitor="step", mode="max"),
        ],
    )  # fmt: skip
    # Stepfast: the job's latest step, also where the disk has nothing of it; None at first.
    latest = strategy.checkpoint_io.latest_checkpoint()
    model = Digits()
    data = DataLoader(digits(), batch_size=32, shuffle=True)
    trainer.fit(model, data, ckpt_path=latest, weights_only=False)
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss']:.4f}", flush=True)
    if not options.fsdp and trainer.is_global_zero:
        # Stepfast: a regular checkpoint, for load_from_checkpoint and for plain Trainers.
        best = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]  # there is one
        strategy.checkpoint_io.export_checkpoint(best, Path(options.output, "exported", "digits.ckpt"))
    trainer.strategy.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", default="digits")
    parser.add_argument("--crash-at-step", type=int, default=0)
    parser.add_argument("--fsdp", action="store_true")
    main(parser.parse_args())
