"""Work in the background of one owner, which ends with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Tasks:
    """Tasks that nobody awaits: kept alive here, and what fails is said."""

    def __init__(self, owner: str = "") -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = False

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Begins the work, unless the owner has ended."""
        if self._ended:
            work.close()
            return
        task = asyncio.create_task(work, name=f"{self._owner} {name}".lstrip())
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def end(self) -> None:
        """Cancels all of them, also those that have not had their first turn; no others begin."""
        self._ended = True
        for task in list(self._tasks):
            task.cancel()

    async def cancel(self) -> None:
        """Ends all of them, and returns when they have ended."""
        self.end()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
