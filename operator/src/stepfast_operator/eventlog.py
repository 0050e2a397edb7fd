"""Posts the job's story as Kubernetes Events, beside the reconcile loops: an Event that cannot be posted costs nobody
anything but itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass

from stepfast.kube import Kube, KubeError, KubeUnavailable
from stepfast_operator import events, labels
from stepfast_operator.document import JSON, time_text
from stepfast_operator.reconcile import Pass
from stepfast_operator.record import Status

log = logging.getLogger(__name__)

_QUEUES, _QUEUE = 8, 1250
# The API server's own limits.
_MESSAGE_BYTES = 1024
_INSTANCE_BYTES = 128
_SAID_SECONDS = 300.0  # an error that goes on is said again after so long
_TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Posting:
    namespace: str
    body: JSON


class EventLog:
    """Queues, each with a task that empties it: several, for an API server may take long to answer, and a job's Events
    all in one, so that they stay in their order.
    """

    def __init__(self, kube: Kube, identity: str) -> None:
        self._kube, self._identity = kube, identity
        self._queues: list[asyncio.Queue[_Posting]] = [asyncio.Queue(_QUEUE) for _ in range(_QUEUES)]
        self._said: dict[tuple[str, str], float] = {}  # errors, and when

    def tell(self, job: JSON, seen: Pass) -> None:
        """What one pass brought about."""
        for event in events.events_of(seen):
            self._put(job, event.type, event.reason, event.message)

    def tell_refusal(self, job: JSON, before: Status, after: Status) -> None:
        """What came of a spec that was refused."""
        for event in events.events_of_refusal(before, after):
            self._put(job, event.type, event.reason, event.message)

    def tell_error(self, job: JSON, error: Exception) -> None:
        """Why the job cannot be looked after at present."""
        message = str(error).strip()
        key, now = (job["metadata"]["uid"], message), time.monotonic()
        self._said = {said: when for said, when in self._said.items() if now - when < _SAID_SECONDS}
        if key not in self._said:
            self._said[key] = now
            self._put(job, events.WARNING, events.EventReason.RECONCILE_FAILED, f"{type(error).__name__}: {message}")

    async def run(self) -> None:
        """Posts what is queued until cancelled."""
        async with asyncio.TaskGroup() as group:
            for queue in self._queues:
                group.create_task(self._empty(queue), name="post Events")

    async def _empty(self, queue: asyncio.Queue[_Posting]) -> None:
        while True:
            posting = await queue.get()
            try:
                await self._post(posting)
            except KubeError as error:
                log.warning("an Event was not posted: %s: %s", posting.body["reason"], error)
            queue.task_done()

    async def drain(self, timeout_seconds: float) -> None:
        """Waits until what is queued is posted."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await asyncio.gather(*(queue.join() for queue in self._queues))
        except TimeoutError:
            log.warning("%d Events were not posted", sum(queue.qsize() for queue in self._queues))

    async def _post(self, posting: _Posting) -> None:
        for attempt in range(_TRIES):
            try:
                await self._kube.create(f"/api/v1/namespaces/{posting.namespace}/events", posting.body)
                return
            except KubeUnavailable:
                if attempt == _TRIES - 1:
                    raise
                await asyncio.sleep(0.5 * 2.0**attempt)

    def _put(self, job: JSON, kind: str, reason: str, message: str) -> None:
        metadata, now = job["metadata"], time_text(time.time())
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"namespace": metadata["namespace"], "name": f"{metadata['name']}.{uuid.uuid4().hex[:16]}"},
            "involvedObject": {
                "apiVersion": job["apiVersion"],
                "kind": job["kind"],
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
            "type": kind,
            "reason": reason,
            "message": _cut(message, _MESSAGE_BYTES),
            "action": reason,
            "reportingComponent": labels.OPERATOR,
            "reportingInstance": _cut(self._identity, _INSTANCE_BYTES),
            "source": {"component": labels.OPERATOR},
            "eventTime": now,
            "firstTimestamp": f"{now.partition('.')[0]}Z",
            "lastTimestamp": f"{now.partition('.')[0]}Z",
            "count": 1,
        }
        try:
            queue = self._queues[hash(metadata["uid"]) % _QUEUES]
            queue.put_nowait(_Posting(namespace=metadata["namespace"], body=body))
        except asyncio.QueueFull:
            log.warning("too many Events: %s of %s was left out", reason, metadata["name"])


def _cut(text: str, size: int) -> str:
    """As much of it as its UTF-8 has room in so many bytes."""
    return text.encode()[:size].decode(errors="ignore")
