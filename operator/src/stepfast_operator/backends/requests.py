"""What the operator asks of the agents: the spec of their CheckpointNodes. It alone writes it; the agent acknowledges
with `status.observedGeneration`, so that what is reported from then on takes the request in.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from stepfast.kube import Invalid, Kube, NotFound
from stepfast.step import JobKey
from stepfast_operator.backends.written import Written
from stepfast_operator.document import JSON
from stepfast_operator.podview import NodeReport
from stepfast_operator.turns import AGENT_REQUESTS

log = logging.getLogger(__name__)

NEVER = sys.maxsize  # a generation that no report takes in
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


def is_awaited(report: NodeReport, job: JobKey, run: str, *, is_flush_due: bool) -> bool:
    """Whether the node's agent has yet to take in what was asked of it for the run, as its CheckpointNode tells whoever
    did not ask it himself. `is_flush_due`: a flush was asked for; where it does not stand, it is to be asked for anew.

    Another job's request that is as new makes it look so for the moment that the agent needs.
    """
    asked = [ask for ask in Ask if Request(job=job, run=run, ask=ask).to_document() in report.requests]
    if is_flush_due and Ask.FLUSH not in asked:
        return True
    return bool(asked) and report.observed_generation < report.generation


class Requests:
    """All that is asked of all agents. `is_wanted` tells whether something is still asked for a job; what was asked for
    others goes, lest a node's list, which the API bounds, fill up with jobs that are over.
    """

    def __init__(
        self, kube: Kube, report_of: Callable[[str], NodeReport | None], is_wanted: Callable[[JobKey], bool]
    ) -> None:
        self._kube, self._report_of, self._is_wanted = kube, report_of, is_wanted
        self._gate = asyncio.Semaphore(AGENT_REQUESTS)
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._written = Written("requests")
        self._refused: set[str] = set()  # nodes whose CheckpointNode took the last request not: said once

    async def ask(self, nodes: Iterable[str], request: Request) -> dict[str, int]:
        """Asks the agents of these nodes; returns by node the generation from which on a report takes it in: NEVER for
        one that takes no request. All are asked before the first error is raised.

        A request stands until its run is over: asking again changes nothing, and an agent that restarts carries it
        out once more.
        """
        names = list(nodes)

        async def ask(node: str) -> int | None:
            async with self._gate:
                return await self._ask(node, request)

        answers = await asyncio.gather(*map(ask, names), return_exceptions=True)
        asked: dict[str, int] = {}
        for node, answer in zip(names, answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            if answer is not None:
                asked[node] = answer
        return asked

    async def _ask(self, node: str, request: Request) -> int | None:
        wanted = request.to_document()
        async with self._locks[node]:
            report = self._report_of(node)
            if report is None:
                return None
            generation, held = self._written.newest(report, report.requests)
            if wanted in held:
                return generation
            body = {"spec": {"requests": [*(one for one in held if self._is_kept(one, request)), wanted]}}
            try:
                document = await self._kube.patch(f"{_PATH}/{node}", body)
            except NotFound:
                return None
            except Invalid as error:
                self._tell_refused(node, len(body["spec"]["requests"]), error)
                return NEVER
            self._refused.discard(node)
            return self._written.note(node, document)

    def _tell_refused(self, node: str, count: int, error: Invalid) -> None:
        """It is asked again with every pass that waits for it, and is not to fill the log."""
        level = logging.DEBUG if node in self._refused else logging.ERROR
        self._refused.add(node)
        log.log(
            level,
            "CheckpointNode %s takes no request, of %d that would stand there: what its agent holds in memory alone is "
            "waited for until flushTimeoutSeconds are over. Remove requests of jobs that are over (kubectl edit "
            "checkpointnode %s), and check that the CRDs are those of this version: %s",
            node, count, node, error,
        )  # fmt: skip

    def _is_kept(self, one: JSON, request: Request) -> bool:
        """Requests of a job's earlier runs are settled once something is asked for a later one."""
        job = JobKey(namespace=one["namespace"], name=one["name"])
        return self._is_wanted(job) and (job != request.job or one["run"] == request.run)
