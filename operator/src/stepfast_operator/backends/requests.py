"""What the operator asks of the agents: the spec of their CheckpointNodes. It alone writes it; the agent acknowledges
with `status.observedGeneration`, so that what is reported from then on takes the request in.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from stepfast.kube import Kube, NotFound
from stepfast.step import JobKey
from stepfast_operator.document import JSON
from stepfast_operator.podview import NodeReport

_PATH = "/apis/stepfast.dev/v1alpha1/checkpointnodes"


class Ask(StrEnum):
    """FLUSH: persist all that is held of the run. SAVE: have its ranks save at their next agreed step, and wait."""

    FLUSH = "Flush"
    SAVE = "Save"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    job: JobKey
    run: str
    ask: Ask

    def to_document(self) -> JSON:
        return {"namespace": self.job.namespace, "name": self.job.name, "run": self.run, "action": str(self.ask)}


class Requests:
    """All that is asked of all agents. `is_wanted` tells whether a job is still there; what others asked for goes."""

    def __init__(
        self, kube: Kube, report_of: Callable[[str], NodeReport | None], is_wanted: Callable[[JobKey], bool]
    ) -> None:
        self._kube, self._report_of, self._is_wanted = kube, report_of, is_wanted
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._written: dict[str, tuple[int, tuple[JSON, ...]]] = {}  # generation and list, ahead of the watch

    async def ask(self, nodes: Iterable[str], request: Request) -> dict[str, int]:
        """Asks the agents of these nodes; returns by node the generation from which on a report takes it in.

        A request stands until its run is over: asking again changes nothing, and an agent that restarts carries it
        out once more.
        """
        asked = {node: await self._ask(node, request) for node in nodes}
        return {node: generation for node, generation in asked.items() if generation is not None}

    async def _ask(self, node: str, request: Request) -> int | None:
        wanted = request.to_document()
        async with self._locks[node]:
            report = self._report_of(node)
            if report is None:
                return None
            generation, held = self._newest(report)
            if wanted in held:
                return generation
            body = {"spec": {"requests": [*(one for one in held if self._is_kept(one, request)), wanted]}}
            try:
                document = await self._kube.patch(f"{_PATH}/{node}", body)
            except NotFound:
                return None
            generation = int(document["metadata"]["generation"])
            self._written[node] = (generation, tuple(document["spec"]["requests"]))
            return generation

    def _newest(self, report: NodeReport) -> tuple[int, tuple[JSON, ...]]:
        written = self._written.get(report.node)
        if written is not None and written[0] > report.generation:
            return written
        return report.generation, report.requests

    def _is_kept(self, one: JSON, request: Request) -> bool:
        """Requests of a job's earlier runs are settled once something is asked for a later one."""
        job = JobKey(namespace=one["namespace"], name=one["name"])
        return self._is_wanted(job) and (job != request.job or one["run"] == request.run)
