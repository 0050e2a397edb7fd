"""How long flushes take. Owns no flush: it watches until a run has nothing left to persist."""

from __future__ import annotations

import asyncio
import time

from stepfast_sidecar.flow import RunFlow
from stepfast_sidecar.metrics import FlushCause, Metrics
from stepfast_sidecar.tasks import Tasks

_POLL_SECONDS = 0.05


class Flushes:
    """Those of one job that are under way."""

    def __init__(self, metrics: Metrics, tasks: Tasks, timeout_seconds: float) -> None:
        self._metrics, self._tasks, self._timeout_seconds = metrics, tasks, timeout_seconds
        self._watched: set[str] = set()

    def begin(self, flow: RunFlow, cause: FlushCause) -> None:
        """Watches the flush that has begun; one that has nothing to do, or is watched already, is none."""
        if flow.run not in self._watched and flow.pending_steps():
            self._watched.add(flow.run)
            self._tasks.start(self._watch(flow, cause), f"flush {flow.run}")

    async def _watch(self, flow: RunFlow, cause: FlushCause) -> None:
        begin = time.monotonic()
        try:
            while flow.pending_steps():
                if time.monotonic() - begin > self._timeout_seconds:
                    return  # what does not come to an end has no duration; the lag tells of it
                await asyncio.sleep(_POLL_SECONDS)
            self._metrics.flushed(cause, time.monotonic() - begin)
        finally:
            self._watched.discard(flow.run)
