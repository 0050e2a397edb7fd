"""How much of the memory tier is taken, to the byte: by what is there or being made, and by what was let go until it is
free.

To free a GiB takes a tenth of a second, and a job may leave hundreds: it is done in a thread, so that nobody waits who
does not need that memory (I6, I10).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

log = logging.getLogger(__name__)


class Budget:
    """Methods may be called from several threads, coroutines in an event loop."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._taken, self._leaving = 0, 0  # what is leaving is taken
        self._lock = threading.Lock()
        self._freeing: set[Future[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stepfast-free")

    @property
    def taken_bytes(self) -> int:
        """What is not free."""
        return self._taken

    @property
    def free_bytes(self) -> int:
        """What the limit leaves; negative when an earlier agent was allowed more."""
        return self._limit - self._taken

    @property
    def coming_bytes(self) -> int:
        """What is free, with what will be in a moment."""
        with self._lock:
            return self._limit - self._taken + self._leaving

    def take(self, size_bytes: int) -> bool:
        """Takes so much; False when the limit does not allow it."""
        with self._lock:
            if size_bytes > self.free_bytes:
                return False
            self._taken += size_bytes
            return True

    async def claim(self, size_bytes: int, reclaim: Callable[[int], None] = lambda _: None) -> bool:
        """Takes so much, also of what others give up; False when there is not as much.

        `reclaim` is asked for what is neither free nor leaving, and for nothing beyond the limit, which nobody could
        give up. Waits until what leaves is free.
        """
        if size_bytes > self._limit:
            return False
        while not self.take(size_bytes):
            if (lacking := size_bytes - self.coming_bytes) > 0:
                reclaim(lacking)
                if size_bytes > self.coming_bytes:
                    return False
            if freeing := self._under_way():
                await asyncio.wait(freeing, return_when=asyncio.FIRST_COMPLETED)
        return True

    async def settle(self) -> None:
        """Until what leaves now is free."""
        if freeing := self._under_way():
            await asyncio.wait(freeing)

    def _under_way(self) -> list[asyncio.Future[None]]:
        with self._lock:
            return [asyncio.wrap_future(freeing) for freeing in self._freeing]

    def count(self, size_bytes: int) -> None:
        """Of what an earlier agent left: it is there, whatever the limit says now."""
        with self._lock:
            self._taken += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Of what is free, or was not made after all."""
        with self._lock:
            self._taken -= size_bytes

    def free(self, size_bytes: int, work: Callable[[], None]) -> None:
        """Has so much freed by `work`, in a thread; it is taken until then."""
        with self._lock:
            self._leaving += size_bytes
            freeing = self._thread.submit(self._free, size_bytes, work)
            self._freeing.add(freeing)
        freeing.add_done_callback(self._freed)

    def _free(self, size_bytes: int, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            log.warning("memory of %s bytes that was let go may stay with those who have it: %s", size_bytes, error)
        finally:
            with self._lock:
                self._taken -= size_bytes
                self._leaving -= size_bytes

    def _freed(self, freeing: Future[None]) -> None:
        with self._lock:
            self._freeing.discard(freeing)
