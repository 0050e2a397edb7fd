"""How much is done at a time: jobs are looked at in turn, so that a thousand that want something at once neither keep
the Lease from being renewed in time nor wait for each other's answers in the middle of what they do. Those of which
nothing is due but progress never have all turns: a slow API server then costs progress, not restarts.

All that may be under way together (turns, their pods, what they ask of agents, Events, the watches, the Lease) needs no
more connections than the client has, 100: a request that waits for one may be over before it was sent
(`lease.PATIENCE`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import TypeVar

from stepfast.errors import StepfastError

T = TypeVar("T")

TURNS = 16
UNHURRIED_TURNS = 8
POD_REQUESTS = 40  # of all jobs together
AGENT_REQUESTS = 20
PODS_OF_ONE_GANG = 20  # a large one leaves room for others


class Turn:
    """One look at one job: asked for when it is made, had while its context lasts or until `end`."""

    def __init__(self, turns: Turns | None = None, *, is_urgent: bool = True) -> None:
        self.is_urgent = is_urgent
        self._turns, self._begun = turns, asyncio.Event()

    def hurry(self) -> None:
        """More than progress is due by now."""
        if not self.is_urgent and self._turns is not None and not self._begun.is_set():
            self._turns.hurry(self)

    def begin(self) -> None:
        self._begun.set()

    def end(self) -> None:
        """What follows waits for others, and is not to hold up anybody."""
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.take_back(self, has_begun=self._begun.is_set())

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
    """Whoever is in a hurry goes first, among these whoever asked first."""

    def __init__(self) -> None:
        self._free, self._unhurried_free = TURNS, UNHURRIED_TURNS
        self._urgent, self._unhurried = deque[Turn](), deque[Turn]()
        self._pods = asyncio.Semaphore(POD_REQUESTS)

    def ask(self, *, is_urgent: bool) -> Turn:
        """The next turn, to be waited for (`async with`)."""
        turn = Turn(self, is_urgent=is_urgent)
        (self._urgent if is_urgent else self._unhurried).append(turn)
        self._give()
        return turn

    def hurry(self, turn: Turn) -> None:
        self._unhurried.remove(turn)
        turn.is_urgent = True
        self._urgent.append(turn)
        self._give()

    def take_back(self, turn: Turn, *, has_begun: bool) -> None:
        """It is over, or nobody waits for it any more."""
        if has_begun:
            self._free += 1
            self._unhurried_free += not turn.is_urgent
        else:
            (self._urgent if turn.is_urgent else self._unhurried).remove(turn)
        self._give()

    def _give(self) -> None:
        while self._free > 0 and (self._urgent or (self._unhurried and self._unhurried_free > 0)):
            turn = self._urgent.popleft() if self._urgent else self._unhurried.popleft()
            self._free -= 1
            self._unhurried_free -= not turn.is_urgent
            turn.begin()

    async def each(self, request: Callable[[T], Awaitable[None]], pods: Iterable[T]) -> None:
        """A request for each of a gang's pods, so many at a time. Raises one of their errors, for pods that are alike
        are refused for the same reason; what was not begun by then is not begun any more.
        """
        own = asyncio.Semaphore(PODS_OF_ONE_GANG)

        async def ask(pod: T) -> None:
            async with own, self._pods:
                await request(pod)

        try:
            async with asyncio.TaskGroup() as group:
                for pod in pods:
                    group.create_task(ask(pod))
        except* StepfastError as several:
            raise _first(several) from None


def _first(several: BaseExceptionGroup[StepfastError]) -> BaseException:
    found: BaseException = several
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
