"""How much is done at a time: jobs are looked at in turn, so that a thousand that want something at once neither keep
the Lease from being renewed in time nor wait for each other's answers in the middle of what they do.

Turns are had in lanes. Those of which nothing is due but progress never have all turns: a slow API server then costs
progress, not restarts. Gangs are launched few at a time, and the fewer the longer that takes: a launch is many
requests, and more of them at once than the API server answers at once make each take longer and none be done sooner.

All that may be under way together (turns, their pods, what they ask of agents, Events, the watches, the Lease) needs no
more connections than the client has, 100: a request that waits for one may be over before it was sent
(`lease.PATIENCE`).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from types import TracebackType
from typing import TypeVar

from stepfast.errors import StepfastError

T = TypeVar("T")

TURNS = 16
UNHURRIED_TURNS = 4
POD_REQUESTS = 40  # of all jobs together
AGENT_REQUESTS = 20
PODS_OF_ONE_GANG = 30  # a large one leaves room for others

_FIRST_LAUNCHES = 4
QUICK_SECONDS, SLOW_SECONDS = 0.3, 0.6  # of a turn in which a gang is launched: more at a time, or fewer


class Lane(Enum):
    """What a look is for; in this order turns are given."""

    URGENT = "something happened, or something is due"
    RELAUNCH = "a gang that trained before is to be launched"
    LAUNCH = "a job's first gang is to be launched"
    RETRY = "a launch that failed is tried again"
    PROGRESS = "nothing but progress is due"


# Never fewer at a time. What is slow may be a webhook rather than the API server itself: a gang that trained before is
# not to wait for each other one that did.
LEAST_LAUNCHES = {Lane.RELAUNCH: 2, Lane.LAUNCH: 1, Lane.RETRY: 2}
STORAGE_CALLS = 16  # of each storage
LONGEST_STORAGE_SECONDS = 1.0  # with a turn: thrice what a storage in the same region takes to list and read steps
LONGEST_LAUNCH_SECONDS = 2.0  # one that takes longer goes on beside its turn: what it waits for may hang


class Turn:
    """One look at one job: asked for when it is made, had while its context lasts or until `end`. `waited_seconds`: how
    much of it was waiting for pods to end.
    """

    def __init__(self, turns: Turns | None = None, lane: Lane = Lane.URGENT) -> None:
        self.lane, self.waited_seconds = lane, 0.0
        self._turns, self._begun, self._begin = turns, asyncio.Event(), 0.0
        self._limit: asyncio.TimerHandle | None = None

    def hurry(self) -> None:
        """More than progress is due by now."""
        if self.lane is Lane.PROGRESS and self._turns is not None and not self._begun.is_set():
            self._turns.hurry(self)

    def begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._begin = loop.time()
        if self.lane in LEAST_LAUNCHES:
            self._limit = loop.call_later(LONGEST_LAUNCH_SECONDS, self.end)
        self._begun.set()

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """What lasts longer goes on without the turn: it may hang, and others are to be looked at meanwhile."""
        limit = asyncio.get_running_loop().call_later(seconds, self.end)
        try:
            yield
        finally:
            limit.cancel()

    def end(self) -> None:
        """What follows waits for others, and is not to hold up anybody."""
        turns, self._turns = self._turns, None
        if self._limit is not None:
            self._limit.cancel()
        if turns is not None:
            seconds = asyncio.get_running_loop().time() - self._begin if self._begun.is_set() else None
            turns.take_back(self, seconds)

    async def __aenter__(self) -> Turn:
        try:
            await self._begun.wait()
        except asyncio.CancelledError:
            self.end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()


class Turns:
    """Lanes in their order, in each whoever asked first."""

    def __init__(self) -> None:
        self._waiting = {lane: deque[Turn]() for lane in Lane}
        self._had = dict.fromkeys(Lane, 0)
        self._most = {
            Lane.URGENT: TURNS,
            Lane.RELAUNCH: _FIRST_LAUNCHES,
            Lane.LAUNCH: _FIRST_LAUNCHES,
            Lane.RETRY: _FIRST_LAUNCHES,
            Lane.PROGRESS: UNHURRIED_TURNS,
        }
        self._pods = asyncio.Semaphore(POD_REQUESTS)
        # By its URI, of which an administrator names a few: one that hangs keeps nobody from another.
        self.storages: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(STORAGE_CALLS))

    def ask(self, lane: Lane) -> Turn:
        """The next turn in that lane, to be waited for (`async with`)."""
        turn = Turn(self, lane)
        self._waiting[lane].append(turn)
        self._give()
        return turn

    def hurry(self, turn: Turn) -> None:
        self._waiting[turn.lane].remove(turn)
        turn.lane = Lane.URGENT
        self._waiting[turn.lane].append(turn)
        self._give()

    def take_back(self, turn: Turn, seconds: float | None) -> None:
        """It is over after so long, or (None) nobody waits for it any more."""
        if seconds is None:
            self._waiting[turn.lane].remove(turn)
        else:
            self._had[turn.lane] -= 1
            if turn.lane in LEAST_LAUNCHES:
                self._adapt(turn.lane, seconds)
        self._give()

    def _adapt(self, lane: Lane, seconds: float) -> None:
        """How many are launched at a time: one more when that was quick, fewer when it was slow."""
        if seconds < QUICK_SECONDS:
            self._most[lane] = min(TURNS, self._most[lane] + 1)
        elif seconds > SLOW_SECONDS:
            self._most[lane] = max(LEAST_LAUNCHES[lane], self._most[lane] - 1)

    def _give(self) -> None:
        for lane in Lane:
            while self._waiting[lane] and self._had[lane] < self._most[lane] and sum(self._had.values()) < TURNS:
                self._had[lane] += 1
                self._waiting[lane].popleft().begin()

    async def each(self, request: Callable[[T], Awaitable[None]], pods: Sequence[T]) -> None:
        """A request for each of a gang's pods, so many at a time. Raises one of their errors, for pods that are alike
        are refused for the same reason; what was not begun by then is not begun any more.
        """
        left = iter(pods)

        async def ask() -> None:
            for pod in left:
                async with self._pods:
                    await request(pod)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(PODS_OF_ONE_GANG, len(pods))):
                    group.create_task(ask())
        except* StepfastError as several:
            raise first_of(several) from None


def first_of(several: BaseExceptionGroup[StepfastError]) -> BaseException:
    """One of its errors, out of groups in it."""
    found: BaseException = several
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
