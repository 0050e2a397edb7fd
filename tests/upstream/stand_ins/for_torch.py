"""`FileSystemWriter` and `FileSystemReader` of Stepfast: a path is a storage with a job of its own, and a tag."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.filesystem
from torch.distributed.checkpoint import _storage_utils
from torch.distributed.checkpoint.metadata import Metadata

from stepfast.environment import absolute_storage_uri, read_environment
from stepfast.torch.dcp import Sharing, StepfastStorageReader, StepfastStorageWriter, TaggedCheckpoints

TAG = "checkpoint"
_made: dict[tuple[str, int, int], TaggedCheckpoints] = {}


def checkpoints_at(path: Any) -> TaggedCheckpoints:
    is_grouped = dist.is_initialized()
    rank, size = (dist.get_rank(), dist.get_world_size()) if is_grouped else (0, 1)
    where = str(Path(os.fspath(path)).absolute())
    key = (where, rank, size)
    if key not in _made or not os.path.isdir(where):  # tests remove their folders, and make them again
        if key in _made:
            _made.pop(key).close()
        environment = replace(read_environment(), storage_uri=absolute_storage_uri(where), gang_scope=where)
        _made[key] = TaggedCheckpoints(sharing=Sharing.EVERY_RANK, environment=environment, persist_all=True)
    return _made[key]


class Writer(StepfastStorageWriter):
    def __init__(self, path: Any, *_: Any, **__: Any) -> None:
        super().__init__(checkpoints_at(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def reset(self, checkpoint_id: Any = None) -> None:
        if checkpoint_id is not None:
            self._checkpoints = checkpoints_at(checkpoint_id)
        super().reset(self._checkpoints.environment.gang_scope)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._tag = self._checkpoints.environment.gang_scope
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        self._checkpoints.flush()


class Reader(StepfastStorageReader):
    def __init__(self, path: Any, *_: Any, **__: Any) -> None:
        super().__init__(checkpoints_at(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def reset(self, checkpoint_id: Any = None) -> None:
        if checkpoint_id is not None:
            self._checkpoints = checkpoints_at(checkpoint_id)
        super().reset(self._checkpoints.environment.gang_scope)


for module in (dcp, torch.distributed.checkpoint.filesystem, _storage_utils):
    module.FileSystemWriter, module.FileSystemReader = Writer, Reader
