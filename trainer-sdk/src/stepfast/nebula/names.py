"""The names under which DeepSpeed looks for a checkpoint's files before it asks for what is in them."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from stepfast.torch.tagged import TaggedCheckpoints


def leave_names(
    checkpoints: TaggedCheckpoints, step: int, folder: str | os.PathLike[str], *, but: Collection[str] = ()
) -> None:
    """Makes empty files of the step's names in its tag's folder, where there are none, as on a disk that has seen
    nothing of the job. Every rank calls it.
    """
    names = checkpoints.names_of_all(step)
    os.makedirs(folder, exist_ok=True)
    for name in names:
        if name not in but:
            Path(folder, name).touch(exist_ok=True)
