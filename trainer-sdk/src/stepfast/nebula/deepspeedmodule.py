"""Nebula as DeepSpeed up to 0.19.6 imports it, by the name `torch_nebula`: every rank commits every tag."""

from __future__ import annotations

import os

from stepfast.nebula import engine
from stepfast.nebula.api import (
    Checkpoint,
    _shutdown,
    flush_persistence,
    get_checkpoint,
    get_latest_checkpoint,
    list_checkpoints,
)
from stepfast.nebula.settings import make_settings
from stepfast.torch.tagged import Sharing


def init(
    persistent_storage_path: object = None,
    persistent_time_interval: object = None,
    num_of_version_in_retention: object = None,
) -> None:
    """As `nebulaml.init`; DeepSpeed calls it on every rank. Raises SpecError."""
    settings = make_settings(persistent_storage_path, persistent_time_interval, num_of_version_in_retention, os.environ)
    engine.configure(settings, Sharing.EVERY_RANK)


__all__ = [
    "Checkpoint", "_shutdown", "flush_persistence", "get_checkpoint", "get_latest_checkpoint", "init",
    "list_checkpoints",
]  # fmt: skip
