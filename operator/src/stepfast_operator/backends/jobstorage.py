"""A job's committed steps in its storage, as an operator reads and rolls them back: blocking calls beside the event
loop, one at a time, none waited for without end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from stepfast.catalog import committed_steps, supersede_after
from stepfast.errors import StorageUnavailable
from stepfast.layout import job_folder
from stepfast.step import JobKey
from stepfast.storage.base import Store
from stepfast_operator.backends.blocking import call_in_thread
from stepfast_operator.observed import Committed

_STORAGE_SECONDS = 120.0
_STORE_CLOSE_SECONDS = 5.0
T = TypeVar("T")


class JobStorage:
    """One job's folder below a storage's root."""

    def __init__(self, job: JobKey, uri: str, open_store: Callable[[str], Store]) -> None:
        self._folder, self.uri, self._open_store = job_folder(job), uri, open_store
        self._is_let_go = asyncio.Event()
        self._store: Store | None = None
        self._free = asyncio.Event()  # no call is under way
        self._free.set()
        self._is_close_due = False  # once the call that hangs is over

    @property
    def job_uri(self) -> str:
        """The job's own folder."""
        return f"{self.uri.rstrip('/')}/{self._folder}"

    def let_go(self) -> None:
        """A call that hangs is not waited for any more, now or later: the job is asked to stop."""
        self._is_let_go.set()

    async def read_steps(self) -> Sequence[Committed]:
        """The usable committed steps, newest last. Raises StorageError."""
        found = await self._call(lambda store: committed_steps(store, self._folder))
        return [
            Committed(step=step.step, size_bytes=step.size_bytes, committed_time=step.committed_time)
            for step in found
            if step.damage is None
        ]

    async def supersede_after(self, step: int) -> None:
        """Marks the committed steps above this one superseded. Raises StorageError."""
        await self._call(lambda store: supersede_after(store, self._folder, step))

    async def close(self) -> None:
        """Lets go of the storage, if it hangs as soon as it answers; the next call opens it again."""
        if not self._free.is_set():
            self._is_close_due = True
        elif (closing := self._start_close()) is not None:
            await asyncio.wait({closing}, timeout=_STORE_CLOSE_SECONDS)

    def _start_close(self) -> asyncio.Future[None] | None:
        store, self._store = self._store, None
        return call_in_thread(store.close, name="stepfast-storage") if store is not None else None

    async def _call(self, call: Callable[[Store], T]) -> T:
        """One call at a time: one that hangs is not joined by others, and a roll-back that comes late is over before
        anything is planned on top of it.
        """

        def work() -> T:
            if self._store is None:
                self._store = self._open_store(self.uri)
            return call(self._store)

        unavailable = StorageUnavailable(f"{self.uri} does not answer within {_STORAGE_SECONDS:g} s")
        if not self._free.is_set():
            raise unavailable
        self._free.clear()
        under_way = call_in_thread(work, name="stepfast-storage")
        under_way.add_done_callback(self._set_free)
        let_go = asyncio.ensure_future(self._is_let_go.wait())
        try:
            either: set[asyncio.Future[Any]] = {under_way, let_go}
            await asyncio.wait(either, timeout=_STORAGE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            let_go.cancel()
        if under_way.done():
            return under_way.result()
        if self._is_let_go.is_set():
            raise StorageUnavailable(f"{self.uri} had not answered when the job was asked to stop")
        raise unavailable

    def _set_free(self, call: asyncio.Future[T]) -> None:
        self._free.set()
        if self._is_close_due:
            self._is_close_due = False
            self._start_close()
        if not call.cancelled():
            call.exception()  # nobody may be left to ask for it
