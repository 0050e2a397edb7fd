"""Nebula's functions and its `Checkpoint`, as its documentation has them.

Source: "Boost Checkpoint Speed and Reduce Cost with Nebula", Azure Machine Learning's documentation, and what DeepSpeed
up to 0.19.6 calls. Objects that are loaded may have travelled pickled, as with `torch.load`: to load a checkpoint of
somebody else's is to run his code.
"""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from stepfast.errors import CheckpointNotFound
from stepfast.nebula import engine
from stepfast.nebula.settings import make_settings
from stepfast.torch.copying import MapLocation
from stepfast.torch.sources import CommittedStep
from stepfast.torch.tagged import OpenTag

log = logging.getLogger("stepfast")

UNKNOWN_NUMBER = -2  # of files: `commit` says which was the last


def init(
    persistent_storage_path: object = None,
    persistent_time_interval: object = None,
    num_of_version_in_retention: object = None,
    **unknown: object,
) -> None:
    """Says where checkpoints are persisted, after how many seconds the next one is, and how many are kept.

    What is not said comes from `NEBULA_PERSISTENT_STORAGE_PATH`, `NEBULA_PERSISTENT_TIME_INTERVAL` and
    `NEBULA_MEMORY_BUFFER_SIZE` (bytes of memory a node). Under `stepfast run` and in the cluster the job's own storage
    is used. Raises SpecError.
    """
    if unknown:
        log.warning("stepfast: init knows nothing of %s", ", ".join(sorted(unknown)))
    settings = make_settings(persistent_storage_path, persistent_time_interval, num_of_version_in_retention, os.environ)
    engine.configure(settings)
    engine.attend()


class Checkpoint:
    """Named objects under a tag: to be saved, or as they were saved.

    num_of_files: how many objects this process saves, after the last of which it commits by itself; -2: nobody knows,
    and `commit` says so (or, if the script never calls it, a look at the latest, the end of a script that did not fail,
    or the next checkpoint, once this object is gone).
    """

    def __init__(self, tag: str = "", num_of_files: int = UNKNOWN_NUMBER) -> None:
        if num_of_files != UNKNOWN_NUMBER and (type(num_of_files) is not int or num_of_files < 1):
            raise ValueError(f"num_of_files is {num_of_files!r}: give how many objects are saved, or -2")
        self.tag = tag
        self._num_of_files = num_of_files
        self._opened: OpenTag | None = None
        self._found: CommittedStep | None = None
        self._persist_path: str | None = None

    @classmethod
    def _of(cls, found: CommittedStep, persist_path: str | None) -> Checkpoint:
        checkpoint = cls(found.tag or f"global_step{found.step}")
        checkpoint._found, checkpoint._persist_path = found, persist_path
        return checkpoint

    def save(self, name: str, obj: Any) -> None:
        """Takes a copy of the object, in memory: training may go on with it."""
        if self._opened is None:
            self._opened = engine.open_tag(self.tag)
            if self._num_of_files == UNKNOWN_NUMBER:
                engine.pending().add(self._opened, self)
        is_last = len({*self._opened.names, name}) == self._num_of_files
        try:
            # What is committed at once is read before training goes on: it needs no copy in between.
            self._opened.put(name, obj, copy=not is_last)
        except BaseException:
            engine.pending().drop(self._opened)
            raise
        if is_last:
            self._opened.commit()
            engine.pending().committed(self._opened)

    def commit(self) -> bool:
        """All objects are saved: the checkpoint is persisted from now on. False when memory is exhausted and the job
        skips what does not fit.
        """
        if self._opened is None and engine.commits_empty():
            self._opened = engine.open_tag(self.tag)
        if self._opened is None:
            return True
        saved = self._opened.commit().saved
        engine.pending().committed(self._opened, is_said=True)
        return saved

    def load(self, name: str, map_location: MapLocation = None) -> Any:
        """The object of that name: as this rank saved it, or else the first rank that has. Raises CheckpointNotFound,
        CheckpointDamaged.
        """
        where, found = engine.steps_at(self._persist_path), self._found
        if found is None and where is not None:
            engine.commit_pending()
            found = where.find(self.tag)
        if found is None or where is None:
            raise CheckpointNotFound(f"there is no checkpoint {self.tag!r}")
        return where.load(found.step, name, map_location)

    def __repr__(self) -> str:
        return f"Checkpoint({self.tag!r})"


def get_latest_checkpoint(persist_path: str | None = None) -> Checkpoint | None:
    """The newest checkpoint, of this job or of the storage at that path; None when there is none."""
    engine.commit_pending()
    where = engine.steps_at(persist_path)
    found = where.latest() if where is not None else None
    return Checkpoint._of(found, persist_path) if found is not None else None


def get_checkpoint(tag: str = "", persist_path: str | None = None) -> Checkpoint | None:
    """The newest checkpoint of that tag, of this job or of the storage at that path; None when there is none."""
    engine.commit_pending()
    where = engine.steps_at(persist_path)
    found = where.find(tag) if where is not None else None
    return Checkpoint._of(found, persist_path) if found is not None else None


def list_checkpoints(persist_path: str | None = None) -> list[dict[str, object]]:
    """All checkpoints that can be loaded, oldest first: plain values, as JSON takes them."""
    engine.commit_pending()
    where = engine.steps_at(persist_path)
    return [_described(found) for found in where.steps()] if where is not None else []


def get_latest_checkpoint_path(checkpoint_name: str, persisted_storage_path: str | None = None) -> str | None:
    """The newest checkpoint's object of that name in a file that `torch.load` opens, and so Lightning's
    `load_from_checkpoint`: on this machine, until the script ends. None when there is no checkpoint.
    """
    checkpoint = get_latest_checkpoint(persisted_storage_path)
    if checkpoint is None:
        return None
    folder = Path(engine.scratch_folder()) / checkpoint.tag.replace(os.sep, "_")
    folder.mkdir(exist_ok=True)
    path = folder / checkpoint_name.replace(os.sep, "_")
    torch.save(checkpoint.load(checkpoint_name, map_location="cpu"), path)
    return str(path)


def flush_persistence(tag: str | None = None) -> bool:
    """Waits until this rank's newest checkpoint, or its newest of that tag, is persisted; a rank of several that has
    saved none has nothing to wait for. Raises StorageUnavailable.
    """
    engine.commit_pending()
    engine.checkpoints().flush(tag)
    return True


def _shutdown() -> None:
    """Waits until all is persisted, and ends; what is saved next goes on with the same run."""
    engine.shut_down()


def _described(found: CommittedStep) -> dict[str, object]:
    return {
        "tag": found.tag or f"global_step{found.step}",
        "global_step": found.step,
        "size_bytes": found.size_bytes,
        "saved_time": _time(found.saved_time),
        "persisted_time": _time(found.committed_time),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
