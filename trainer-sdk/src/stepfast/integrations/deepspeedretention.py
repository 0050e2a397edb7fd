"""Which steps of DeepSpeed's engines are kept. Rank 0 removes the others: only it knows whose a step is.

Several engines: of each folder the newest, as many as the engine that saves there keeps. One engine: of the whole job,
because its folder may be called anew in each attempt.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain

from stepfast.integrations.deepspeedtags import folder_in
from stepfast.integrations.removals import Removals
from stepfast.retention import steps_to_remove
from stepfast.torch.sources import CommittedStep
from stepfast.torch.tagged import TaggedCheckpoints
from stepfast.torch.writer import Saved


class Retention:
    """Of one run; `committed`: what it begins with."""

    def __init__(self, checkpoints: TaggedCheckpoints, committed: Sequence[CommittedStep]) -> None:
        self._removals = Removals(checkpoints)
        self._folders: dict[str | None, list[int]] = {}  # the steps of each, ascending
        for found in committed:
            self._folders.setdefault(folder_in(found.tag), []).append(found.step)

    def saved(self, tag: str, saved: Saved, *, keep: int, protected: Collection[int], is_only: bool) -> None:
        """One step more under that tag: what is too old goes when it is committed. `keep`: 0 keeps all."""
        self._removals.saved(saved)
        self._folders.setdefault(folder_in(tag), []).append(saved.step)
        steps = sorted(chain(*self._folders.values())) if is_only else self._folders[folder_in(tag)]
        surplus = steps_to_remove(steps, max_to_keep=keep, protected=protected)
        self._folders = {name: [step for step in of if step not in surplus] for name, of in self._folders.items()}
        self._removals.begin(surplus)

    def finish(self) -> None:
        """Waits until what was saved last is committed, and removed what was to be. Raises StorageUnavailable."""
        self._removals.finish()


__all__ = ["Retention"]
