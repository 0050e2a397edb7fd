"""Room in a storage that is full, for a job's newest attempt: what is left of a file that is uploaded anew, and what
earlier attempts left of steps that are not whole.

Usually a commit has such leftovers swept (`catalog.retain`). In a full storage none may come any more.

A file has one writer: who begins it anew may remove the halves of it.

An agent may still be at work for an earlier attempt, and no step that it commits may lack a file. Temporary files may
go at any time: who is still writing one is told so, and begins it again. Files that have their name go only where some
of a step's parts are written and some are not, and only once nobody writes its manifest any more (`withdrawal`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from stepfast.commit import StepParts
from stepfast.errors import ObjectNotFound
from stepfast.layout import RecordInvalid, classify, join, parse_step_folder, step_folder
from stepfast.retention import unfinished
from stepfast.storage.base import Store
from stepfast.withdrawal import remove_withdrawn, withdraw


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
        names, temporary = [entry.name for entry in store.list(within)], store.list_temporary(within)
        others = unfinished([*names, *(target for _, target in temporary)], run=run, spared=spared)
        for name in [name for name, target in temporary if classify(target).run in others]:
            store.delete(join(within, name))
            is_freed = True
        withdrawn += [
            withdraw(store, folder, step, other) for other in others if _lacks_parts(store, folder, step, other)
        ]
    if withdrawn:
        sleep(settle_seconds)
    removed = [remove_withdrawn(store, one) for one in withdrawn]
    return is_freed or any(removed)


def _lacks_parts(store: Store, folder: str, step: int, run: str) -> bool:
    """Whether some of the step's parts are there, and not all of them."""
    parts = StepParts(store, folder, step, run)
    try:
        return bool(parts.look()) and not parts.are_complete
    except (RecordInvalid, ObjectNotFound):  # damaged, or another node makes room, too
        return False
