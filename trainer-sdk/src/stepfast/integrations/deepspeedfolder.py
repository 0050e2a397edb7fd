"""What lies on this disk where DeepSpeed saves: files of its own, or names that stand for a step of the job."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path

from stepfast.integrations.pointers import write_file

LATEST = "latest"


class Files(StrEnum):
    """What a tag's folder holds."""

    NONE = "None"
    NAMES = "Names"  # some have no bytes: what they stand for is in the job's storage, or was never committed
    REAL = "Real"


def latest_tag(folder: str | os.PathLike[str]) -> str | None:
    """The tag that `latest` names."""
    try:
        return Path(folder, LATEST).read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None


def files_of(folder: str | os.PathLike[str], tag: str) -> Files:
    """What is there under that tag. One file without bytes among others is what a save that replaced them has left."""
    sizes = [path.stat().st_size for path in Path(folder, tag).glob("*.pt")]
    if not sizes:
        return Files.NONE
    return Files.REAL if all(sizes) else Files.NAMES


def has_bytes(path: str | os.PathLike[str]) -> bool:
    """Whether there is a file, and something in it."""
    return os.path.isfile(path) and os.path.getsize(path) > 0


def leave_name(path: str | os.PathLike[str]) -> None:
    """A file of that name and no bytes, whatever was there."""
    if not os.path.isfile(path) or os.path.getsize(path):
        write_file(os.path.dirname(path), os.path.basename(path), b"")


def write_latest(folder: str | os.PathLike[str], tag: str) -> None:
    """Has `latest` name the tag."""
    write_file(folder, LATEST, tag.encode())


__all__ = ["Files", "files_of", "has_bytes", "latest_tag", "leave_name", "write_latest"]
