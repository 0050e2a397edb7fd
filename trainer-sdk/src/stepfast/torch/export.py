"""A committed step as one file that plain torch opens."""

from __future__ import annotations

from pathlib import Path

import torch

from stepfast.storage import Store
from stepfast.torch.reader import DirectSource, StepReader


def export_torch(store: Store, step: int, rank: int, target: Path, *, weights_only: bool) -> None:
    """Writes the state of one rank, replicated tensors gathered, to a file for `torch.load`.

    `store` is the job's folder. Raises CheckpointNotFound, CheckpointDamaged, CheckpointUnsafe.
    """
    reader = StepReader(DirectSource(store, "", run=""), step, name="state")
    try:
        root, _ = reader.read(rank, weights_only=weights_only)
    finally:
        reader.close()
    torch.save(root, target)
