"""Which ranks share in a step, when nobody has said it: those that save under its tag, while all are at the same place.

A script for Nebula saves on rank 0 alone, or on every rank, and says neither. The rank that opened a tag first asks, at
its commit, and with its place (`stepfast.torch.places`) when it last put something into it. A rank that has saved under
the tag answers so; one that is beyond that place without has no share in the step, nor has one that opens a later tag
or ends. Who opens the tag after that gets an error, and a step that ranks saved at different places is given up: what
is committed without a rank's files, or with those of another moment, is never taken for whole.

A step whose question is not answered in the end, or of which a rank could not save its share, is given up by all.

Answers come from a thread of each rank. Nothing waits for them but the commit.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from stepfast.errors import GangError, StorageUnavailable
from stepfast.ranks import RankSet
from stepfast.tags import REMEMBERED, TaggedStep
from stepfast.torch.gang import Gang
from stepfast.torch.places import Place, find_place, is_beyond
from stepfast.torch.topics import Topic

log = logging.getLogger("stepfast")

LAST_SECONDS = 30.0  # at the end: how long ranks are waited for that have not answered
_POLL_SECONDS = 0.02
_ABSENT_SECONDS = 10.0  # how long somebody waits for a rank that has never been here
_PATIENCE_SECONDS = 60.0
_KEPT = 1000  # answers that are remembered
_BACK = "back"  # of a rank that had left: it has begun again


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """Who saves under that tag? `opened`, `put`: where the asking rank opened it, and last put something into it."""

    tag: str
    occurrence: int
    number: int
    opened: Place
    put: Place


@dataclass(slots=True, kw_only=True)
class _Share:
    """What this rank has of a step, until it is known who else has."""

    agreed: TaggedStep
    opened: Place
    put: Place
    is_staged: bool = False


@dataclass(slots=True, kw_only=True)
class _Asked:
    """A question of this rank's own."""

    index: int
    agreed: TaggedStep
    time: float
    absent_after: float = math.inf  # from then on who has never been here has no share
    is_long: bool = False
    shares: dict[int, bool] = field(default_factory=dict)  # by rank that has answered, or cannot any more


class Attendance:
    """One rank's questions and answers.

    Called in a thread, for each step that this rank commits: `on_sharers(step, ranks)`, or `on_given_up(step, reason)`.
    `on_look()` is called again and again. `here`: where the rank is. `before`: this rank's of the run that was closed.
    """

    def __init__(
        self, gang: Gang, on_sharers: Callable[[int, RankSet], None], on_given_up: Callable[[int, str], None],
        *, here: Callable[[], Place] = find_place, on_look: Callable[[], None] = lambda: None,
        before: Attendance | None = None,
    ) -> None:  # fmt: skip
        self._gang, self._on_sharers, self._on_given_up = gang, on_sharers, on_given_up
        self._here, self._on_look = here, on_look
        self._shares: dict[int, _Share] = {}  # by the number of the opening
        self._refused: dict[tuple[str, int], None] = {}  # what this rank has said to have no share in, oldest first
        self._given_up: dict[int, str] = {}
        self._newest = -1
        self._next_index = 0
        self._questions: dict[int, _Question] = {}  # of any rank, by index: not answered here
        self._asked: list[_Asked] = []
        self._absent: set[int] = set()  # ranks that were waited for in vain
        self._broken: str | None = None
        self._changed = threading.Condition()
        self._ending = threading.Event()
        self._is_silent, self._last_seconds = False, LAST_SECONDS
        if before is not None:
            # What it has said stays said: nothing is answered twice, nor otherwise.
            self._refused, self._given_up, self._newest = before._refused, before._given_up, before._newest
            self._next_index, self._questions = before._next_index, before._questions
            gang.tell(Topic.LEFT.of(gang.rank), _BACK)
        gang.tell(Topic.PRESENT.of(gang.rank), "")
        self._thread = threading.Thread(target=self._work, name="stepfast-attendance", daemon=True)
        self._thread.start()

    def open(self, agreed: TaggedStep) -> None:
        """This rank shares in the step. Raises GangError when it has said the contrary by going on."""
        place = self._here()
        key = (agreed.tag, agreed.occurrence)
        asked = self._gang.hear([Topic.ASKED.of(agreed.number)])
        is_settled = asked is not None and self._gang.hear([Topic.SHARERS.of(agreed.number)]) is not None
        with self._changed:
            if is_settled or key in self._refused or (asked and is_beyond(place, _question(asked[0]).put)):
                raise GangError(
                    f"rank {self._gang.rank} opens {agreed.tag!r} behind a collective operation that the other ranks "
                    "began after their commit: open it on all ranks that save before any of them goes on, and a tag "
                    "that is saved again and again on the same ranks every time"
                )
            for question in self._questions.values():
                if (question.tag, question.occurrence) == key and question.number != agreed.number:
                    raise GangError(f"tag {agreed.tag!r} was opened by other ranks more than {REMEMBERED} tags ago")
            if agreed.save:
                self._shares[agreed.number] = _Share(agreed=agreed, opened=place, put=place)
            self._newest = max(self._newest, agreed.number)
            for own in self._asked:
                own.absent_after = min(own.absent_after, time.monotonic() + _ABSENT_SECONDS)

    def put(self, agreed: TaggedStep) -> None:
        """This rank puts something into the step."""
        with self._changed:
            if agreed.number in self._shares:
                self._shares[agreed.number].put = self._here()

    def commit(self, agreed: TaggedStep) -> None:
        """This rank has staged its share."""
        with self._changed:
            share = self._shares.get(agreed.number)
            if share is not None:
                share.is_staged = True
            why_not = self._broken or self._given_up.get(agreed.number)
        if share is None:
            self._on_given_up(agreed.step, why_not or "its tag was not open")
            return
        if why_not is not None:
            self._give_up(agreed.number, why_not)
            return
        if agreed.opener != self._gang.rank:
            return
        text = json.dumps([agreed.tag, agreed.occurrence, agreed.number, share.opened, share.put])
        self._gang.tell(Topic.ASKED.of(agreed.number), text)
        index = self._gang.count(Topic.QUESTIONS) - 1
        self._gang.tell(Topic.QUESTION.of(index), text)
        with self._changed:
            self._asked.append(_Asked(index=index, agreed=agreed, time=time.monotonic()))

    def is_past(self, agreed: TaggedStep) -> bool:
        """Whether the rank that opened the tag has committed its share, and this one is beyond that place."""
        asked = self._gang.hear([Topic.ASKED.of(agreed.number)])
        return asked is not None and self._is_beyond(_question(asked[0]))

    def fail(self, agreed: TaggedStep, reason: str) -> None:
        """This rank has no share to give, though it has opened the tag: no rank is to wait for the step."""
        text = f"rank {self._gang.rank}: {reason}"
        self._gang.tell(Topic.FAILED.of(agreed.number), text)
        self._give_up(agreed.number, text)

    def wait(self, step: int, timeout_seconds: float) -> None:
        """Until it is known who shares in the step that this rank has committed, or that it is given up.

        Raises StorageUnavailable, which says whose answer is missing.
        """
        with self._changed:
            for own in self._asked:
                if own.agreed.step == step:
                    own.absent_after = min(own.absent_after, time.monotonic() + _ABSENT_SECONDS)
            if self._changed.wait_for(lambda: not self._is_awaited(step), timeout_seconds):
                return
            (share,) = [share for share in self._shares.values() if share.agreed.step == step]
        raise StorageUnavailable(
            f"{share.agreed.tag!r} (step {step}) was not committed within {timeout_seconds:.0f} s: "
            + self._missing_of(share)
        )

    def close(self, timeout_seconds: float = LAST_SECONDS, *, is_silent: bool = False) -> None:
        """Lets all that this rank has committed settle, for at most so long, and gives up the rest; answers from then
        on as a rank that has ended. `is_silent`: it does not, because it has failed, and might have saved had it come
        so far, or because it soon goes on (`before`).
        """
        self._is_silent, self._last_seconds = is_silent, timeout_seconds
        self._ending.set()
        self._thread.join(timeout_seconds + 5.0)

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        try:
            while not self._ending.wait(_POLL_SECONDS):
                self._look()
            self._end()
        except GangError as error:
            self._break(f"the ranks cannot agree any more on whose they are: {error}")
        except Exception as error:
            log.exception("stepfast: the thread that finds out who shares in a step has failed")
            self._break(f"{type(error).__name__}: {error}")

    def _break(self, reason: str) -> None:
        with self._changed:
            self._broken = reason
            numbers = list(self._shares)
        if not self._ending.is_set():
            log.error("stepfast: steps are not committed any more: %s", reason)
        for number in numbers:
            self._give_up(number, reason)

    def _end(self) -> None:
        for share in list(self._shares.values()):
            if not share.is_staged:
                self.fail(share.agreed, "it ended before its commit")
        now = time.monotonic()
        for asked in self._asked:
            asked.absent_after = min(asked.absent_after, now + min(_ABSENT_SECONDS, self._last_seconds))
        pause = threading.Event()
        while True:
            is_last = time.monotonic() > now + self._last_seconds
            self._look()
            if is_last or not (self._shares or (self._questions and not self._is_silent)):
                break
            pause.wait(_POLL_SECONDS)
        for share in list(self._shares.values()):
            self.fail(share.agreed, f"it ended {self._last_seconds:.0f} s later, and {self._missing_of(share)}")
        if not self._is_silent:
            # Behind what it gave up: who has left without a word has no share.
            self._gang.tell(Topic.LEFT.of(self._gang.rank), "")
        with self._changed:
            self._broken = "its rank has ended"

    def _look(self) -> None:
        self._on_look()
        self._hear()
        self._answer()
        for asked in list(self._asked):
            self._settle(asked)
        for number, share in list(self._shares.items()):
            self._follow(number, share)

    def _hear(self) -> None:
        while (asked := self._gang.hear([Topic.QUESTION.of(self._next_index)])) is not None:
            with self._changed:
                self._questions[self._next_index] = _question(asked[0])
            self._next_index += 1

    def _answer(self) -> None:
        for index, question in list(self._questions.items()):
            with self._changed:
                share = self._shares.get(question.number)
                if share is None and not (question.number in self._given_up or self._is_beyond(question)):
                    continue
                if share is not None and not share.is_staged:
                    continue
                if share is None:
                    self._refused[question.tag, question.occurrence] = None
                    while len(self._refused) > _KEPT:
                        del self._refused[next(iter(self._refused))]
            if share is not None and not _is_at_one_place(share, question):
                self.fail(share.agreed, "it saved at another place of training than the others: give each save a tag")
            self._gang.tell(Topic.ANSWER.of(index, self._gang.rank), "in" if share is not None else "out")
            with self._changed:
                del self._questions[index]

    def _is_beyond(self, question: _Question) -> bool:
        """Whether this rank has passed the place of the question without opening the tag."""
        has_ended = self._ending.is_set() and not self._is_silent
        return has_ended or self._newest > question.number or is_beyond(self._here(), question.put)

    def _settle(self, asked: _Asked) -> None:
        """Says who shares in the step, once everybody has answered, or cannot any more."""
        number = asked.agreed.number
        for rank in range(self._gang.world_size):
            if rank in asked.shares:
                continue
            said = self._gang.hear([Topic.ANSWER.of(asked.index, rank)])
            if said is None and not self._is_absent(rank, asked):
                self._wonder(asked)
                return
            asked.shares[rank] = said == ["in"]
        if self._gang.hear([Topic.FAILED.of(number)]) is None:
            sharers = RankSet.of(rank for rank, shares in asked.shares.items() if shares)
            self._gang.tell(Topic.SHARERS.of(number), str(sharers))
        with self._changed:
            self._asked = [own for own in self._asked if own is not asked]

    def _is_absent(self, rank: int, asked: _Asked) -> bool:
        """Whether the rank cannot answer: it has ended, or never came while this one waited or went on."""
        if self._gang.hear([Topic.LEFT.of(rank)]) not in (None, [_BACK]):
            return True
        if rank not in self._absent and time.monotonic() <= asked.absent_after:
            return False
        if self._gang.hear([Topic.PRESENT.of(rank)]) is not None:
            self._absent.discard(rank)
            return False
        self._absent.add(rank)  # its next absence is believed at once
        return True

    def _follow(self, number: int, share: _Share) -> None:
        """What became of a step that this rank shares in."""
        failed = self._gang.hear([Topic.FAILED.of(number)])
        if failed is not None:
            self._give_up(number, failed[0])
            return
        said = self._gang.hear([Topic.SHARERS.of(number)])
        if said is None:
            return
        sharers = RankSet.parse(said[0], self._gang.world_size)
        if self._gang.rank not in sharers:
            self._give_up(number, f"rank {self._gang.rank} came when it was known already whose it is")
            return
        self._on_sharers(share.agreed.step, sharers)
        with self._changed:
            del self._shares[number]
            self._changed.notify_all()

    def _give_up(self, number: int, reason: str) -> None:
        with self._changed:
            share = self._shares.pop(number, None)
            self._asked = [own for own in self._asked if own.agreed.number != number]
            self._given_up[number] = reason
            while len(self._given_up) > _KEPT:
                del self._given_up[min(self._given_up)]
        if share is not None and share.is_staged:
            self._on_given_up(share.agreed.step, reason)
        with self._changed:
            self._changed.notify_all()

    # ------------------------------------------------------------ who is missing

    def _is_awaited(self, step: int) -> bool:
        return any(share.agreed.step == step for share in self._shares.values())

    def _wonder(self, asked: _Asked) -> None:
        """Says once of a question that it is open for long."""
        if asked.is_long or time.monotonic() < asked.time + _PATIENCE_SECONDS:
            return
        asked.is_long = True
        log.warning(
            "stepfast: %r (step %s) is not committed yet: %s. Save it there too, or let these ranks go on to a "
            "collective operation in which rank %s takes part; what initializes checkpoints is called on every rank",
            asked.agreed.tag, asked.agreed.step, self._missing(asked), self._gang.rank,
        )  # fmt: skip

    def _missing_of(self, share: _Share) -> str:
        for asked in self._asked:
            if asked.agreed.number == share.agreed.number:
                return self._missing(asked)
        return f"rank {share.agreed.opener}, which opened it first, has not said by then whose it is"

    def _missing(self, asked: _Asked) -> str:
        """Which ranks have not answered, as the end of a sentence."""
        missing = [
            rank
            for rank in range(self._gang.world_size)
            if rank not in asked.shares and self._gang.hear([Topic.ANSWER.of(asked.index, rank)]) is None
        ]
        if not missing:
            return "the last answer has come only now"
        ranks = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {RankSet.of(missing)} have"
        return f"{ranks} neither saved it nor gone on, so that nobody knows whether to wait for it"


def _question(text: str) -> _Question:
    tag, occurrence, number, opened, put = json.loads(text)
    return _Question(tag=tag, occurrence=occurrence, number=number, opened=opened, put=put)


def _is_at_one_place(share: _Share, question: _Question) -> bool:
    """Whether both saved before either of them went on."""
    return not (is_beyond(share.opened, question.put) or is_beyond(question.opened, share.put))


__all__ = ["LAST_SECONDS", "Attendance"]
