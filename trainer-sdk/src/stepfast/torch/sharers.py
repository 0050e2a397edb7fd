"""Whose the steps of this rank are: said when it saves, or found out behind it and told to its writer then.

Owns the order: nobody's step is committed before the run has left the history of those before it (I6).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum

from stepfast.errors import CheckpointError, GangError, StorageError, StorageUnavailable
from stepfast.ranks import EVERY_RANK, UNKNOWN, RankSet
from stepfast.tags import TaggedStep
from stepfast.torch.attendance import LAST_SECONDS, Attendance
from stepfast.torch.branch import Branch
from stepfast.torch.gang import Gang
from stepfast.torch.writer import Writer

log = logging.getLogger("stepfast")


class Sharing(StrEnum):
    """Which ranks save under a tag."""

    EVERY_RANK = "EveryRank"  # each opens every tag, and commits it, be it with nothing
    THIS_RANK = "ThisRank"  # it alone: nobody else has anything to save
    WHOEVER_OPENS = "WhoeverOpens"  # those that open the tag before they are past the place where others do


class Sharers:
    """As one rank sees them. `on_look()` is called again and again where they are found out. `before`: the rank's
    attendance, when the run was closed and goes on.
    """

    def __init__(
        self, sharing: Sharing, gang: Gang, writer: Writer, branch: Branch, *, rank: int, world_size: int,
        on_look: Callable[[], None], before: Attendance | None,
    ) -> None:  # fmt: skip
        self._writer, self._branch = writer, branch
        self._late: list[threading.Thread] = []
        self._has_ended = False
        self.said: str = UNKNOWN
        """What is written into a save (`stepfast.ranks`)."""
        self._attendance: Attendance | None = None
        if world_size == 1 or sharing is Sharing.EVERY_RANK:
            self.said = EVERY_RANK
        elif sharing is Sharing.THIS_RANK:
            self.said = str(RankSet.of([rank]))
        else:
            self._attendance = Attendance(gang, self._told, self._told_given_up, on_look=on_look, before=before)

    @property
    def attendance(self) -> Attendance | None:
        """What finds them out, where nobody has said which ranks save."""
        return self._attendance

    @property
    def are_found_out(self) -> bool:
        """Whether nobody has said which ranks save."""
        return self._attendance is not None

    def opened(self, agreed: TaggedStep) -> None:
        """This rank shares in the step. Raises GangError when it has said the contrary by going on."""
        if self._attendance is not None:
            self._attendance.open(agreed)

    def put(self, agreed: TaggedStep) -> None:
        """This rank puts something into the step."""
        if self._attendance is not None:
            self._attendance.put(agreed)

    def committed(self, agreed: TaggedStep) -> None:
        """This rank has staged its share."""
        if self._attendance is not None:
            self._attendance.commit(agreed)

    def failed(self, agreed: TaggedStep, reason: str) -> None:
        """No other rank waits for a step that this one cannot save its share of, where it is not every rank's."""
        if self._attendance is not None:
            with suppress(GangError):
                self._attendance.fail(agreed, reason)
            self._told_given_up(agreed.step, reason)

    def wait(self, step: int, timeout_seconds: float) -> None:
        """Until it is known who shares in the step that this rank has committed. Raises StorageUnavailable."""
        if self._attendance is not None:
            self._attendance.wait(step, timeout_seconds)

    def is_past(self, agreed: TaggedStep) -> bool:
        """Whether this rank can have no share in the step any more, as far as it knows."""
        return self._attendance is not None and self._attendance.is_past(agreed)

    def settle(self, timeout_seconds: float, *, is_silent: bool) -> None:
        """As `Attendance.close`."""
        if self._attendance is not None:
            self._attendance.close(min(timeout_seconds, LAST_SECONDS), is_silent=is_silent)

    def end(self) -> None:
        """Behind `settle`: what was saved last is nobody's until it is said whose it is."""
        deadline = time.monotonic() + LAST_SECONDS
        for late in self._late:
            late.join(max(0.0, deadline - time.monotonic()))
        self._has_ended = True

    def _told(self, step: int, sharers: RankSet) -> None:
        if self._branch.is_done:
            self._share(step, sharers)
            return
        # Another node's agent holds nothing back: it does not know of the step's commit before it knows whose it is.
        late = threading.Thread(target=self._share_late, args=(step, sharers), name="stepfast-share", daemon=True)
        self._late = [*filter(threading.Thread.is_alive, self._late), late]
        late.start()

    def _share_late(self, step: int, sharers: RankSet) -> None:
        while not self._has_ended:
            try:
                self._branch.wait()
            except StorageUnavailable as error:
                log.warning("stepfast: step %s is not committed yet: %s", step, error)
            except GangError:
                return  # it is over
            else:
                self._share(step, sharers)
                return

    def _share(self, step: int, sharers: RankSet) -> None:
        try:
            self._writer.share(step, str(sharers))
        except (StorageError, CheckpointError) as error:
            log.error("stepfast: step %s is not committed: %s", step, error)

    def _told_given_up(self, step: int, reason: str) -> None:
        log.error("stepfast: step %s is given up by all ranks: %s", step, reason)
        self._writer.give_up(step, reason)


__all__ = ["Sharers", "Sharing"]
