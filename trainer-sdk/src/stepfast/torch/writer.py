"""Where this rank's saves go, and what became of each: into the agent's slots or, without an agent, to the storage."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from stepfast.environment import Environment
from stepfast.errors import AgentUnavailable, CheckpointNotFound, StorageError, StorageUnavailable
from stepfast.step import Tier
from stepfast.storage import Store, open_store
from stepfast.torch.link import AgentLink
from stepfast.torch.overlap import Overlap
from stepfast.torch.saver import AgentSaver, DirectSaver, Save

log = logging.getLogger("stepfast")

_OUTCOMES_KEPT = 100


class Saved:
    """One save. `stall_seconds` is how long training stood still for it; `saved` is False when it was skipped."""

    def __init__(self, writer: Writer, step: int, *, saved: bool, stall_seconds: float) -> None:
        self._writer = writer
        self.step = step
        self.saved = saved
        self.stall_seconds = stall_seconds

    def wait(self, tier: Tier = Tier.PERSISTENT, timeout_seconds: float | None = None) -> None:
        """Returns when the step is in that tier. Raises StorageUnavailable, CheckpointNotFound (skipped, dropped or
        given up).
        """
        if not self.saved:
            raise CheckpointNotFound(f"step {self.step} was skipped: the log says why")
        if tier is Tier.PERSISTENT:
            self._writer.wait_committed(self.step, timeout_seconds)
        else:
            self._writer.wait_staged(self.step, timeout_seconds)

    def __repr__(self) -> str:
        return f"Saved(step={self.step}, saved={self.saved}, stall_seconds={self.stall_seconds:.6f})"


class Writer:
    """Writes saves, and waits for them."""

    def __init__(self, link: AgentLink | None, environment: Environment, name: str, overlap: Overlap) -> None:
        self._link, self._environment, self._name = link, environment, name
        self.agent = AgentSaver(link, environment, name, overlap) if link is not None else None
        self._direct: DirectSaver | None = None
        self._store: Store | None = None
        self._direct_saves: dict[int, StorageError | None] = {}  # steps that went straight to the storage, newest last
        self._given_up: dict[int, str] = {}  # steps of which some rank's share will never be there, and why
        self._referable: Sequence[int] = ()

    @property
    def store(self) -> Store:
        """The job's storage."""
        if self._store is None:
            self._store = open_store(self._environment.storage_uri)
        return self._store

    def write(self, save: Save) -> None:
        """Stages the step, or saves it straight to the storage."""
        if self.agent is not None:
            try:
                self.agent.save(save)
                return
            except AgentUnavailable as error:
                log.error("stepfast: %s; step %s goes straight to the storage", error, save.step)
            self.agent.drain()
        outcome = None
        try:
            self._direct_saver().save(save)
        except StorageError as error:
            # A store that fails must not end training (nothing committed is touched); the next save tries again.
            log.exception("stepfast: step %s was not saved", save.step)
            outcome = error
        if self.agent is not None:
            self.agent.staged_step = save.step
        self._direct_saves[save.step] = outcome
        while len(self._direct_saves) > _OUTCOMES_KEPT:
            del self._direct_saves[next(iter(self._direct_saves))]

    def share(self, step: int, sharers: str) -> None:
        """These ranks (`stepfast.ranks`) have files in the step: what was not known when it was written.

        Raises StorageError.
        """
        if step in self._direct_saves:
            self._direct_saver().share(step, sharers)
        elif self._link is not None:
            self._link.share(step, sharers)

    def give_up(self, step: int, reason: str) -> None:
        """The step will never be whole: nobody waits for it, and its memory is used again."""
        self._given_up[step] = reason
        while len(self._given_up) > _OUTCOMES_KEPT:
            del self._given_up[next(iter(self._given_up))]
        if self._direct is not None:
            self._direct.give_up(step, reason)
        if self._link is not None:
            self._link.give_up(step)

    def has_failed(self, step: int) -> bool:
        """Whether the step was to go straight to the storage, and did not get there."""
        return self._direct_saves.get(step) is not None

    def committed_among(self, steps: Iterable[int]) -> set[int]:
        """Those of this run's steps that are known to be committed, as this run's."""
        return {step for step in steps if self._is_committed(step)}

    def _is_committed(self, step: int) -> bool:
        if self._link is None or step in self._direct_saves:
            return self._direct_saver().is_committed(step)
        return self._link.is_referable(step)

    def lost_among(self, steps: Iterable[int]) -> set[int]:
        """Those of this run's steps that are known never to be committed."""
        link = self._link
        return {step for step in steps if self.has_failed(step) or (link is not None and link.is_dropped(step))}

    def is_settled(self, step: int) -> bool:
        """Whether it is known what became of the step: it is committed, or never will be."""
        if self._link is None or step in self._direct_saves:
            return self.has_failed(step) or self._direct_saver().is_committed(step)
        return self._link.is_settled(step)

    def keep_referable(self, steps: Sequence[int]) -> None:
        """Later saves may refer to these steps: retention leaves them, whatever comes after them."""
        self._referable = steps
        if self._link is not None:
            self._link.keep_referable(steps)
        if self._direct is not None:
            self._direct.referable = steps

    def unpersisted(self) -> tuple[int, ...]:
        """Steps that are staged, or on their way, and due, and of which nobody has said what became of them."""
        if self.agent is None or self._link is None:
            return ()
        return tuple(step for step in self.agent.unpersisted if not self._link.is_settled(step))

    def drain(self) -> None:
        """Until nothing is copied any more."""
        if self.agent is not None:
            self.agent.drain()

    def wait_staged(self, step: int, timeout_seconds: float | None) -> None:
        """Until the step's bytes are in memory. Raises StorageUnavailable, CheckpointNotFound (given up)."""
        if self.agent is not None:
            self.agent.wait_staged(step, timeout_seconds)

    def wait_committed(self, step: int, timeout_seconds: float | None) -> None:
        """Until the step is committed. Raises StorageUnavailable, CheckpointNotFound (dropped or given up)."""
        try:
            self._wait_committed(step, timeout_seconds)
        except CheckpointNotFound as error:
            if step in self._given_up:
                raise CheckpointNotFound(f"step {step} was given up: {self._given_up[step]}") from error
            raise

    def _wait_committed(self, step: int, timeout_seconds: float | None) -> None:
        began = time.monotonic()
        self.wait_staged(step, timeout_seconds)
        if timeout_seconds is not None:
            timeout_seconds = max(0.0, timeout_seconds - (time.monotonic() - began))
        if step in self._direct_saves:
            error = self._direct_saves[step]
            if error is not None:
                raise StorageUnavailable(f"step {step} was not saved: {error}") from error
            self._direct_saver().wait_committed(step, timeout_seconds)
        elif self._link is not None:
            self._link.wait_committed(step, timeout_seconds)
        else:  # so long ago that only the storage knows what became of it
            self._direct_saver().check_committed(step)

    def close(self) -> None:
        """Sees through what is copied still, says goodbye to the agent, and lets go of the storage."""
        if self.agent is not None:
            self.agent.close()
        if self._link is not None:
            self._link.close()
        if self._direct is not None:
            self._direct.close()
        if self._store is not None:
            self._store.close()

    def _direct_saver(self) -> DirectSaver:
        if self._direct is None:
            self._direct = DirectSaver(self.store, self._environment, self._name)
            self._direct.referable = self._referable
        return self._direct


__all__ = ["Saved", "Writer"]
