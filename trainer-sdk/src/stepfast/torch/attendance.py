"""Which ranks share in a step, when nobody has said it: those that open its tag, while all are at the same place.

A script for Nebula saves on rank 0 alone, or on every rank, and says neither. The rank that opened a tag first asks, at
its commit, and with the number of collective operations that it has begun by then. A rank that has opened the tag
answers so; one that has begun a later operation without, which it can only do beyond the place where the others saved,
has no share in the step. Ranks that open a later tag, or end, have none either. A tag that is opened after such an
answer is an error: what is committed without a rank's files is never taken for whole.

Answers come from a thread of each rank. Nothing waits for them but the commit.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist

from stepfast.errors import GangError
from stepfast.ranks import RankSet
from stepfast.tags import TaggedStep
from stepfast.torch.gang import Gang

log = logging.getLogger("stepfast")

_POLL_SECONDS = 0.02
_BACK = "back"  # of a rank that had left: it has begun again
_LAST_SECONDS = 10.0  # at the end: how long ranks are waited for that have not answered


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """Who opens that tag? `place`: collective operations that the asking rank had begun; None: it has no group."""

    tag: str
    occurrence: int
    number: int
    place: int | None


@dataclass(slots=True)
class _Asked:
    """A question of this rank's own."""

    index: int
    number: int
    is_overdue: bool = False  # it has gone on to a later tag: who is not here yet has no share
    shares: dict[int, bool] = field(default_factory=dict)  # by rank that has answered, or cannot any more


class Attendance:
    """One rank's questions and answers. `on_sharers(step, ranks)` is called, in a thread, for each step it commits."""

    def __init__(
        self, gang: Gang, on_sharers: Callable[[int, RankSet], None], before: Attendance | None = None
    ) -> None:
        """`before`: this rank's, in this run, that was closed."""
        self._gang, self._on_sharers = gang, on_sharers
        self._opened: dict[tuple[str, int], int] = {}  # the number of each opening
        self._refused: set[tuple[str, int]] = set()
        self._newest = -1
        self._next_index = 0
        self._questions: dict[int, _Question] = {}  # of any rank, by index: not answered here
        self._asked: list[_Asked] = []
        self._awaited: dict[int, int] = {}  # by number, the step that was committed here
        self._lock = threading.Lock()
        self._ending = threading.Event()
        if before is not None:
            # What it has said stays said: nothing is answered twice, nor otherwise.
            self._opened, self._refused, self._newest = before._opened, before._refused, before._newest
            self._next_index, self._questions = before._next_index, before._questions
            self._awaited = before._awaited
            gang.tell(f"tags/left/{gang.rank}", _BACK)
        gang.tell(f"tags/present/{gang.rank}", "")
        self._thread = threading.Thread(target=self._work, name="stepfast-attendance", daemon=True)
        self._thread.start()

    def open(self, agreed: TaggedStep) -> None:
        """This rank shares in the step. Raises GangError when it has said the contrary by going on."""
        key = (agreed.tag, agreed.occurrence)
        with self._lock:
            if key in self._refused:
                raise GangError(
                    f"rank {self._gang.rank} opens {agreed.tag!r} behind a collective operation that the other ranks "
                    "began after their commit: open it on all ranks that save before any of them goes on"
                )
            self._opened[key] = agreed.number
            self._newest = max(self._newest, agreed.number)
            for asked in self._asked:
                asked.is_overdue = True

    def commit(self, agreed: TaggedStep) -> None:
        """This rank has staged its share."""
        with self._lock:
            self._awaited[agreed.number] = agreed.step
        if agreed.opener != self._gang.rank:
            return
        text = json.dumps([agreed.tag, agreed.occurrence, agreed.number, _place()])
        self._gang.tell(f"tags/asked/{agreed.number}", text)
        index = self._gang.count("tags/asks") - 1
        self._gang.tell(f"tags/ask/{index}", text)
        with self._lock:
            self._asked.append(_Asked(index, agreed.number))

    def is_past(self, agreed: TaggedStep) -> bool:
        """Whether the rank that opened the tag has committed its share, and this one is beyond that place."""
        asked = self._gang.hear([f"tags/asked/{agreed.number}"])
        return asked is not None and self._is_beyond(_question(asked[0]))

    def close(self) -> None:
        """Answers what is asked as a rank that has ended, once its own questions are answered."""
        self._ending.set()
        self._thread.join(_LAST_SECONDS + 5.0)

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        try:
            while not self._ending.wait(_POLL_SECONDS):
                self._look()
            self._gang.tell(f"tags/left/{self._gang.rank}", "")
            pause, waited = threading.Event(), 0.0
            while (self._awaited or self._questions) and waited < _LAST_SECONDS:
                self._look()
                pause.wait(_POLL_SECONDS)
                waited += _POLL_SECONDS
            for asked in self._asked:
                asked.is_overdue = True
            self._look(is_last=True)
        except GangError as error:
            if not self._ending.is_set():
                log.error("stepfast: steps are not committed any more, as nobody knows whose they are: %s", error)

    def _look(self, *, is_last: bool = False) -> None:
        self._hear()
        self._answer()
        for asked in list(self._asked):
            self._settle(asked, is_last=is_last)
        for number, step in list(self._awaited.items()):
            said = self._gang.hear([f"tags/sharers/{number}"])
            if said is not None:
                with self._lock:
                    del self._awaited[number]
                self._on_sharers(step, RankSet.parse(said[0], self._gang.world_size))

    def _hear(self) -> None:
        while (asked := self._gang.hear([f"tags/ask/{self._next_index}"])) is not None:
            self._questions[self._next_index] = _question(asked[0])
            self._next_index += 1

    def _answer(self) -> None:
        for index, question in list(self._questions.items()):
            key = (question.tag, question.occurrence)
            with self._lock:
                shares = key in self._opened
                if not shares and not self._is_beyond(question):
                    continue
                if not shares:
                    self._refused.add(key)
            self._gang.tell(f"tags/answer/{index}/{self._gang.rank}", "in" if shares else "out")
            del self._questions[index]

    def _is_beyond(self, question: _Question) -> bool:
        """Whether this rank has passed the place of the question without opening the tag."""
        place = _place()
        return (
            self._ending.is_set()
            or self._newest > question.number
            or (place is not None and question.place is not None and place > question.place)
        )

    def _settle(self, asked: _Asked, *, is_last: bool) -> None:
        """Says who shares in the step, once everybody has answered, or cannot any more."""
        for rank in [rank for rank in range(self._gang.world_size) if rank not in asked.shares]:
            said = self._gang.hear([f"tags/answer/{asked.index}/{rank}"])
            if said is None and not is_last and not self._is_absent(rank, asked):
                return
            asked.shares[rank] = said == ["in"]
        sharers = RankSet.of(rank for rank, shares in asked.shares.items() if shares)
        self._gang.tell(f"tags/sharers/{asked.number}", str(sharers))
        with self._lock:
            self._asked.remove(asked)

    def _is_absent(self, rank: int, asked: _Asked) -> bool:
        """Whether the rank cannot answer: it has ended, or never came while this one went on to its next tag."""
        if self._gang.hear([f"tags/left/{rank}"]) not in (None, [_BACK]):
            return True
        return asked.is_overdue and self._gang.hear([f"tags/present/{rank}"]) is None


def _question(text: str) -> _Question:
    tag, occurrence, number, place = json.loads(text)
    return _Question(tag=tag, occurrence=occurrence, number=number, place=place)


def _place() -> int | None:
    """How many collective operations of the default group this rank has begun; None without one."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    try:
        group = dist.distributed_c10d._get_default_group()
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined] # torch has no public way
    except RuntimeError:  # a backend that does not count
        return None
