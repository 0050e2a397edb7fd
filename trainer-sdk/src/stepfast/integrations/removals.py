"""Steps that are of no more use to a framework: removed while training goes on, and never before what takes their place
is committed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from stepfast.errors import CheckpointNotFound, StepfastError
from stepfast.torch.tagged import TaggedCheckpoints
from stepfast.torch.writer import Saved

log = logging.getLogger("stepfast")


class Removals:
    """Those that this rank makes. What the storage has refused is tried again with the next, and at the end."""

    def __init__(self, checkpoints: TaggedCheckpoints) -> None:
        self._checkpoints = checkpoints
        self._saves: dict[int, Saved] = {}
        self._newest: Saved | None = None
        self._running: list[Future[list[int]]] = []
        self._leaving: set[int] = set()
        self._held: list[int] | None = None  # what stays until a step is saved again; None: the last one was saved

    @property
    def leaving(self) -> frozenset[int]:
        """The steps that are to be removed, and may still be there."""
        return frozenset(self._leaving)

    def saved(self, saved: Saved) -> None:
        """Tells of a step that this rank has just staged, or could not: then nothing takes the place of what is to be
        removed, which stays until one is staged.
        """
        if not saved.saved:
            self._held = self._held or []
            return
        self._newest = self._saves[saved.step] = saved
        held, self._held = self._held, None
        if held:
            self.begin(held)

    def begin(self, steps: Sequence[int]) -> None:
        """Removes these once what this rank has saved last is committed; at once where it has not tried to save."""
        if self._held is not None:
            self._held += steps
            return
        ended = [run for run in self._running if run.done()]
        self._running = [run for run in self._running if run not in ended]
        steps = [*(step for run in ended for step in run.result()), *steps]
        if not steps:
            return
        self._leaving.update(steps)
        pool = ThreadPoolExecutor(1, thread_name_prefix="stepfast-removal")
        self._running.append(pool.submit(self._remove, steps, self._newest))
        pool.shutdown(wait=False)  # the thread ends with its work: nobody may ever call finish()

    def finish(self) -> None:
        """Waits until what was saved last is committed, and removed what was to be. Raises StorageUnavailable."""
        newest = self._newest
        if newest is not None and not self._checkpoints.is_closed:
            newest.wait()
        wait(self._running)
        self.begin(())
        wait(self._running)

    def _remove(self, steps: Sequence[int], newest: Saved | None) -> list[int]:
        """What of it is there still."""
        refused = []
        for step in steps:
            own = self._saves.get(step)
            try:
                # The newest is persisted first, and what is not there yet cannot be removed.
                if own is None or _is_committed(own):
                    if newest is not None:
                        newest.wait()
                    self._checkpoints.remove(step)
                self._saves.pop(step, None)
                self._leaving.discard(step)
            except StepfastError as error:
                log.warning("stepfast: step %s is not removed yet: %s", step, error)
                refused.append(step)
        return refused


def _is_committed(saved: Saved) -> bool:
    """Waits until it is known. Raises StorageUnavailable."""
    try:
        saved.wait()
    except CheckpointNotFound:  # dropped for a newer one, or given up
        return False
    return True


__all__ = ["Removals"]
