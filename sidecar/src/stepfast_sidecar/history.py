"""checkpointHistories.csv of one job: rows wait here until the persister has written them."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict

from stepfast.histories import MAX_ROWS, SaveRow
from stepfast.step import JobKey
from stepfast_sidecar.persisterprocess import PersisterLost, PersisterProcess, RequestFailed
from stepfast_sidecar.tasks import Tasks

log = logging.getLogger(__name__)


class History:
    """Rows not yet written."""

    def __init__(self, job: JobKey, persister: PersisterProcess, tasks: Tasks) -> None:
        self._job, self._persister, self._tasks = job, persister, tasks
        self._rows: list[SaveRow] = []
        self._is_writing = False

    @property
    def is_idle(self) -> bool:
        """Whether every row is written."""
        return not self._rows and not self._is_writing

    def note(self, row: SaveRow) -> None:
        """The row is written in the background, soon."""
        self._rows = [*self._rows, row][-MAX_ROWS:]
        if not self._is_writing:
            self._is_writing = True
            self._tasks.start(self._write(), "history")

    async def _write(self) -> None:
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
                    await asyncio.sleep(self._persister.retry_seconds(failures, error))
        finally:
            self._is_writing = False
