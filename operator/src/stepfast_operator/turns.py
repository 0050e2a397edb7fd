"""How much is done at a time: jobs are looked at in turn, so that a thousand that want something at once neither keep
the Lease from being renewed in time nor wait for each other's answers in the middle of what they do.

All that may be under way together (turns, their pods, what they ask of agents, the watches, the Lease) needs fewer
connections than the client has, 100: a request that waits for one is over before it was sent (`lease.PATIENCE`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

from stepfast.errors import StepfastError

T = TypeVar("T")

TURNS = 16
POD_REQUESTS = 48  # of all jobs together
AGENT_REQUESTS = 24
_PODS_OF_ONE_GANG = 24  # a large one leaves room for others


class Turn:
    """One look at one job, which lasts until its end or until `end`."""

    def __init__(self, free: asyncio.Semaphore | None = None) -> None:
        self._free = free

    def end(self) -> None:
        """What follows waits for others, and is not to hold up anybody."""
        if self._free is not None:
            self._free.release()
            self._free = None


class Turns:
    """Whoever asks first has the next one."""

    def __init__(self) -> None:
        self._free, self._pods = asyncio.Semaphore(TURNS), asyncio.Semaphore(POD_REQUESTS)

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[Turn]:
        await self._free.acquire()
        turn = Turn(self._free)
        try:
            yield turn
        finally:
            turn.end()

    async def each(self, request: Callable[[T], Awaitable[None]], pods: Iterable[T]) -> None:
        """A request for each of a gang's pods, so many at a time. Raises one of their errors, for pods that are alike
        are refused for the same reason; what was not begun by then is not begun any more.
        """
        own = asyncio.Semaphore(_PODS_OF_ONE_GANG)

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
