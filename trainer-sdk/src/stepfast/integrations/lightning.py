"""Lightning with Stepfast's checkpoints: a CheckpointIO, strategies, a callback.

    io = StepfastCheckpointIO()
    trainer = Trainer(plugins=[io], callbacks=[StepfastCallback(), ModelCheckpoint(every_n_train_steps=100)])
    trainer.fit(model, data, ckpt_path=io.latest_checkpoint())

Where Lightning writes a checkpoint's file lies a small one that says which step it is; Lightning's own rules
(save_top_k, save_last, versions of names) go on working with these. What ModelCheckpoint lists is never removed by
retention, and what it removes goes when what replaced it is committed, never before.

Needs Lightning 2.5 or newer (`lightning`, or `pytorch_lightning`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepfast.integrations.lightningio import SUFFIX, StepfastCheckpointIO
from stepfast.integrations.lightningnames import Callback, LightningModule, ModelCheckpoint, Trainer
from stepfast.integrations.lightningstrategies import (
    StepfastDDPStrategy,
    StepfastFSDPStrategy,
    StepfastModelParallelStrategy,
)
from stepfast.torch.rng import set_rng_state

STOPPED = f"stopped{SUFFIX}"  # the checkpoint of a job that is to be stopped


class StepfastCallback(Callback):
    """Tells the job's status of each step, puts the random generators where the loaded checkpoint had them, and saves
    the last step of a job that is to be stopped, behind all callbacks.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        io = trainer.strategy.checkpoint_io
        if isinstance(io, StepfastCheckpointIO):
            io.rng = None  # of what was only looked at
            if not isinstance(trainer.callbacks[-1], _StepsEnd):
                trainer.callbacks.append(_StepsEnd())
        super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Before the next epoch's data is shuffled.
        self._restore(trainer, at_epochs_end=True)
        super().on_fit_start(trainer, pl_module)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Behind on_fit_start; for validation or test no generator is touched.
        if trainer.strategy.restore_checkpoint_after_setup and trainer.training:
            self._restore(trainer, at_epochs_end=True)
        super().on_load_checkpoint(trainer, pl_module, checkpoint)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # In the middle of an epoch its data was shuffled before.
        self._restore(trainer, at_epochs_end=False)
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def _restore(self, trainer: Trainer, *, at_epochs_end: bool) -> None:
        io = trainer.strategy.checkpoint_io
        if isinstance(io, StepfastCheckpointIO) and io.rng is not None and io.is_epochs_end is at_epochs_end:
            set_rng_state(io.rng)
            io.rng = None


class _StepsEnd(Callback):
    """The last of the Trainer's: what the others keep has this step in it when it is saved. Lightning itself would have
    only its Checkpoint callbacks behind all others, and takes the first of these for the one that knows the best model.
    """

    _told_step = 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        io = trainer.strategy.checkpoint_io
        # Where gradients are only being accumulated the step stays.
        if trainer.global_step == self._told_step or trainer.callbacks[-1] is not self:
            return
        self._told_step = trainer.global_step
        io.checkpoints.progress(trainer.global_step, trainer.callback_metrics)
        if io.checkpoints.is_last_step(trainer.global_step):
            trainer.save_checkpoint(_folder_of(trainer) / STOPPED)
            saved_step = trainer.strategy.broadcast(io.saved and io.saved.step)  # rank 0 saves, be it alone
            io.checkpoints.wait_to_be_stopped(saved_step)


def _folder_of(trainer: Trainer) -> Path:
    """Where the first ModelCheckpoint saves."""
    callback = trainer.checkpoint_callback
    known = callback.dirpath if isinstance(callback, ModelCheckpoint) else None
    return Path(known or trainer.default_root_dir)


__all__ = [
    "StepfastCallback", "StepfastCheckpointIO", "StepfastDDPStrategy", "StepfastFSDPStrategy",
    "StepfastModelParallelStrategy",
]  # fmt: skip
