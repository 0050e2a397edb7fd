"""What a step is called that DeepSpeed has saved: by the folder and the tag."""

from __future__ import annotations

import hashlib
import os

from stepfast.layout import Manifest
from stepfast.step import is_tag
from stepfast.torch.sources import CommittedStep

_BETWEEN = "//"  # which no folder has in it but at its beginning


def tag_in(folder: str | os.PathLike[str], tag: str) -> str:
    """What a step is called that was saved there under that tag."""
    path = os.path.normpath(folder)
    named = f"{path}{_BETWEEN}{tag}"
    return named if is_tag(named) else f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}{_BETWEEN}{tag}"


def tag_of(found: CommittedStep | Manifest) -> str:
    """What DeepSpeed calls the step."""
    at = found.tag.find(_BETWEEN, 1)
    return (found.tag if at < 0 else found.tag[at + len(_BETWEEN) :]) or f"global_step{found.step}"


def folder_of(found: CommittedStep) -> str | None:
    """The folder that the step was saved in; None for one that DeepSpeed has not saved."""
    return folder_in(found.tag)


def folder_in(tag: str) -> str | None:
    """The folder in what a step is called."""
    at = tag.find(_BETWEEN, 1)
    return None if at < 0 else tag[:at]


__all__ = ["folder_in", "folder_of", "tag_in", "tag_of"]
