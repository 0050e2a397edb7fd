"""Folders that stand for steps of the job, for frameworks that know their checkpoints by folders.

In such a folder lies a small file that says which step is meant. The framework's own rules go on working with the
folders: what it removes is removed as a step, once what is newer is committed and never before; on a disk that has seen
nothing of the job the folders are made again.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepfast.environment import read_environment
from stepfast.errors import StepfastError
from stepfast.nebula.settings import make_settings
from stepfast.torch.sources import CommittedStep
from stepfast.torch.tagged import Sharing, TaggedCheckpoints
from stepfast.torch.writer import Saved

log = logging.getLogger("stepfast")

POINTER = "stepfast.json"
_NUMBER = re.compile(r"([0-9]{1,18})$")

_made: list[TaggedCheckpoints] = []


def checkpoints_of_process() -> TaggedCheckpoints:
    """One for all trainers of the process: it is the process that is a rank. Every rank saves; the framework says what
    is kept: a best step may be older than all that retention would leave.
    """
    if not _made or _made[0].is_closed:
        settings = make_settings(None, None, None, os.environ)
        environment = replace(settings.apply(read_environment(), os.environ), max_to_keep=0)
        _made[:] = [TaggedCheckpoints(sharing=Sharing.EVERY_RANK, environment=environment, persist_all=True)]
    return _made[0]


def has_pointer(folder: Any) -> bool:
    """Whether the folder stands for a step, of whichever job."""
    return read_pointer(folder) is not None


def read_pointer(folder: Any) -> dict[str, Any] | None:
    """What the folder's file says: `step` and `tag`; None for a folder that stands for no step."""
    try:
        about = json.loads(Path(folder, POINTER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return about if isinstance(about, dict) and isinstance(about.get("step"), int) else None


def write_file(folder: Any, name: str, content: bytes) -> None:
    """Whole or not at all, whoever else writes it."""
    building = Path(folder, f".{name}.{os.getpid()}")
    building.write_bytes(content)
    os.replace(building, Path(folder, name))


def number_at_end(text: str) -> int | None:
    """Of `step_500` 500; None where there is no number at the end."""
    match = _NUMBER.search(text)
    return int(match[1]) if match else None


class CheckpointFolders:
    """Those of one process; rank 0 removes the steps whose folder the framework has removed."""

    def __init__(self, checkpoints: TaggedCheckpoints) -> None:
        self.checkpoints = checkpoints
        self._steps: dict[Path, list[int]] = {}  # that each folder has stood for, the newest last
        self._saves: dict[int, Saved] = {}
        self._newest: Saved | None = None
        self._removals: ThreadPoolExecutor | None = None

    def point(self, folder: Any, step: int, tag: str) -> None:
        """Makes the folder, if need be, and has it stand for that step."""
        environment = self.checkpoints.environment
        os.makedirs(folder, exist_ok=True)
        about = {"step": step, "tag": tag, "job": str(environment.job), "storage": environment.storage_uri}
        write_file(folder, POINTER, json.dumps(about).encode())
        steps = self._steps.setdefault(Path(folder).absolute(), [])
        if step not in steps:
            steps.append(step)

    def find(self, folder: Any, tag: str) -> CommittedStep | None:
        """The committed step that the folder stands for; of one that was lost with its attempt, or of a folder that is
        gone, the newest of that tag. Raises StorageError.
        """
        pointer = read_pointer(folder)
        steps = self.checkpoints.steps()
        exact = [found for found in steps if pointer is not None and found.step == pointer["step"]]
        tagged = [found for found in steps if found.tag == tag]
        chosen = exact or tagged
        return chosen[-1] if chosen else None

    def make_again(self, folder_of: Callable[[CommittedStep], Path | None], present: Iterable[Path]) -> None:
        """Has a folder stand for each committed step that is to have one, oldest first; those of `present` that stand
        for a step which was lost with its attempt are removed. One rank of a node calls it, before training begins.
        """
        wanted: dict[Path, list[CommittedStep]] = {}
        for found in self.checkpoints.steps():
            folder = folder_of(found)
            if folder is not None:
                wanted.setdefault(folder.absolute(), []).append(found)
        for folder in present:
            if folder.absolute() not in wanted and has_pointer(folder):
                shutil.rmtree(folder, ignore_errors=True)
        for folder, steps in wanted.items():
            self._steps[folder] = [found.step for found in steps]
            if (read_pointer(folder) or {}).get("step") != steps[-1].step:
                self.point(folder, steps[-1].step, steps[-1].tag)

    def committed(self, saved: Saved) -> None:
        """Tells of a step that this rank has just saved."""
        self._newest = self._saves[saved.step] = saved

    def sweep(self) -> None:
        """Removes what is of no more use: steps whose folder is gone, and all but the newest of each folder. What is
        newest of all stays until a newer one is committed. Rank 0 calls it.
        """
        for folder, steps in list(self._steps.items()):
            kept = steps[-1:] if has_pointer(folder) else []
            for step in steps[: len(steps) - len(kept)]:
                self._later(step)
            if kept:
                self._steps[folder] = kept
            else:
                del self._steps[folder]

    def finish(self) -> None:
        """Waits until all is persisted, and removed that was to be. Raises StorageUnavailable."""
        newest = self._newest
        if newest is not None and newest.saved and not self.checkpoints.is_closed:
            newest.wait()
        removals, self._removals = self._removals, None
        if removals is not None:
            removals.shutdown(wait=True)

    def _later(self, step: int) -> None:
        if self._removals is None:
            self._removals = ThreadPoolExecutor(1, thread_name_prefix="stepfast-removal")
        self._removals.submit(self._remove, step, self._newest)

    def _remove(self, step: int, successor: Saved | None) -> None:
        try:
            # The step itself too: the newest is persisted first, and what is not there yet cannot be removed.
            for saved in (self._saves.pop(step, None), successor):
                if saved is not None and saved.saved:
                    saved.wait()
            self.checkpoints.remove(step)
        except StepfastError as error:
            log.warning("stepfast: step %s was not removed: %s", step, error)


__all__ = [
    "POINTER", "CheckpointFolders", "checkpoints_of_process", "has_pointer", "number_at_end", "read_pointer",
    "write_file",
]  # fmt: skip
