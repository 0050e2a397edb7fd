"""The names under which DeepSpeed looks for a checkpoint's files before it asks for what is in them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from stepfast.torch.sources import CommittedStep
from stepfast.torch.tagged import TaggedCheckpoints


def leave_names(
    checkpoints: TaggedCheckpoints, found: CommittedStep, load_dir: str, *, but: Collection[str] = ()
) -> str:
    """Makes empty files of the step's names in the tag's folder, where there are none, as on a disk that has seen
    nothing of the job; returns the tag. Every rank calls it.
    """
    tag = found.tag or f"global_step{found.step}"
    folder = Path(load_dir, tag)
    names = checkpoints.names_of_all(found.step)
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name not in but:
            (folder / name).touch(exist_ok=True)
    return tag
