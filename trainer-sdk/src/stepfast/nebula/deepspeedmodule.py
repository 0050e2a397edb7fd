"""Nebula as DeepSpeed up to 0.19.6 imports it, by the name `torch_nebula`: every rank commits every tag."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from stepfast.nebula import engine
from stepfast.nebula.api import (
    Checkpoint,
    _shutdown,
    flush_persistence,
    get_checkpoint,
    get_latest_checkpoint,
    list_checkpoints,
)
from stepfast.nebula.names import leave_names
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
    _find_without_a_disk()


def _find_without_a_disk() -> None:
    """DeepSpeed reads which checkpoint is the latest from a file beside it. Where the job has moved to another node
    there is none: then it is the job's latest, for all ranks. Every rank calls `load_checkpoint`, as DeepSpeed asks.
    """
    module: Any = sys.modules.get("deepspeed.runtime.engine")
    if module is None or hasattr(module.DeepSpeedEngine.load_checkpoint, "__wrapped__"):
        return
    theirs = module.DeepSpeedEngine.load_checkpoint

    @functools.wraps(theirs)
    def load_checkpoint(self: Any, load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        is_ours = type(self.checkpoint_engine).__name__ == "NebulaCheckpointEngine"
        if is_ours and tag is None:
            # One rank's disk may have the file and another's not: all of them decide alike.
            checkpoints = engine.checkpoints()
            has_file = checkpoints.is_so_for_all(os.path.isfile(os.path.join(load_dir, "latest")))
            found = None if has_file else checkpoints.latest()
            if found is not None:
                tag = found.tag or f"global_step{found.step}"
                leave_names(checkpoints, found.step, os.path.join(load_dir, tag))
        return theirs(self, load_dir, tag, *args, **kwargs)

    module.DeepSpeedEngine.load_checkpoint = load_checkpoint


__all__ = [
    "Checkpoint", "_shutdown", "flush_persistence", "get_checkpoint", "get_latest_checkpoint", "init",
    "list_checkpoints",
]  # fmt: skip
