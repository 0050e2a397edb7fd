"""A watch that the server ends at once, time after time, is not begun again without a pause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

from stepfast.kube import Expired, Kube, WatchEvent
from stepfast_operator.cache import Reflector
from stepfast_operator.document import JSON


class Refusing(Kube):
    """Lists nothing, and ends every watch as it begins."""

    def __init__(self, error: Exception | None = None) -> None:
        self.watches, self._error = 0, error

    async def get(self, path: str, **query: str) -> JSON:
        return {"items": [], "metadata": {"resourceVersion": "1"}}

    async def watch(self, path: str, *, idle_seconds: float, **query: str) -> AsyncGenerator[WatchEvent, None]:
        self.watches += 1
        if self._error is not None:
            raise self._error
        for event in ():
            yield event


async def watch_for_a_while(kube: Kube) -> None:
    reflector: Reflector[str, str] = Reflector(kube, "/pods", lambda document: None, lambda old, new: None)
    with suppress(TimeoutError):
        await asyncio.wait_for(reflector.run(), 1.0)


def test_watch_that_ends_at_once() -> None:
    kube = Refusing()
    asyncio.run(watch_for_a_while(kube))
    assert 1 <= kube.watches < 10


def test_history_that_is_never_long_enough() -> None:
    kube = Refusing(Expired("too old"))
    asyncio.run(watch_for_a_while(kube))
    assert 1 <= kube.watches < 10
