"""Lightning's DeepSpeed strategy, whose engine saves to the job's steps. It wants a GPU, as Lightning's own does."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepfast.errors import StateUnsupported
from stepfast.integrations.deepspeed import settings_of
from stepfast.integrations.deepspeedengine import StepfastCheckpointEngine, check_offload, replaced
from stepfast.integrations.deepspeedtags import folder_of, tag_in
from stepfast.integrations.lightningio import StepfastCheckpointIO, marks_of, step_of
from stepfast.integrations.lightningnames import DeepSpeedStrategy
from stepfast.nebula.settings import Settings
from stepfast.torch.rng import get_rng_state
from stepfast.torch.sources import CommittedStep

_TAG = "checkpoint"  # under which Lightning has DeepSpeed save, in a folder for each checkpoint


class StepfastDeepSpeedStrategy(DeepSpeedStrategy):
    """DeepSpeed, with each rank's share of a checkpoint staged as it is. Arguments: Lightning's own; the configuration
    may hold Nebula's block.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        configuration = self.config if isinstance(self.config, dict) else {}
        self.checkpoint_io = _FolderIO(every_rank=True, settings=settings_of(configuration.pop("nebula", None)))
        check_offload(configuration)
        self._engine: Any = None

    def init_deepspeed(self) -> None:
        self._engine = _Engine(Settings())
        self._engine.adopt(self.checkpoint_io.checkpoints)
        with replaced("create_checkpoint_engine", lambda *_, **__: self._engine):
            super().init_deepspeed()
        self._engine.serve(self.model)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """On every rank; returns when the rank's share is in memory."""
        self.checkpoint_io.check_options(storage_options)
        folder = os.path.relpath(self.broadcast(filepath))
        self._engine.next_step, self._engine.marks = step_of(checkpoint), marks_of(checkpoint)
        super().save_checkpoint(checkpoint, folder)
        self.checkpoint_io.saved_at(folder, self._engine.saved, tag_in(folder, _TAG))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """What was saved in that folder, also where the disk has nothing of it. Raises FileNotFoundError."""
        folder = os.path.relpath(self.broadcast(checkpoint_path))
        if not Path(folder, _TAG).exists():
            self.checkpoint_io.find(folder)
            os.makedirs(Path(folder, _TAG), exist_ok=True)  # Lightning looks for it
        checkpoint: dict[str, Any] = super().load_checkpoint(folder, weights_only)
        self.checkpoint_io.loaded(checkpoint, get_rng_state())  # the engine has set it; data may be shuffled yet
        return checkpoint


class _Engine(StepfastCheckpointEngine):
    marks: Sequence[str] = ()
    """Names that the next save is to have beside DeepSpeed's own."""

    def commit(self, info: Any) -> bool:
        if self._opened is not None:
            for name in self.marks:
                self._opened.put(name, True)
        return super().commit(info)


class _FolderIO(StepfastCheckpointIO):
    """For checkpoints that are folders, which DeepSpeed's engine fills."""

    in_folders = True

    def export_checkpoint(self, path: Any, to: str | os.PathLike[str]) -> None:
        raise StateUnsupported(
            f"{path} is DeepSpeed's: stepfast.integrations.deepspeed.export_checkpoint writes its files"
        )

    def tag_of(self, path: Any) -> str:
        return tag_in(os.path.relpath(path), _TAG)

    def path_of(self, found: CommittedStep) -> Path | None:
        folder = folder_of(found)
        return Path(folder) if folder is not None else None


__all__ = ["StepfastDeepSpeedStrategy"]
