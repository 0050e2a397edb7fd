"""The step that a run goes on from: before its first save, one for the whole gang, which stands in the gang's store.

Ranks that list the storage at different moments see different steps: the first that asks decides, and the others take
that one or, where it is gone, agree on an older. None is ever taken for "from scratch" because it is gone.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from stepfast.errors import CheckpointNotFound, GangError
from stepfast.torch.gang import Gang
from stepfast.torch.sources import CommittedStep
from stepfast.torch.topics import Topic

Choice: TypeAlias = Callable[[Sequence[CommittedStep]], CommittedStep | None]

_NONE = "-1"  # from scratch
_LISTING_SECONDS = 2.0  # how long a storage may take to list on one machine what it lists on another
_POLL_SECONDS = 0.1


class Resumption:
    """As one rank sees it. `list_steps`: the committed steps, oldest first."""

    def __init__(self, gang: Gang, list_steps: Callable[[], Sequence[CommittedStep]]) -> None:
        self._gang, self._list_steps = gang, list_steps
        self._given = ("", -1)  # what this rank was told, under that topic

    def agree(self, mine: CommittedStep | None, choose: Choice, *, trainer: str) -> CommittedStep | None:
        """The gang's step: `mine` if nobody was here before; None: from scratch. `choose`: which of several steps the
        trainer of that name goes on from. Raises StorageError, and CheckpointNotFound or GangError when the step is
        gone and no other can take its place.
        """
        topic = Topic.RESUMED.of(hashlib.sha256(trainer.encode()).hexdigest())
        agreed = self._gang.update(topic, lambda known: known or (_NONE if mine is None else str(mine.step)))
        found = mine if mine is not None and agreed == str(mine.step) else None
        deadline = time.monotonic() + _LISTING_SECONDS
        while agreed != _NONE:
            if found is not None:
                self._given = (topic, found.step)
                return found
            steps = self._list_steps()
            found = next((one for one in steps if agreed == str(one.step)), None)
            if found is None and time.monotonic() > deadline:
                agreed = self._agree_on_older(topic, int(agreed), choose(_below(int(agreed), steps)))
            elif found is None:
                time.sleep(_POLL_SECONDS)
        return None

    def _agree_on_older(self, topic: str, gone: int, older: CommittedStep | None) -> str:
        """Another step for the whole gang instead of one that a rank has set aside, or somebody removed."""
        if older is None:
            raise CheckpointNotFound(f"step {gone}, to go on from, is gone, and there is no older one")
        agreed = self._gang.update(topic, lambda known: str(older.step) if known == str(gone) else known)
        # Who has read the step looks at the agreement after saying so, and we the other way round: one of us sees it.
        if self._gang.world_size > 1 and (self.read_step or 0) >= gone:
            raise GangError(f"step {gone} is gone, and a rank goes on from it: start again, from step {older.step}")
        return agreed

    @property
    def read_step(self) -> int | None:
        """The newest step that a rank has read, to go on from it; None: none has."""
        known = self._gang.hear([Topic.READ])
        return int(known[0]) if known else None

    def note_read(self, step: int) -> None:
        """This rank has read the step, to go on from it. Raises GangError when it was told to, and the gang has agreed
        on another since.
        """
        self._gang.update(Topic.READ, lambda known: str(max(step, int(known or _NONE))))
        topic, given = self._given
        if step == given and (self._gang.hear([topic]) or [str(step)])[0] != str(step):
            raise GangError(f"step {step} was set aside while rank {self._gang.rank} read it: start again")


def _below(step: int, steps: Sequence[CommittedStep]) -> Sequence[CommittedStep]:
    return [found for found in steps if found.step < step]


__all__ = ["Choice", "Resumption"]
