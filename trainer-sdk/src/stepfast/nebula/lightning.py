"""Nebula's names for Lightning's users. Imported when one of them is asked for: Lightning need not be installed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from stepfast.errors import SpecError
from stepfast.integrations.lightning import StepfastCallback
from stepfast.integrations.lightningio import StepfastCheckpointIO as NebulaCheckpointIO
from stepfast.integrations.lightningnames import LightningModule, ModelCheckpoint, Trainer
from stepfast.nebula.settings import make_settings

_KEYS = {"persistent_storage_path", "persistent_time_interval"}


class NebulaCallback(StepfastCallback, ModelCheckpoint):  # type: ignore[misc]  # Lightning has no types here
    """Lightning's ModelCheckpoint, with the same arguments, whose checkpoints are steps of the job, also of a Trainer
    that was given no NebulaCheckpointIO.

    config_params: `persistent_storage_path`, for where no launcher names the job's storage, and
    `persistent_time_interval`, which is checked only: every checkpoint that ModelCheckpoint lists is persisted. Raises
    SpecError for others.
    """

    def __init__(self, *args: Any, config_params: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = dict(config_params or {})
        unknown = sorted(config.keys() - _KEYS)
        if unknown:
            raise SpecError(f"config_params.{unknown[0]}", f"is none of {', '.join(sorted(_KEYS))}")
        path, interval = (config.get(key) for key in ("persistent_storage_path", "persistent_time_interval"))
        self._settings = make_settings(path, interval, None, os.environ)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy.checkpoint_io, NebulaCheckpointIO):
            trainer.strategy.checkpoint_io = NebulaCheckpointIO()
        trainer.strategy.checkpoint_io.configure(self._settings)
        super().setup(trainer, pl_module, stage)


def __getattr__(name: str) -> Any:
    if name == "NebulaDeepspeedStrategy":  # DeepSpeed need not be installed either
        from stepfast.integrations.lightningdeepspeed import StepfastDeepSpeedStrategy

        return StepfastDeepSpeedStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["NebulaCallback", "NebulaCheckpointIO"]
