"""What became of a step that another rank has saved, waited for until it is known: committed, or never to be."""

from __future__ import annotations

import time

from stepfast.errors import ObjectNotFound, StorageUnavailable
from stepfast.layout import RecordInvalid, check_manifest, manifest_path
from stepfast.tags import TagBook, TaggedStep
from stepfast.torch.gang import Gang
from stepfast.torch.link import AgentLink
from stepfast.torch.sources import Source, read_record
from stepfast.torch.topics import Topic

_LONGEST_SECONDS = 600.0
_OLD_SECONDS = 5.0  # by which a step may be committed behind a newer one
_PAUSES_SECONDS = (0.02, 1.0)  # the first and the longest between two looks at the storage


class Settlement:
    """The steps of one run, seen from a rank that has no share in them."""

    def __init__(self, gang: Gang, source: Source, link: AgentLink | None, *, run: str) -> None:
        self._gang, self._source, self._link, self._run = gang, source, link, run

    def is_committed(self, agreed: TaggedStep, timeout_seconds: float = _LONGEST_SECONDS) -> bool:
        """Waits until the step is committed, or known not to be (given up, or removed since): which of both. Raises
        StorageError, GangError, StorageUnavailable when it is neither for so long.
        """
        began = time.monotonic()
        deadline, pause = time.monotonic() + timeout_seconds, _PAUSES_SECONDS[0]
        if self._link is not None:
            self._link.want(agreed.step)  # if the rank that has saved it is on this node its share is due now
        while not self._is_there(agreed.step):
            if self._is_given_up(agreed) or (time.monotonic() > began + _OLD_SECONDS and self._is_old(agreed.step)):
                return False
            if time.monotonic() > deadline:
                raise StorageUnavailable(
                    f"{agreed.tag!r} (step {agreed.step}), which rank {agreed.opener} has saved, is neither committed "
                    f"nor given up after {timeout_seconds:.0f} s: wait for it there (flush) before you ask elsewhere"
                )
            time.sleep(pause)
            pause = min(_PAUSES_SECONDS[1], pause * 2)
        return True

    def tell_removed(self, step: int) -> None:
        """The step is about to be removed: nobody is to wait for it."""
        self._gang.tell(Topic.REMOVED.of(step), "")

    def is_removed(self, step: int) -> bool:
        """Whether a rank has removed it."""
        return self._gang.hear([Topic.REMOVED.of(step)]) is not None

    def _is_old(self, step: int) -> bool:
        """Whether a newer one is committed: then this one was, too, and retention has removed it."""
        return any(later.step > step and self._is_there(later.step) for later in read_book(self._gang).steps)

    def _is_there(self, step: int) -> bool:
        try:
            return check_manifest(read_record(self._source, manifest_path(step)), step).run == self._run
        except (ObjectNotFound, RecordInvalid):
            return False

    def _is_given_up(self, agreed: TaggedStep) -> bool:
        if self._gang.hear([Topic.FAILED.of(agreed.number)]) is not None or self.is_removed(agreed.step):
            return True
        return any(agreed.step in later.drop for later in read_book(self._gang).steps)


def read_book(gang: Gang) -> TagBook:
    """The run's tags as they are now."""
    return TagBook.from_json((gang.hear([Topic.BOOK]) or [""])[0])


__all__ = ["Settlement", "read_book"]
