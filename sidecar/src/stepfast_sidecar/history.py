"""checkpointHistories.csv of one job: rows wait here until the persister has written them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import asdict

from stepfast.histories import MAX_ROWS, SaveRow
from stepfast.step import JobKey
from stepfast_sidecar.persisterprocess import PersisterLost, PersisterProcess, RequestFailed

log = logging.getLogger(__name__)


class History:
    """Rows not yet written. `write` runs as a task whenever there are some."""

    def __init__(self, job: JobKey, persister: PersisterProcess, retry_seconds: Callable[[int], float]) -> None:
        self._job, self._persister, self._retry_seconds = job, persister, retry_seconds
        self._rows: list[SaveRow] = []
        self._is_writing = False

    @property
    def is_idle(self) -> bool:
        """Whether every row is written."""
        return not self._rows and not self._is_writing

    def add(self, row: SaveRow) -> bool:
        """Notes a row; True when `write` has to be started for it."""
        self._rows = [*self._rows, row][-MAX_ROWS:]
        must_start, self._is_writing = not self._is_writing, True
        return must_start

    async def write(self) -> None:
        """Until no row is left: one request at a time, with all that came meanwhile, while the agent lives."""
        failures = 0
        try:
            while self._rows and not self._persister.is_closed:
                rows, self._rows = self._rows, []
                try:
                    await self._persister.request("history", rows=[asdict(row) for row in rows])
                    failures = 0
                except (PersisterLost, RequestFailed) as error:
                    self._rows = [*rows, *self._rows][-MAX_ROWS:]
                    failures += 1
                    log.warning("%s: checkpointHistories.csv: %s", self._job, error)
                    await asyncio.sleep(self._retry_seconds(failures))
        finally:
            self._is_writing = False
