"""Files that say which step of the job is meant, in the place of a framework's checkpoints.

Such a pointer is a file of that name in the checkpoint's folder, or, where the framework writes one file, that file.
The framework's own rules go on working with these: what it removes is removed as a step, once what was saved last is
committed and never before; on a disk that has seen nothing of the job they are made again.

A step's tag is the path of its checkpoint as seen from where the script runs, so that trainers of one job whose folders
differ never take each other's (`tag_of`, `path_of`, `Scope`). A pointer means the step that it names, of its job, in
its storage, with its tag: what is lost with its attempt leaves its number to another step.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepfast.errors import CheckpointNotFound
from stepfast.integrations.removals import Removals
from stepfast.step import is_tag
from stepfast.torch.sources import CommittedStep
from stepfast.torch.tagged import TaggedCheckpoints
from stepfast.torch.writer import Saved

log = logging.getLogger("stepfast")

POINTER = "stepfast.json"  # its name in a folder
_POINTER_BYTES = 4096  # what is larger is none
_NUMBER = re.compile(r"([0-9]{1,18})$")
_NUMBERED = re.compile(r"checkpoint[-_][0-9]{1,18}")  # by Trainer, and by Accelerate
_DIGEST = "~"  # what stands for a path that is too long for a tag begins so


def has_pointer(path: Any) -> bool:
    """Whether the path stands for a step, of whichever job."""
    return read_pointer(path) is not None


def read_pointer(path: Any) -> dict[str, Any] | None:
    """What the pointer at that path says: `step`, `tag`, `job`, and `storage`; None for a path that stands for none."""
    file = _file_of(Path(path))
    try:
        if file.stat().st_size > _POINTER_BYTES:
            return None
        about = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    kinds = {"step": int, "tag": str, "job": str, "storage": str}
    is_one = isinstance(about, dict) and all(isinstance(about.get(key), kind) for key, kind in kinds.items())
    return about if is_one else None


def remove_pointer(path: Any) -> None:
    """Leaves nothing there: `Pointers.sweep` removes the step."""
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        Path(path).unlink(missing_ok=True)


def write_file(folder: Any, name: str, content: bytes) -> None:
    """Whole or not at all, whoever else writes it."""
    building = Path(folder, f".{name}.{os.getpid()}")
    building.write_bytes(content)
    os.replace(building, Path(folder, name))


def number_at_end(text: str) -> int | None:
    """Of `step_500` 500; None where there is no number at the end."""
    match = _NUMBER.search(text)
    return int(match[1]) if match else None


def tag_of(path: Any, suffix: str = "") -> str:
    """What a step is called that is saved there: what is saved there again replaces it. `suffix`: of all names."""
    folder, name = os.path.split(os.path.relpath(path).removesuffix(suffix))
    if not folder and _NUMBERED.fullmatch(name):
        folder = "."  # without a folder such a tag is an older one, of whichever folder
    tags = (os.path.join(one, other) for one, other in ((folder, name), (_digest(folder), name)))
    return next(filter(is_tag, tags), os.path.join(_digest(folder), _digest(name)))


def path_of(tag: str, suffix: str = "", *, folder: Any = None) -> Path | None:
    """Where the step was saved that is called so; None where that cannot be told. `folder`: None, too, unless it was
    directly in there.
    """
    if folder is None:
        return Path(f"{tag}{suffix}") if tag and not tag.startswith(_DIGEST) else None
    path = Path(folder, f"{tag.rpartition('/')[2]}{suffix}")
    return path if tag and tag_of(path, suffix) == tag else None


@dataclass(frozen=True, slots=True)
class Scope:
    """What is one trainer's of the job's steps: the numbered checkpoints of its folder. `prefix`: of their names."""

    folder: Path
    prefix: str

    def path(self, number: int) -> Path:
        """The checkpoint of that number."""
        return self.folder / f"{self.prefix}{number}"

    def own(self, steps: Sequence[CommittedStep]) -> list[tuple[CommittedStep, Path]]:
        """Its steps among these, and where they were saved. Older tags say no folder: such a step is the trainer's in a
        job that has but one.
        """
        numbered = [found for found in steps if self._is_numbered(found.tag.rpartition("/")[2])]
        paths = [path_of(found.tag, folder=self.folder) for found in numbered]
        old = [self.folder / found.tag if self._is_numbered(found.tag) else None for found in numbered]
        if all(path or other for path, other in zip(paths, old, strict=True)):
            paths = [path or other for path, other in zip(paths, old, strict=True)]
        return [(found, path) for found, path in zip(numbered, paths, strict=True) if path is not None]

    def _is_numbered(self, name: str) -> bool:
        return name.startswith(self.prefix) and _NUMBERED.fullmatch(name) is not None


class Pointers:
    """Those of one trainer; rank 0 removes the steps whose pointer the framework has removed.

    in_folders: the framework's checkpoints are folders; otherwise files.
    """

    def __init__(self, checkpoints: TaggedCheckpoints, *, in_folders: bool = True) -> None:
        self.checkpoints, self._in_folders = checkpoints, in_folders
        self._steps: dict[Path, list[int]] = {}  # that each path has stood for, the newest last
        self._removals = Removals(checkpoints)

    def point(self, path: Any, step: int, tag: str) -> None:
        """Has the path stand for that step; makes folders that are not there yet."""
        environment = self.checkpoints.environment
        os.makedirs(path if self._in_folders else os.path.dirname(path) or ".", exist_ok=True)
        about = {"step": step, "tag": tag, "job": str(environment.job), "storage": environment.storage_uri}
        file = _file_of(Path(path))
        write_file(file.parent, file.name, json.dumps(about).encode())
        steps = self._steps.setdefault(Path(path).absolute(), [])
        if step not in steps:
            steps.append(step)

    def find(self, path: Any, tag: str, scope: Scope | None = None) -> CommittedStep | None:
        """The committed step that the path stands for; of one that was lost with its attempt, or of a pointer that is
        gone, the newest of that tag, or the scope's that was saved there. Raises CheckpointNotFound for another job's,
        StorageError.
        """
        pointer = read_pointer(path)
        if pointer is not None and not self._is_ours(pointer):
            raise CheckpointNotFound(
                f"{path} stands for step {pointer['step']} ({pointer['tag']}) of the job {pointer['job']} in "
                f"{pointer['storage']}, not of {self.checkpoints.environment.job} in "
                f"{self.checkpoints.environment.storage_uri}: export it in that job, and load what that writes"
            )
        leaving = self._removals.leaving  # before the list: what is removed by then is not in it
        steps = [found for found in self.checkpoints.steps() if found.step not in leaving]
        exact = [found for found in steps if pointer is not None and _names(pointer, found)]
        tagged = [found for found in steps if found.tag == tag]
        absolute = Path(path).absolute()
        own = () if scope is None or exact or tagged else scope.own(steps)
        chosen = exact or tagged or [found for found, there in own if there.absolute() == absolute]
        return chosen[-1] if chosen else None

    def make_again(self, path_of: Callable[[CommittedStep], Path | None], present: Iterable[Path]) -> None:
        """Has a path stand for each committed step that is to have one, oldest first; those of `present` that stand
        for one of this job's which was lost with its attempt are removed. One rank of a node calls it, before training
        begins.
        """
        wanted: dict[Path, list[CommittedStep]] = {}
        for found in self.checkpoints.steps():
            path = path_of(found)
            if path is not None:
                wanted.setdefault(path.absolute(), []).append(found)
        for path in present:
            pointer = None if path.is_symlink() or path.absolute() in wanted else read_pointer(path)
            if pointer is not None and self._is_ours(pointer):
                remove_pointer(path)
        for path, steps in wanted.items():
            self._steps[path] = [found.step for found in steps]
            pointer = read_pointer(path)
            if pointer is None or not self._is_ours(pointer) or not _names(pointer, steps[-1]):
                try:
                    self.point(path, steps[-1].step, steps[-1].tag)
                except OSError as error:
                    del self._steps[path]  # what has no pointer here is nothing that the framework has removed
                    log.warning("stepfast: %s cannot stand for step %s: %s", path, steps[-1].step, error)
        _date(sorted(wanted, key=lambda path: wanted[path][-1].step))

    def committed(self, saved: Saved) -> None:
        """Tells of a step that this rank has just saved."""
        self._removals.saved(saved)

    def remove(self, path: Any, tag: str) -> None:
        """Has the path stand for nothing: its step goes as `sweep` says. Rank 0 calls it. Raises StorageError."""
        pointer = read_pointer(path)
        steps = self._steps.setdefault(Path(path).absolute(), [])
        is_known = pointer is not None and pointer["step"] in steps  # else to find it takes until all is committed
        if not is_known and (pointer is None or self._is_ours(pointer)):
            found = self.find(path, tag)
            if found is not None and found.step not in steps:
                steps.append(found.step)
        remove_pointer(path)
        self.sweep()

    def sweep(self) -> None:
        """Removes what is of no more use: steps whose pointer is gone, and all but the newest of each path, each of
        them once what this rank saved last is committed. Rank 0 calls it.
        """
        for path, steps in list(self._steps.items()):
            kept = steps[-1:] if has_pointer(path) else []
            self._removals.begin(steps[: len(steps) - len(kept)])
            if kept:
                self._steps[path] = kept
            else:
                del self._steps[path]

    def finish(self) -> None:
        """Waits until all is persisted, and removed that was to be. Raises StorageUnavailable."""
        self._removals.finish()

    def _is_ours(self, pointer: Mapping[str, Any]) -> bool:
        environment = self.checkpoints.environment
        return (pointer["job"], pointer["storage"]) == (str(environment.job), environment.storage_uri)


def _date(paths: Sequence[Path]) -> None:
    """Gives the paths, the oldest first, dates that are seconds apart and past: frameworks tell by them which of their
    checkpoints is the newest, and Trainer goes by numbers instead where all are of one second.
    """
    now = time.time()
    for age, path in enumerate(reversed(paths), start=2):
        with suppress(OSError):
            os.utime(path, (now - age, now - age))


def _digest(text: str) -> str:
    return f"{_DIGEST}{hashlib.sha256(os.fsencode(text)).hexdigest()[:32]}"


def _names(pointer: Mapping[str, Any], found: CommittedStep) -> bool:
    return (pointer["step"], pointer["tag"]) == (found.step, found.tag)


def _file_of(path: Path) -> Path:
    return path / POINTER if path.is_dir() else path


__all__ = [
    "POINTER", "Pointers", "Scope", "has_pointer", "number_at_end", "path_of", "read_pointer", "remove_pointer",
    "tag_of", "write_file",
]  # fmt: skip
