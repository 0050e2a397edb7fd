"""Reading again what the system could not read: on a mounted storage (NFS, FUSE) that may work a moment later, and a
step that is given up for it is lost to training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from stepfast.errors import CheckpointError, StorageError, StorageUnavailable
from stepfast.storage.faults import is_damage, storage_error
from stepfast.storage.retry import Retry

log = logging.getLogger("stepfast")

T = TypeVar("T")

RETRY = Retry(deadline_seconds=10.0)


class Unreadable(StorageUnavailable):
    """The system could not read an object's bytes. `is_damage`: where that lasts, they are gone."""

    is_damage = False


def unreadable(error: OSError, doing: str) -> StorageError:
    """What a failed read means: Unreadable where another one may work. `doing` names operation and path."""
    failure = storage_error(error, doing)
    if not isinstance(failure, StorageUnavailable):
        return failure
    found = Unreadable(str(failure))
    found.is_damage = is_damage(error)
    return found


def read_patiently(read: Callable[[], T], *, damage: type[CheckpointError]) -> T:
    """What `read` returns, which is called again for some seconds while it raises Unreadable.

    Raises StorageError, and `damage` for bytes that are gone: nobody is to wait for these for ever.
    """
    try:
        return read()
    except Unreadable as error:
        log.warning("stepfast: %s: it is read again", error)
    try:
        return RETRY.run(lambda _: read())  # its time begins now: the first read may have taken long
    except StorageUnavailable as error:
        if isinstance(error.__cause__, Unreadable) and error.__cause__.is_damage:
            raise damage(str(error)) from error
        raise
