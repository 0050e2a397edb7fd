"""A watch that the server ends at once, time after time, is not begun again without a pause; and what is told of an
object that is not ours any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

import pytest

from stepfast.kube import ALL_FIELDS, Expired, Fields, Kube, Page, WatchEvent
from stepfast_operator.cache import Reflector
from stepfast_operator.document import JSON


class Refusing(Kube):
    """Lists nothing, and ends every watch as it begins."""

    def __init__(self, error: Exception | None = None) -> None:
        self.watches, self._error = 0, error

    async def pages(self, path: str, fields: Fields = ALL_FIELDS, /, **query: str) -> AsyncGenerator[Page, None]:
        yield Page(items=[], version="1")

    async def watch(
        self, path: str, fields: Fields = ALL_FIELDS, /, *, idle_seconds: float, **query: str
    ) -> AsyncGenerator[WatchEvent, None]:
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


class Telling(Refusing):
    """One object is ours at first; the first watch tells these events of it, and stays."""

    def __init__(self, *events: WatchEvent) -> None:
        super().__init__()
        self._events = events

    async def pages(self, path: str, fields: Fields = ALL_FIELDS, /, **query: str) -> AsyncGenerator[Page, None]:
        yield Page(items=[thing("1")], version="1")

    async def watch(
        self, path: str, fields: Fields = ALL_FIELDS, /, *, idle_seconds: float, **query: str
    ) -> AsyncGenerator[WatchEvent, None]:
        for event in self._events:
            yield event
        await asyncio.Event().wait()


def thing(version: str, *, uid: str = "u", **fields: str) -> JSON:
    return {"metadata": {"name": "a", "uid": uid, "resourceVersion": version, **fields}}


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        pytest.param(thing("2", owner="nobody"), [(None, "a"), ("a", None)], id="it became nobody's"),
        pytest.param(thing("2", uid="other", owner="nobody"), [(None, "a")], id="another one never was"),
    ],
)
def test_object_that_stops_being_ours_is_let_go(told: JSON, expected: list[tuple[str | None, str | None]]) -> None:
    """Else its end, which is told of what it was last, would never be taken in."""
    changes: list[tuple[str | None, str | None]] = []

    def ours(document: JSON) -> tuple[str, str] | None:
        name = document["metadata"]["name"]
        if name == "end":
            done.set()
        return None if "owner" in document["metadata"] else (name, name)

    async def follow() -> None:
        marker = {"metadata": {"name": "end", "uid": "e", "resourceVersion": "3", "owner": "nobody"}}
        kube = Telling(WatchEvent(kind="MODIFIED", object=told), WatchEvent(kind="ADDED", object=marker))
        reflector: Reflector[str, str] = Reflector(kube, "/pods", ours, lambda old, new: changes.append((old, new)))
        task = asyncio.create_task(reflector.run())
        await asyncio.wait_for(done.wait(), 60)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    done = asyncio.Event()
    asyncio.run(follow())
    assert changes == expected
