"""Where a run leaves the history of those before it: what they committed above that step is superseded, once.

Owns the order: nothing of the run is committed before, and training does not wait for it (I1, I6). With an agent it is
asked to, and holds back its own commits meanwhile. Steps of which that agent does not lead the commit are held back by
whoever tells who shares in them: he asks `is_done` first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress

from stepfast.errors import AgentError, GangError, StorageError, StorageUnavailable
from stepfast.torch.gang import Gang
from stepfast.torch.link import AgentLink
from stepfast.torch.sources import Source
from stepfast.torch.topics import Topic

log = logging.getLogger("stepfast")

SCRATCH = -1  # before step 0, which can be saved
_LONGEST_SECONDS = 120.0
_POLL_SECONDS = 0.05


class Branch:
    """The one of a run, as one of its ranks sees it. `leader`: the rank whose agent leads all commits, if one does."""

    def __init__(self, gang: Gang, source: Source, link: AgentLink | None, *, rank: int, leader: int | None) -> None:
        self._gang, self._source, self._link = gang, source, link
        self._rank, self._leader = rank, leader
        self.step: int | None = None
        """The step that the run goes on from; None until this rank opens a tag."""
        self._is_asked = self._is_done = False

    @property
    def is_done(self) -> bool:
        """Whether all is superseded. Raises GangError."""
        self._is_done = self._is_done or self._gang.hear([Topic.BRANCHED]) is not None
        return self._is_done

    @property
    def is_own(self) -> bool:
        """Whether it is done without another rank."""
        return self._is_asked or (self._link is None and self.step is not None)

    def leave(self, step: int) -> bool:
        """Before a tag is opened: the run goes on from that step (-1: from scratch). False: nothing can be saved yet.

        Without an agent it is done on return, or the storage has failed; the next call tries again. Raises GangError.
        """
        self.step = step
        if self.is_done:
            return True
        if self._link is None:
            try:
                self._finish(self._source.supersede_after(step))
            except (StorageError, AgentError) as error:
                log.error("stepfast: nothing is saved until newer steps are marked superseded: %s", error)
                return False
        elif not self._is_asked and self._is_own():
            self._is_asked = True
            self._link.supersede_in_background(step, self._finish)
        return True

    def wait(self, timeout_seconds: float = _LONGEST_SECONDS) -> None:
        """Until it is done: what is superseded is not listed. Raises StorageUnavailable, GangError."""
        if self._link is None and self.step is not None and not self.leave(self.step):
            raise StorageUnavailable("newer steps are not marked superseded yet: the storage has failed")
        deadline = time.monotonic() + timeout_seconds
        while not self.is_done:
            if time.monotonic() > deadline:
                raise StorageUnavailable(f"newer steps are not marked superseded after {timeout_seconds:.0f} s")
            time.sleep(_POLL_SECONDS)

    def _is_own(self) -> bool:
        """Whether it is this rank's to ask its agent: one rank does."""
        if self._leader is not None:
            return self._leader == self._rank
        return self._gang.update(Topic.BRANCHING, lambda known: known or str(self._rank)) == str(self._rank)

    def _finish(self, superseded: Sequence[int]) -> None:
        if superseded:
            since = "its beginning: nothing was loaded" if self.step == SCRATCH else f"step {self.step}"
            log.warning("stepfast: training goes on from %s: steps %s are superseded", since, list(superseded))
        self._is_done = True
        with suppress(GangError):  # the gang is over
            self._gang.tell(Topic.BRANCHED, "")


__all__ = ["SCRATCH", "Branch"]
