"""Where an export goes. Owned here: nothing stands under the target's name until it is whole and on disk.

Knows nothing of checkpoints: it hands out a temporary name beside the target and gives that the target's name at the
end. What a killed export leaves is hidden (`.<name>.….tmp`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepfast.errors import SpecError
from stepfast.storage.exclusive import place_exclusively
from stepfast.storage.faults import storage_error
from stepfast.storage.localfile import remove_quietly, sync_folder, temp_path

_TORCH = (".pt", ".pth", ".bin")
SAFETENSORS = ".safetensors"


def is_torch_file(to: Path) -> bool:
    """Whether the target names a torch file; False: a folder. Raises SpecError for any other name."""
    if to.suffix.lower() in _TORCH:
        return True
    if to.suffix.lower() == SAFETENSORS:
        raise SpecError(
            "TO",
            f"{to}: a step is one safetensors file a rank, not one file: name a folder (without a suffix), or a .pt "
            "file for one rank's whole state",
        )
    if to.suffix:
        raise SpecError(
            "TO",
            f"{to}: {to.suffix} is nothing that can be exported: name a torch file ({', '.join(_TORCH)}), or a folder "
            "(without a suffix) for safetensors files",
        )
    return False


@contextmanager
def placed_file(to: Path, *, force: bool, option: str = "TO") -> Iterator[Path]:
    """A temporary file's name, which becomes the target's when the block ends well. Raises SpecError, StorageError.

    `option`: what named the target, for messages.
    """
    target = Path(os.path.realpath(to))
    with _translated(to):
        if target.is_dir():
            raise SpecError(option, f"{to} is a folder: name a file in it, or a folder without a suffix")
        if target.exists() and not force:
            raise _exists(to, option)
        target.parent.mkdir(parents=True, exist_ok=True)
        temp = temp_path(target)
        try:
            yield temp
            _sync(temp)
            if force:
                os.replace(temp, target)
            elif not place_exclusively(temp, target):
                raise _exists(to, option)
        finally:
            remove_quietly(temp)
        sync_folder(target.parent)


@contextmanager
def placed_folder(to: Path, *, force: bool, suffix: str = SAFETENSORS) -> Iterator[Path]:
    """A temporary folder, which becomes the target when the block ends well. Raises SpecError, StorageError.

    An empty folder is taken as it is. By force an earlier export is replaced: a folder of nothing but files of that
    suffix, so that no slip of the finger removes anything else.
    """
    target = Path(os.path.realpath(to))
    with _translated(to):
        _check_folder(to, target, force=force, suffix=suffix)
        target.parent.mkdir(parents=True, exist_ok=True)
        temp = temp_path(target)
        temp.mkdir()
        try:
            yield temp
            for file in temp.iterdir():
                _sync(file)
            sync_folder(temp)
            if force and target.exists():
                aside = temp_path(target)
                os.rename(target, aside)
                os.rename(temp, target)
                shutil.rmtree(aside)
            else:
                os.rename(temp, target)
        finally:
            shutil.rmtree(temp, ignore_errors=True)
        sync_folder(target.parent)


def _check_folder(to: Path, target: Path, *, force: bool, suffix: str) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise SpecError("TO", f"{to} is a file: name a folder that does not exist yet")
    entries = list(target.iterdir())
    if not entries:
        return
    if not force:
        raise _exists(to)
    foreign = sorted(entry.name for entry in entries if entry.suffix != suffix or not entry.is_file())
    if foreign:
        raise SpecError("TO", f"{to} holds {foreign[0]}, which is no export: name another folder, or remove it")


def _exists(to: Path, option: str = "TO") -> SpecError:
    return SpecError(option, f"{to} exists already: name another target, or replace it with --force")


def _sync(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _translated(to: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(error, f"write {to}") from error
