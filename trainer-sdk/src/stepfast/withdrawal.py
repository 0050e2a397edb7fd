"""Removes what a run left of a step that is not committed, while an agent may still be at work for that run.

No step that it commits may lack a file (I1). So the parts go first: each is written once, and nobody who looks from
then on finds the step whole. Who had seen it whole a moment before writes its manifest meanwhile, and who is late
writes the last part: the step is looked at again before any file goes, and then its parts come back. An agent looks for
the files of a part right before it writes that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stepfast.errors import ObjectNotFound
from stepfast.layout import MANIFEST, classify, join, step_folder
from stepfast.storage.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    """A step that is not whole for that run any more: its parts, by name, are gone. `folder` is the step's."""

    folder: str
    run: str
    parts: Mapping[str, bytes]


def withdraw(store: Store, folder: str, step: int, run: str) -> Withdrawn:
    """Removes the parts that the run wrote of the step, in the job's folder. Raises StorageError."""
    within, parts = join(folder, step_folder(step)), {}
    for name in [entry.name for entry in store.list(within)]:
        if (classify(name).kind, classify(name).run) != ("part", run):
            continue
        try:
            parts[name] = store.read(join(within, name))
        except ObjectNotFound:  # somebody else removes them, too
            continue
        store.delete(join(within, name))
    return Withdrawn(folder=within, run=run, parts=parts)


def remove_withdrawn(store: Store, one: Withdrawn) -> bool:
    """Whether the step's files are gone; else somebody went on with it, and its parts are there again.

    Raises StorageError.
    """
    names = [entry.name for entry in store.list(one.folder)]
    kinds = [(name, classify(name)) for name in names]
    if MANIFEST in names or any(kind.kind in ("part", "superseded") and kind.run == one.run for _, kind in kinds):
        for name, data in one.parts.items():
            store.create(join(one.folder, name), data)
        return False
    for name in [name for name, kind in kinds if kind.kind == "data" and kind.run == one.run]:
        store.delete(join(one.folder, name))
    return True
