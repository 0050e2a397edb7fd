"""A committed step as one file that plain torch opens."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from stepfast import catalog
from stepfast.errors import CheckpointNotFound, StorageError
from stepfast.storage import Store
from stepfast.storage.faults import storage_error
from stepfast.torch.reader import StepReader, reading_threads
from stepfast.torch.sources import DirectSource


def export_torch(store: Store, step: int, rank: int, target: Path, *, weights_only: bool) -> None:
    """Writes the state of one rank, replicated tensors gathered, to a file for `torch.load`.

    `store` is the job's folder. Raises CheckpointNotFound, CheckpointDamaged, CheckpointUnsafe, StorageError.
    """
    reader = StepReader(DirectSource(store, "", run=""), step, name=_name_of(store, step), threads=reading_threads(1))
    with closing(reader):
        root = reader.read(rank, {}, weights_only=weights_only)
    save_file(root, target)


def save_file(state: Any, target: Path) -> None:
    """`torch.save`, with a storage's errors. Raises StorageError."""
    try:
        # By a file object: by its name torch would write that into the file.
        with target.open("wb") as file:
            torch.save(state, file)
    except OSError as error:
        raise storage_error(error, f"write {target}") from error
    except RuntimeError as error:  # what torch makes of a write that fails
        raise StorageError(f"write {target}: {str(error).splitlines()[0]}") from error


def _name_of(store: Store, step: int) -> str:
    """What the step's files are called: the Checkpointer's `name`."""
    _, parts = catalog.open_step(store, "", step)
    names = sorted({file.name for part in parts for file in part.files})
    if len(names) != 1:
        raise CheckpointNotFound(
            f"step {step} holds {', '.join(names) or 'no files'}: not the state of one Checkpointer"
        )
    return names[0]
