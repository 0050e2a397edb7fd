"""Files that say which step of the job is meant, in the place of a framework's checkpoints.

Such a pointer is a file of that name in the checkpoint's folder, or, where the framework writes one file, that file.
The framework's own rules go on working with these: what it removes is removed as a step, once what was saved last is
committed and never before; on a disk that has seen nothing of the job they are made again. What somebody else removes,
as whoever tidies old files up does, and what cannot be read, stays a step.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepfast.errors import CheckpointNotFound
from stepfast.integrations.removals import Removals
from stepfast.step import is_tag
from stepfast.storage.localfile import is_temp_name, remove_quietly, target_name, temp_path
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
    """Whether the path stands for a step, of whichever job. Raises OSError where that cannot be read."""
    return read_pointer(path) is not None


def read_pointer(path: Any) -> dict[str, Any] | None:
    """What the pointer at that path says: `step`, `tag`, `job`, and `storage`; None for a path that stands for none.
    Raises OSError where it cannot be read.
    """
    file = _file_of(Path(path))
    try:
        if file.stat().st_size > _POINTER_BYTES:
            return None
        about = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
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
    """Whole or not at all, whoever else writes it, on this node or on another that has the folder, too."""
    target = Path(folder, name)
    building = temp_path(target)
    try:
        building.write_bytes(content)
        os.replace(building, target)
    except OSError:
        remove_quietly(building)
        raise


def is_unfinished_pointer(name: str) -> bool:
    """Whether the file of that name is a pointer that a process has begun to write, or was killed over."""
    return is_temp_name(name) and target_name(name) == POINTER


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
        self._removed: set[Path] = set()  # by the framework, or the script
        self._lost: set[Path] = set()  # whose pointer somebody else has removed
        self._folders: dict[Path, tuple[int, int] | None] = {}  # that paths are in, as they were
        self._removals = Removals(checkpoints)

    def point(self, path: Any, step: int, tag: str) -> None:
        """Has the path stand for that step; makes folders that are not there yet."""
        environment = self.checkpoints.environment
        os.makedirs(path if self._in_folders else os.path.dirname(path) or ".", exist_ok=True)
        about = {"step": step, "tag": tag, "job": str(environment.job), "storage": environment.storage_uri}
        file = _file_of(Path(path))
        write_file(file.parent, file.name, json.dumps(about).encode())
        self._removed.discard(Path(path).absolute())
        self._lost.discard(Path(path).absolute())
        self._note_folder(Path(path).absolute())
        steps = self._steps.setdefault(Path(path).absolute(), [])
        if step not in steps:
            steps.append(step)

    def find(self, path: Any, tag: str, scope: Scope | None = None) -> CommittedStep | None:
        """The committed step that the path stands for; of one that was lost with its attempt, or of a pointer that is
        gone, the newest of that tag, or the scope's that was saved there. Raises CheckpointNotFound for another job's,
        StorageError, OSError where the pointer cannot be read.
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
            pointer = None if path.is_symlink() or path.absolute() in wanted else _readable(path)
            if pointer is not None and self._is_ours(pointer):
                remove_pointer(path)
        for path, steps in wanted.items():
            self._steps[path] = [found.step for found in steps]
            self._note_folder(path)
            pointer = _readable(path)
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
        """Has the path stand for nothing: its step goes as `sweep` says. Rank 0 calls it. Raises as `find` does."""
        pointer = read_pointer(path)
        steps = self._steps.setdefault(Path(path).absolute(), [])
        is_known = pointer is not None and pointer["step"] in steps  # else to find it takes until all is committed
        if not is_known and (pointer is None or self._is_ours(pointer)):
            found = self.find(path, tag)
            if found is not None and found.step not in steps:
                steps.append(found.step)
        remove_pointer(path)
        self._removed.add(Path(path).absolute())
        self.sweep()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While the framework saves, or ends, and removes what is too many: `sweep` removes the steps of what it has
        removed meanwhile. It always leaves one: where all is gone the disk is, and that was not the framework.
        """
        if self.checkpoints.environment.rank != 0:  # rank 0 sweeps
            yield
            return
        before = [path for path in self._steps if not _is_gone(path)]
        try:
            yield
        finally:
            gone = {path for path in before if _is_gone(path)}
            if not all(map(_is_gone, self._steps)):
                self._removed |= gone

    def look(self) -> None:
        """Where the script, not the framework, removes what is too many, between any two saves: called before each of
        them, has `sweep` remove the steps of folders that are gone whole, of a disk that is still there. Whoever tidies
        up takes old files first.
        """
        gone = {path for path in self._steps.keys() - self._lost if _is_gone(path)}
        self._removed |= {
            path
            for path in gone
            if not os.path.lexists(path) and _identity(path.parent) == self._folders.get(path.parent) is not None
        }
        self._lost |= gone - self._removed

    def sweep(self) -> None:
        """Removes what is of no more use: steps whose pointer the framework has removed, and all but the newest of each
        path, each of them once what this rank saved last is committed. Rank 0 calls it.
        """
        for path, steps in list(self._steps.items()):
            kept = [] if path in self._removed else steps[-1:]
            self._removals.begin(steps[: len(steps) - len(kept)])
            if kept:
                self._steps[path] = kept
            else:
                del self._steps[path]
        self._removed.clear()

    def finish(self) -> None:
        """Waits until all is persisted, and removed that was to be. Raises StorageUnavailable."""
        self._removals.finish()

    def _note_folder(self, path: Path) -> None:
        self._folders[path.parent] = _identity(path.parent)

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


def _readable(path: Path) -> dict[str, Any] | None:
    """As `read_pointer`; None, too, where it cannot be read."""
    with suppress(OSError):
        return read_pointer(path)
    return None


def _identity(folder: Path) -> tuple[int, int] | None:
    """Which folder that is: another one where something is mounted there, or is no longer; None: none to be seen."""
    try:
        about = folder.stat()
    except OSError:
        return None
    return about.st_dev, about.st_ino


def _is_gone(path: Path) -> bool:
    """Whether there is no pointer for certain, not only none that could be looked at."""
    try:
        _file_of(path).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _file_of(path: Path) -> Path:
    return path / POINTER if path.is_dir() else path


__all__ = [
    "POINTER", "Pointers", "Scope", "has_pointer", "is_unfinished_pointer", "number_at_end", "path_of", "read_pointer",
    "remove_pointer", "tag_of", "write_file",
]  # fmt: skip
