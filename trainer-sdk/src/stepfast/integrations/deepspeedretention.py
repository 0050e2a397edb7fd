"""Which steps of DeepSpeed's engines are kept. Rank 0 removes the others: only it knows whose a step is.

Several engines: of each folder the newest, as many as the engine that saves there keeps. One engine: of the whole job,
because its folder may be called anew in each attempt.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain

from stepfast.errors import StepfastError
from stepfast.integrations.deepspeedtags import folder_in
from stepfast.retention import steps_to_remove
from stepfast.torch.sources import CommittedStep
from stepfast.torch.tagged import TaggedCheckpoints
from stepfast.torch.writer import Saved

log = logging.getLogger("stepfast")


class Retention:
    """Of one run; `committed`: what it begins with."""

    def __init__(self, checkpoints: TaggedCheckpoints, committed: Sequence[CommittedStep]) -> None:
        self._checkpoints = checkpoints
        self._folders: dict[str | None, list[int]] = {}  # the steps of each, ascending
        self._removals: list[Future[None]] = []
        for found in committed:
            self._folders.setdefault(folder_in(found.tag), []).append(found.step)

    def saved(self, tag: str, saved: Saved, *, keep: int, protected: Collection[int], is_only: bool) -> None:
        """One step more under that tag: what is too old goes when it is committed. `keep`: 0 keeps all."""
        self._folders.setdefault(folder_in(tag), []).append(saved.step)
        steps = sorted(chain(*self._folders.values())) if is_only else self._folders[folder_in(tag)]
        surplus = steps_to_remove(steps, max_to_keep=keep, protected=protected)
        if not surplus:
            return
        self._folders = {name: [step for step in of if step not in surplus] for name, of in self._folders.items()}
        self._removals = [removal for removal in self._removals if not removal.done()]
        pool = ThreadPoolExecutor(1, thread_name_prefix="stepfast-retention")
        self._removals.append(pool.submit(self._remove, surplus, saved))
        pool.shutdown(wait=False)  # the thread ends with its work: nobody may ever call finish()

    def finish(self) -> None:
        """Waits until all is removed that was to be."""
        wait(self._removals)

    def _remove(self, steps: Sequence[int], successor: Saved) -> None:
        for step in steps:
            try:
                successor.wait()
                self._checkpoints.remove(step)
            except StepfastError as error:
                log.warning("stepfast: step %s was not removed: %s", step, error)


__all__ = ["Retention"]
