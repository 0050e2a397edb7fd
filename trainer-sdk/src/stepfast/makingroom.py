"""Room in a storage that is full, for a job's newest attempt: what is left of a file that is uploaded anew, and what
earlier attempts left of steps that are not whole.

Usually a commit has such leftovers swept (`catalog.retain`). In a full storage none may come any more.

A file has one writer: who begins it anew may remove the halves of it.

An agent may still be at work for an earlier attempt, and no step that it commits may lack a file. Temporary files may
go at any time: who is still writing one is told so, and begins it again. Files that have their name go only where some
of a step's parts are written and some are not, and the parts go first: each is written once, so that nobody can commit
the step from then on. Who had seen it whole a moment before writes its manifest meanwhile; its parts come back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from stepfast.commit import StepParts
from stepfast.errors import ObjectNotFound
from stepfast.layout import MANIFEST, RecordInvalid, classify, join, parse_step_folder, step_folder
from stepfast.retention import unfinished
from stepfast.storage.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class _Withdrawn:
    """A step that nobody commits for that run any more: its parts, by name, are gone. `folder` is the step's."""

    folder: str
    run: str
    parts: Mapping[str, bytes]


def remove_halves(store: Store, folder: str, path: str) -> bool:
    """Removes what uploads that were not finished, as those of a persister that was killed, left of the file at `path`
    in the job's folder; whether there was any. Nobody may be uploading it. Raises StorageError.
    """
    within, _, file = join(folder, path).rpartition("/")
    halves = [name for name, target in store.list_temporary(within) if target == file]
    for name in halves:
        store.delete(join(within, name))
    return bool(halves)


def make_room(
    store: Store, folder: str, *, run: str, settle_seconds: float, spared: Collection[str] = (),
    sleep: Callable[[float], None] = time.sleep,
) -> bool:  # fmt: skip
    """Removes what earlier attempts of the run's job left of steps that are not whole; whether there was any.

    `settle_seconds`: how long after its last look for a step's parts somebody may still be writing the manifest; it is
    tried again for as long as a storage's deadline. `spared`: runs of which something is still on its way, as far as
    the caller knows. Raises StorageError.
    """
    is_freed, withdrawn = False, []
    for step in [parse_step_folder(entry.name) for entry in store.list(folder) if entry.is_folder]:
        if step is None:
            continue
        within = join(folder, step_folder(step))
        names, temporary = _names(store, within), store.list_temporary(within)
        others = unfinished([*names, *(target for _, target in temporary)], run=run, spared=spared)
        for name in [name for name, target in temporary if classify(target).run in others]:
            store.delete(join(within, name))
            is_freed = True
        withdrawn += [
            _withdraw(store, within, names, other) for other in others if _lacks_parts(store, folder, step, other)
        ]
    if withdrawn:
        sleep(settle_seconds)
    removed = [_remove(store, one) for one in withdrawn]
    return is_freed or any(removed)


def _names(store: Store, folder: str) -> list[str]:
    return [entry.name for entry in store.list(folder)]


def _lacks_parts(store: Store, folder: str, step: int, run: str) -> bool:
    """Whether some of the step's parts are there, and not all of them."""
    parts = StepParts(store, folder, step, run)
    try:
        return bool(parts.look()) and not parts.are_complete
    except (RecordInvalid, ObjectNotFound):  # damaged, or another node makes room, too
        return False


def _withdraw(store: Store, folder: str, names: Collection[str], run: str) -> _Withdrawn:
    parts = {}
    for name in [name for name in names if (classify(name).kind, classify(name).run) == ("part", run)]:
        try:
            parts[name] = store.read(join(folder, name))
        except ObjectNotFound:  # another node makes room, too
            continue
        store.delete(join(folder, name))
    return _Withdrawn(folder=folder, run=run, parts=parts)


def _remove(store: Store, one: _Withdrawn) -> bool:
    """Whether the step's files are gone; else it was committed, and its parts are there again."""
    names = _names(store, one.folder)
    if MANIFEST in names:
        for name, data in one.parts.items():
            store.create(join(one.folder, name), data)
        return False
    for name in [name for name in names if (classify(name).kind, classify(name).run) == ("data", one.run)]:
        store.delete(join(one.folder, name))
    return True
