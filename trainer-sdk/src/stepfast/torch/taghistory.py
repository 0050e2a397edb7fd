"""What a process has done with a run's tags so far: each `TaggedCheckpoints` that it makes of the run goes on from it.

The book of tags stays where the gang meets. A process that counted its own openings anew would take the step of an old
one for that of its next.
"""

from __future__ import annotations

import uuid
from collections import Counter
from dataclasses import dataclass, field

from stepfast.torch.attendance import Attendance
from stepfast.torch.claims import RunKey
from stepfast.torch.gang import Alone, Gang
from stepfast.torch.topics import Topic


@dataclass(slots=True, kw_only=True)
class TagHistory:
    """One process's, of one run. `mark` is in the store where its gang meets; who is `alone` has no other store."""

    mark: str
    alone: Alone | None
    opened: Counter[str] = field(default_factory=Counter)  # how often this rank has opened each tag
    last_number: int = -1  # of this rank's openings
    last_step: int = -1  # the highest that a tag of this rank has become
    has_progressed: bool = False
    attendance: Attendance | None = None  # the last, where it is found out who saves


_HISTORIES: dict[RunKey, TagHistory] = {}


def join_history(key: RunKey, gang: Gang) -> tuple[TagHistory, Gang]:
    """The run's history in this process, and the gang that it goes on in. Raises GangError.

    A gang that meets in another store knows nothing of what was said: its history is a new one, above the old steps.
    """
    known = _HISTORIES.get(key)
    if known is not None and known.alone is not None and isinstance(gang, Alone):
        return known, known.alone
    topic = Topic.PROCESS.of(gang.rank)
    if known is not None and gang.hear([topic]) == [known.mark]:
        return known, gang
    made = TagHistory(
        mark=uuid.uuid4().hex, alone=gang if isinstance(gang, Alone) else None,
        last_step=known.last_step if known is not None else -1,
    )  # fmt: skip
    gang.tell(topic, made.mark)
    _HISTORIES[key] = made
    return made, gang


__all__ = ["TagHistory", "join_history"]
