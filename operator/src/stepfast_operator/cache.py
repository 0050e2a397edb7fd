"""What is known of pods, nodes and the agents' reports: read once in pages, kept up by watches, trimmed to the fields
that a decision sees (design.md, section 8, says what the alternatives cost).

A watch that says nothing for too long is dropped and begun again, and so is one whose place in history is gone; the age
of the last word is what the liveness probe looks at. Must not know what is done about a change.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Hashable, Iterable
from contextlib import aclosing
from typing import Generic, TypeVar

from stepfast.kube import ALL_FIELDS, Expired, Fields, Kube, KubeError
from stepfast_operator.document import JSON

log = logging.getLogger(__name__)

IDLE_SECONDS = 90.0  # the server sends a bookmark about once a minute
_WATCH_SECONDS = 300
_SHORTEST_WATCH_SECONDS = 0.5  # what ends watches at once, time after time, is not to be asked without a pause
_LONGEST_PAUSE_SECONDS = 15.0
_OUTAGE_SECONDS = 10.0  # what is shorter no controller takes for silence
_CONNECTED_SECONDS = 20.0  # longer than a connection may take: there was a server until a moment ago
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Reflector(Generic[K, V]):
    """A trimmed copy of one kind of objects. `on_change` gets an object's old and new value, either may be None.

    `trim` gives the key and the value of an object, or None for one that is of no interest; of its metadata, `uid` and
    `resourceVersion` are to be among the `fields` that it looks at.
    """

    def __init__(
        self,
        kube: Kube,
        path: str,
        trim: Callable[[JSON], tuple[K, V] | None],
        on_change: Callable[[V | None, V | None], None],
        *,
        fields: Fields = ALL_FIELDS,
        selector: str = "",
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self._fields, self._idle_seconds = fields, idle_seconds
        self._kube, self.path, self._trim, self._on_change = kube, path, trim, on_change
        self._query = {"labelSelector": selector} if selector else {}
        self._held: dict[K, tuple[str, V]] = {}  # with the object's uid
        self._version = ""  # to watch from; empty: list first
        self._told_version = 0  # what came before it was told; grows only
        self._heard = time.monotonic()
        self._failed = -math.inf
        self.synced = asyncio.Event()

    def get(self, key: K) -> V | None:
        held = self._held.get(key)
        return held[1] if held is not None else None

    def values(self) -> Iterable[V]:
        return (value for _, value in self._held.values())

    def age_seconds(self) -> float:
        """How long ago the API server last said anything about this kind."""
        return time.monotonic() - self._heard

    def failed_seconds(self) -> float:
        """How long ago the API server was away, for longer than a moment; infinite when it never was."""
        return time.monotonic() - self._failed

    def take(self, document: JSON) -> None:
        """An object as a request of ours returned it, ahead of the watch.

        An answer may come so late that the watch has told of the object's end already. Versions of one kind of objects
        are numbers that grow: one that was told of and is not held is gone.
        """
        trimmed = self._trim(document)
        if trimmed is not None and trimmed[0] not in self._held and _version_of(document) > self._told_version:
            self._put(document, trimmed)

    def drop(self, key: K, uid: str) -> None:
        """An object that a request of ours ended for good, ahead of the watch."""
        held = self._held.get(key)
        if held is not None and held[0] == uid:
            self._remove(key)

    async def run(self) -> None:
        """Lists and watches until cancelled."""
        failures, failing_since = 0, math.inf
        while True:
            begin = time.monotonic()
            try:
                if self._version:
                    await self._follow()
                    await _not_before(begin + _SHORTEST_WATCH_SECONDS)
                else:
                    await self._list()
                failures, failing_since = 0, math.inf
            except Expired:
                self._version = ""
                await _not_before(begin + _SHORTEST_WATCH_SECONDS)
            except KubeError as error:
                failures += 1
                now = time.monotonic()
                failing_since = now if now - begin > _CONNECTED_SECONDS else min(failing_since, begin)
                if now - failing_since >= _OUTAGE_SECONDS:
                    self._failed = now
                wait = min(_LONGEST_PAUSE_SECONDS, 0.2 * 2.0 ** min(failures, 10)) * random.uniform(0.5, 1.0)
                log.warning("%s is looked at again in %.1f s: %s", self.path, wait, error)
                await asyncio.sleep(wait)

    async def _list(self) -> None:
        """Takes over what is there."""
        # What a request of ours adds meanwhile may be newer than the list.
        seen, before, version = set[K](), set(self._held), ""
        async with aclosing(self._kube.pages(self.path, self._fields, **self._query)) as pages:
            async for page in pages:
                self._heard, version = time.monotonic(), page.version
                for document in page.items:
                    trimmed = self._trim(document)
                    if trimmed is not None:
                        seen.add(trimmed[0])
                        self._put(document, trimmed)
        for key in before - seen:
            if key in self._held:
                self._remove(key)
        self._note_version(version)
        self.synced.set()

    async def _follow(self) -> None:
        """Takes in what changes until the server ends the watch."""
        query = {**self._query, "resourceVersion": self._version, "timeoutSeconds": str(_WATCH_SECONDS)}
        async with aclosing(
            self._kube.watch(self.path, self._fields, idle_seconds=self._idle_seconds, **query)
        ) as events:
            async for event in events:
                self._heard = time.monotonic()
                self._note_version(str(event.object["metadata"]["resourceVersion"]))
                if event.kind == "BOOKMARK":
                    continue
                trimmed = self._trim(event.object)
                if trimmed is None:
                    self._let_go(str(event.object["metadata"]["uid"]))
                    continue
                if event.kind == "DELETED":
                    self.drop(trimmed[0], str(event.object["metadata"]["uid"]))
                else:
                    self._put(event.object, trimmed)
        self._heard = time.monotonic()

    def _put(self, document: JSON, trimmed: tuple[K, V]) -> None:
        key, value = trimmed
        before = self._held.get(key)
        self._held[key] = (str(document["metadata"]["uid"]), value)
        if before is None or before[1] != value:
            self._on_change(before[1] if before is not None else None, value)

    def _let_go(self, uid: str) -> None:
        """It may have been one of ours until now: nobody would tell of its end in words that we take in."""
        for key in [key for key, (held, _) in self._held.items() if held == uid]:
            self._remove(key)

    def _remove(self, key: K) -> None:
        _, value = self._held.pop(key)
        self._on_change(value, None)

    def _note_version(self, version: str) -> None:
        self._version = version
        self._told_version = max(self._told_version, int(version))


def _version_of(document: JSON) -> int:
    return int(document["metadata"]["resourceVersion"])


async def _not_before(time_seconds: float) -> None:
    """Returns at that time of the monotonic clock, or at once when it is over."""
    await asyncio.sleep(max(0.0, time_seconds - time.monotonic()))
