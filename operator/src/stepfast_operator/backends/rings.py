"""Tells agents which gangs mirror their steps: `CheckpointNode.spec.gangs`, which the operator alone writes. Nothing
depends on it but how a lost node is recovered from, so that what fails is tried again by the next pass.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from stepfast.kube import Kube, KubeError, NotFound
from stepfast.step import JobKey
from stepfast_operator.backends.written import Written
from stepfast_operator.document import JSON
from stepfast_operator.podview import NodeReport

log = logging.getLogger(__name__)

_PARALLEL = 40
_PATH = "/apis/stepfast.dev/v1alpha1/checkpointnodes"


class Rings:
    """Of all jobs. `is_wanted` tells whether a job goes on: what was told of others goes."""

    def __init__(
        self, kube: Kube, report_of: Callable[[str], NodeReport | None], is_wanted: Callable[[JobKey], bool]
    ) -> None:
        self._kube, self._report_of, self._is_wanted = kube, report_of, is_wanted
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._written = Written("gangs")

    async def tell(self, job: JobKey, entries: Mapping[str, JSON], others: Iterable[str]) -> None:
        """Has these nodes' agents know their entries of the job, and `others` none."""
        gate = asyncio.Semaphore(_PARALLEL)

        async def tell(node: str, entry: JSON | None) -> None:
            async with gate:
                await self._tell(job, node, entry)

        wanted: dict[str, JSON | None] = {**dict.fromkeys(others, None), **entries}
        await asyncio.gather(*(tell(node, entry) for node, entry in wanted.items()))

    async def _tell(self, job: JobKey, node: str, entry: JSON | None) -> None:
        async with self._locks[node]:
            report = self._report_of(node)
            if report is None:
                return
            _, held = self._written.newest(report, report.gangs)
            mine = [one for one in held if _job_of(one) == job]
            if mine == ([] if entry is None else [entry]):
                return
            kept = [one for one in held if _job_of(one) != job and self._is_wanted(_job_of(one))]
            body = {"spec": {"gangs": [*kept, *([] if entry is None else [entry])]}}
            try:
                document = await self._kube.patch(f"{_PATH}/{node}", body)
            except NotFound:
                return
            except KubeError as error:
                log.warning("the agent of %s is not told that it mirrors %s; tried again: %s", node, job, error)
                return
            self._written.note(node, document)


def _job_of(entry: JSON) -> JobKey:
    return JobKey(namespace=entry["namespace"], name=entry["name"])
