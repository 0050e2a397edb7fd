"""Steps that have a tag: which step a tag becomes, and what happens with it, agreed on by whoever opens it first. Pure.

A tag is what a user calls a checkpoint: `global_step500`, `epoch=3`, `best`. Steps stay numbers that grow within a run:
`global_step500` is step 500 if that is ahead of all that the run has saved; any other tag is the next step. Ranks that
open the same tag mean the same step; a tag that is opened again is another one.

The book of a run's tags stands where all its ranks find it (`Gang.update`). Owns I7 for steps with a tag: the rank that
opens one first decides for all, from what ranks last published.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from stepfast.admission import RankReport, has_room, outrun
from stepfast.errors import GangError
from stepfast.step import MAX_STEP, OnBusy

REMEMBERED = 16  # tags that a slow rank may still open

_NUMBERED = re.compile(r"global_?step[-_=]?([0-9]{1,18})")


def number_in(tag: str) -> int | None:
    """The step that the tag names, as `global_step500` does; None when it names none."""
    match = _NUMBERED.fullmatch(tag)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedStep:
    """What was agreed on for the `occurrence`th opening of a tag in this run. `number` counts all of them."""

    number: int
    tag: str
    occurrence: int
    opener: int  # the rank that opened it first
    step: int
    save: bool  # False: memory is exhausted, and onBusy is Skip
    due: bool  # persist it
    drop: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TagBook:
    """All tags of a run, the newest last. `last_step`: the highest of the run, or the one that it goes on from."""

    count: int = 0
    last_step: int = -1
    last_due_time: float | None = None  # seconds since the epoch
    forgotten_step: int = -1  # the highest of those that are not in `steps` any more
    steps: tuple[TaggedStep, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> TagBook:
        """The book that was written so; a new one for the empty text."""
        if not text:
            return TagBook()
        values = json.loads(text)
        values["steps"] = tuple(TaggedStep(**{**step, "drop": tuple(step["drop"])}) for step in values["steps"])
        return TagBook(**values)

    def find(self, tag: str, occurrence: int) -> TaggedStep | None:
        """What was agreed on for that opening of the tag, if somebody has opened it."""
        return next((step for step in self.steps if (step.tag, step.occurrence) == (tag, occurrence)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A rank opens a tag for the `occurrence`th time, at that moment (seconds since the epoch).

    `begins_after`: the step that the run goes on from, should this be its first tag. `wanted`: the step that it is to
    become, if that is ahead; None: the one that the tag names. `last_number`: of what the rank opened before; -1:
    nothing. `opens_every_tag`: it opens all that others do. `drops`: steps that are overtaken may be given up.
    """

    tag: str
    occurrence: int
    rank: int
    now: float
    begins_after: int
    wanted: int | None = None
    last_number: int = -1
    opens_every_tag: bool = False
    drops: bool = True


def open_tag(
    book: TagBook,
    opening: Opening,
    reports: Sequence[RankReport],
    *,
    on_busy: OnBusy,
    persist_interval_seconds: float,
    may_save: bool = True,
) -> TagBook:
    """The book with that opening of the tag in it: as it was agreed on before, or decided now. Unless `may_save` it is
    one that no rank saves.

    Raises GangError for one that is so old that nobody knows any more what was agreed on.
    """
    if book.find(opening.tag, opening.occurrence) is not None:
        return book
    latest = max((step.occurrence for step in book.steps if step.tag == opening.tag), default=0)
    if opening.occurrence <= latest or _is_behind(book, opening):
        raise GangError(f"tag {opening.tag!r} was opened by other ranks more than {REMEMBERED} tags ago")
    last = book.last_step if book.count else opening.begins_after
    wanted = opening.wanted if opening.wanted is not None else number_in(opening.tag)
    step = min(MAX_STEP, max(last + 1, wanted if wanted is not None else 0))
    drop = outrun(reports) if opening.drops else ()
    save = may_save and (on_busy is OnBusy.WAIT or all(has_room(report, drop) for report in reports))
    due = save and (
        # The only slot is the next save's too: what stays in memory alone would be in its way for ever.
        any(report.slots == 1 for report in reports)
        or book.last_due_time is None
        or opening.now - book.last_due_time >= persist_interval_seconds
    )
    agreed = TaggedStep(
        number=book.count, tag=opening.tag, occurrence=opening.occurrence, opener=opening.rank, step=step,
        save=save, due=due, drop=drop if save else (),
    )  # fmt: skip
    return replace(
        book,
        count=book.count + 1,
        last_step=step,
        last_due_time=opening.now if due else book.last_due_time,
        steps=(*book.steps, agreed)[-REMEMBERED:],
        forgotten_step=book.steps[0].step if len(book.steps) == REMEMBERED else -1,
    )


def _is_behind(book: TagBook, opening: Opening) -> bool:
    """Whether the tag, which is not in the book, may be one that the book has forgotten.

    Certain where the rank opens every tag. Where it opens some, a tag that names a step tells whether it is an old one.
    """
    newest_forgotten = book.count - len(book.steps) - 1
    if opening.last_number >= newest_forgotten:
        return False
    named = opening.wanted if opening.wanted is not None else number_in(opening.tag)
    return opening.opens_every_tag or (named is not None and named <= book.forgotten_step)
