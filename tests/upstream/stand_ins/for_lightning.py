"""Lightning's default `CheckpointIO` that is Stepfast's; all tests of one run are trainers of one job.

Some tests open a checkpoint's file themselves: `torch.load` gives them what it stands for.
"""

import functools
import os
import tempfile
from typing import Any

import torch
from lightning.pytorch.strategies import strategy

from stepfast.integrations.lightning import StepfastCheckpointIO
from stepfast.integrations.pointers import has_pointer

if "STEPFAST_STORAGE_URI" not in os.environ:  # processes that tests start have it from pytest's
    scratch = tempfile.TemporaryDirectory(prefix="stepfast-upstream-")
    os.environ["STEPFAST_STORAGE_URI"] = scratch.name

theirs = torch.load


@functools.wraps(theirs)
def load(file: Any, map_location: Any = None, *args: Any, weights_only: bool | None = None, **kwargs: Any) -> Any:
    path = file if isinstance(file, str | os.PathLike) else getattr(file, "path", None)
    if isinstance(path, str | os.PathLike) and has_pointer(path):
        return StepfastCheckpointIO().load_checkpoint(path, map_location, weights_only)
    return theirs(file, map_location, *args, weights_only=weights_only, **kwargs)


torch.load = load
strategy.TorchCheckpointIO = StepfastCheckpointIO
