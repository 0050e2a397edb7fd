"""Checkpoints of which nobody has said yet whether all is in them: which are committed without a word, and when.

Nebula's documentation saves without a number of files and without `commit()`, and looks for the latest checkpoint
behind it. A checkpoint whose object is gone takes nothing more, so the next one's beginning commits it; one whose
object is there may be one of several that are open at once. A script that calls `commit()` says itself what is whole.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from stepfast.nebula.ending import Ending
from stepfast.torch.tagged import OpenTag

log = logging.getLogger("stepfast")

MOST_OPEN = 3  # copies in memory, as many as the documentation asks room for, of a script that never calls commit()


class Moment(StrEnum):
    """What the script does just now."""

    NEXT = "Next"  # it begins another checkpoint
    LOOK = "Look"  # it asks which checkpoints there are
    END = "End"


class Verdict(StrEnum):
    """What becomes of a checkpoint of which nobody has said that it is whole."""

    COMMIT = "Commit"
    KEEP = "Keep"
    GIVE_UP = "GiveUp"


def judge(
    names: Collection[str], expected: Collection[str] | None, *, moment: Moment, can_grow: bool, is_said: bool,
    ending: Ending = Ending.ORDERLY,
) -> Verdict:  # fmt: skip
    """What to do with a checkpoint of these names. Pure.

    `expected`: the names of the last that was committed of its kind; None: there was none. `can_grow`: the script has
    its object still. `is_said`: it calls `commit()`. `ending`: of the script, at its end.
    """
    is_like_the_last = expected is not None and set(names) >= set(expected)
    may_be_whole = is_like_the_last or (expected is None and not is_said)
    match moment:
        case Moment.NEXT if can_grow:
            return Verdict.KEEP
        case Moment.LOOK if can_grow and (is_said or not may_be_whole):
            return Verdict.KEEP
        case Moment.END if ending is Ending.FAILED or (ending is Ending.UNKNOWN and not is_like_the_last):
            return Verdict.GIVE_UP
        case Moment.NEXT | Moment.LOOK | Moment.END:
            return Verdict.COMMIT if may_be_whole else Verdict.GIVE_UP


@dataclass(frozen=True, slots=True)
class _Open:
    opened: OpenTag
    owner: weakref.ref[object]


class Pending:
    """The checkpoints that are open in this process, and what the script has committed so far."""

    def __init__(self) -> None:
        self._open: list[_Open] = []
        self._names: dict[str, frozenset[str]] = {}  # of the last that was committed of each kind of tag
        self._last_names: frozenset[str] | None = None
        self._is_said = False

    def add(self, opened: OpenTag, owner: object) -> None:
        """The tag is open, and nobody knows how many objects come; `owner` is what the script puts them in with."""
        self._open.append(_Open(opened, weakref.ref(owner)))

    def drop(self, opened: OpenTag) -> None:
        """One of its objects could not be saved: it is nobody's."""
        self._open = [one for one in self._open if one.opened is not opened]

    def committed(self, opened: OpenTag, *, is_said: bool = False) -> None:
        """It is whole; `is_said`: the script has said so by `commit()`."""
        self.drop(opened)
        self._names[_kind(opened.tag)] = self._last_names = frozenset(opened.names)
        self._is_said = self._is_said or is_said

    def settle(self, moment: Moment, ending: Ending = Ending.ORDERLY) -> None:
        """Commits what is whole by all that is known now, and gives up what never will be."""
        for one in list(self._open):
            match self._judge(one, moment, ending):
                case Verdict.COMMIT:
                    self._commit(one.opened)
                case Verdict.GIVE_UP:
                    self.drop(one.opened)
                    log.error(
                        "stepfast: checkpoint %r is not committed: nobody has said that %s is all of it; give "
                        "Checkpoint the number of files, or call commit()",
                        one.opened.tag, ", ".join(map(repr, one.opened.names)) or "nothing",
                    )  # fmt: skip
        while moment is Moment.NEXT and not self._is_said and len(self._open) >= MOST_OPEN:
            oldest = self._open[0].opened
            log.warning(
                "stepfast: checkpoint %r is taken for whole: %s are open, and the script never calls commit()",
                oldest.tag, len(self._open),
            )  # fmt: skip
            self._commit(oldest)

    def _judge(self, one: _Open, moment: Moment, ending: Ending) -> Verdict:
        expected = self._names.get(_kind(one.opened.tag), self._last_names if self._is_said else None)
        return judge(
            one.opened.names, expected, moment=moment, can_grow=one.owner() is not None, is_said=self._is_said,
            ending=ending,
        )  # fmt: skip

    def _commit(self, opened: OpenTag) -> None:
        self.drop(opened)  # whatever comes of it, it is not tried again
        opened.commit()
        self.committed(opened)


def _kind(tag: str) -> str:
    """What tags have in common that differ in their numbers alone."""
    return re.sub(r"[0-9]+", "0", tag)


__all__ = ["Ending", "Moment", "Pending", "Verdict", "judge"]
