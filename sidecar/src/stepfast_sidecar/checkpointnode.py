"""This node's CheckpointNode: what the agent tells the cluster, and what the operator asks of it.

`status` is the agent's, `spec.requests` the operator's: one writer each (I8). A spec that was not seen yet is carried
out, then acknowledged by a status with its generation that was taken after it. What matters to a decision is written
at once, progress alone every few seconds. Nothing here holds up the agent: an API server that is away, slow, or knows
no such objects is asked again and again, and said so once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite
from typing import Any, Protocol

from stepfast.answertime import AnswerTime
from stepfast.errors import AgentError, SpecError
from stepfast.nodestatus import JobStatus, NodeStatus, RankStatus, format_time, to_document
from stepfast.step import JobKey, is_run
from stepfast_sidecar.gangs import Gang, parse_gang

log = logging.getLogger(__name__)

API_VERSION, KIND = "stepfast.dev/v1alpha1", "CheckpointNode"
_COALESCE_SECONDS = 5.0  # between two writes that tell of progress alone
_PROGRESS_WRITES_A_SECOND = 500  # of all agents of a gang: more would be a burden for the API server
_PROGRESS_SHARE = 0.001  # of an agent's time in which the API server is busy with its progress
_LONGEST_COALESCE_SECONDS = 30.0
_GAP_SECONDS = 0.2  # between any two writes: a job of tiny steps must not write all day
# At most as seldom as a kubelet renews its Lease: after an outage a gang that is to start again waits for its agents.
_RETRY_SECONDS = (0.2, 1.0, 2.0, 5.0, 10.0)
_FAREWELL_SECONDS = 5.0
_ERROR_CHARACTERS = 2000

Object = Mapping[str, Any]


class ApiError(AgentError):
    """The API server refused, failed, or did not answer."""


class ApiNotFound(ApiError):
    """There is no such object, or no such kind of objects."""


class ApiExpired(ApiError):
    """That resource version is too old to go on from."""


class Api(Protocol):
    """The few requests that are made. Each raises ApiError, in time."""

    async def find(self, name: str) -> tuple[Object | None, str]:
        """The CheckpointNode, if there is one, and the resource version to watch from."""

    async def create(self, body: Object) -> Object: ...
    async def node_uid(self, name: str) -> str: ...
    async def patch_status(self, name: str, status: Object) -> None: ...

    def watch(self, name: str, resource_version: str) -> AsyncGenerator[tuple[str, Object], None]:
        """What happens to the object, until the server ends it: ADDED, MODIFIED, DELETED, BOOKMARK."""

    async def close(self) -> None: ...


class Action(StrEnum):
    """What the operator asks for."""

    FLUSH = "Flush"
    SAVE = "Save"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRequest:
    """One of `spec.requests`: it stands until the operator takes it away, and may be carried out repeatedly."""

    job: JobKey
    run: str
    action: Action


class Source(Protocol):
    """Whose status it is. Implemented by the agent."""

    def status(self) -> NodeStatus: ...
    def carry_out(self, requests: tuple[NodeRequest, ...]) -> None: ...
    def take_gangs(self, gangs: tuple[Gang, ...]) -> None: ...


def requests_of(found: Object) -> tuple[NodeRequest, ...]:
    """What the spec asks for. What this agent does not understand is passed over, and said."""
    requests = []
    for entry in (found.get("spec") or {}).get("requests") or ():
        try:
            job = JobKey(namespace=entry["namespace"], name=entry["name"])
            if not is_run(entry["run"]):
                raise ValueError(f"{entry['run']!r} is no run")
            requests.append(NodeRequest(job=job, run=entry["run"], action=Action(entry["action"])))
        except (KeyError, TypeError, ValueError, SpecError) as error:
            log.error("a request of the operator is not understood: %s (%s)", entry, error)
    return tuple(requests)


def gangs_of(found: Object) -> tuple[Gang, ...]:
    """The gangs that mirror their steps, as the spec names them. What does not make sense is passed over, and said."""
    gangs = []
    for entry in (found.get("spec") or {}).get("gangs") or ():
        try:
            gangs.append(parse_gang(entry))
        except (KeyError, TypeError, ValueError, SpecError) as error:
            log.error("a gang that the operator names is not understood: %s (%s)", entry, error)
    return tuple(gangs)


def news_of(status: NodeStatus) -> tuple[object, ...]:
    """What of a status is told at once when it changes."""
    return status.notice, *(_job_news(job) for job in status.jobs)


def _job_news(job: JobStatus) -> tuple[object, ...]:
    ranks = tuple(_rank_news(rank) for rank in job.ranks)
    is_idle = not job.pending_steps
    # A flush is over with the last byte, also of a step that another node's lost part keeps from being committed.
    is_left_to_others = not job.pending_bytes and set(job.pending_steps) <= set(job.incomplete_steps or ())
    is_written = is_left_to_others or any(rank.alive for rank in job.ranks)
    return job.job, job.run, job.latest_persisted_step, job.persist_error, job.final_step, is_idle, is_written, ranks


def _rank_news(rank: RankStatus) -> tuple[object, ...]:
    return rank.rank, rank.joined_time, rank.alive, rank.clean, rank.restored_time, rank.restored_step


def progress_seconds(status: NodeStatus, answer_seconds: float = 0.0) -> float:
    """Between two writes that tell of progress alone: rarer in large gangs, whose agents share one API server, and the
    longer that server takes to answer: then it has many agents, or little time.

    What matters to a decision is told at once in any gang, and hangs are looked for in minutes.
    """
    nodes = max((job.world_size // max(1, len(job.ranks)) for job in status.jobs), default=1)
    seconds = max(_COALESCE_SECONDS, nodes / _PROGRESS_WRITES_A_SECOND, answer_seconds / _PROGRESS_SHARE)
    return min(_LONGEST_COALESCE_SECONDS, seconds)


def status_document(
    status: NodeStatus, *, generation: int, is_ready: bool, since: float, reason: str, message: str
) -> dict[str, Any]:
    """`CheckpointNode.status`. No tenant can make it too large to be written, nor anything but JSON."""
    document = to_document(status)
    del document["node"]
    for job in document["jobs"]:
        for error in {"persistError", "mirrorError"} & job.keys():
            job[error] = job[error][:_ERROR_CHARACTERS]
        for number, rank in enumerate(job["ranks"]):
            metrics = rank.pop("metrics", {})
            if number == 0 and metrics:  # the gang's are those of its first rank; JSON has no NaN
                rank["metrics"] = {name: value for name, value in metrics.items() if isfinite(value)}
    ready = {
        "type": "Ready", "status": "True" if is_ready else "False", "reason": reason, "message": message,
        "lastTransitionTime": format_time(since), "observedGeneration": generation,
    }  # fmt: skip
    return {"conditions": [ready], "observedGeneration": generation, **document}


class Work(StrEnum):
    """The two things that are done for ever, side by side."""

    FOLLOW = "follow"
    WRITE = "write"


class CheckpointNodeWriter:
    """Keeps the object. `run` never ends by itself and never raises ApiError."""

    def __init__(self, node: str, source: Source, connect: Callable[[], Awaitable[Api]]) -> None:
        self._node, self._source, self._connect = node, source, connect
        self._api: Api | None = None
        self._connecting = asyncio.Lock()
        self._seen: tuple[str, int] | None = None  # the object's uid and the generation that was carried out
        self._wake = asyncio.Event()
        self._waking: asyncio.TimerHandle | None = None
        self._written: tuple[object, ...] | None = None  # what was told last, and of which object
        self._written_time = 0.0  # by the event loop's clock
        self._answers = AnswerTime(inertia=2.0)  # of the API server: writes are seconds apart
        self._progress_seconds = _COALESCE_SECONDS  # as was told in the last one
        self._since = time.time()
        self._failures: dict[Work, int] = {}  # in a row

    # ------------------------------------------------------------ what the agent calls

    def changed(self, at_once: bool) -> None:
        """Something worth telling happened. What is not urgent is looked at together with what follows."""
        if at_once:
            self._wake.set()
        elif self._waking is None:
            self._waking = asyncio.get_running_loop().call_later(_GAP_SECONDS, self._woken)

    def _woken(self) -> None:
        self._waking = None
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for work, doing in ((Work.FOLLOW, self._follow), (Work.WRITE, self._write)):
                    group.create_task(self._for_ever(work, doing), name=f"{work} the CheckpointNode")
        finally:
            if self._waking is not None:
                self._waking.cancel()

    async def say_goodbye(self) -> None:
        """The last status, when the agent has flushed and ends; `run` must be over. A moment is all it may take."""
        if self._api is None:
            return
        with contextlib.suppress(ApiError, TimeoutError):
            async with asyncio.timeout(_FAREWELL_SECONDS):
                if self._seen is not None:
                    self._since = time.time()
                    await self._patch(self._api, is_ready=False, reason="Ended", message="the agent was ended")
        await self._api.close()

    # ------------------------------------------------------------ inside

    async def _for_ever(self, work: Work, doing: Callable[[Api], Awaitable[None]]) -> None:
        while True:
            try:
                async with self._connecting:
                    if self._api is None:
                        self._api = await self._connect()
                await doing(self._api)
                continue
            except ApiExpired as error:
                log.info("the CheckpointNode %s is listed anew: %s", self._node, error)
                failures = 1
            except ApiError as error:
                failures = self._failures[work] = self._failures.get(work, 0) + 1
                if failures == 1:  # said once
                    log.error("cannot %s the CheckpointNode %s; tried again and again: %s", work, self._node, error)
            except Exception:  # a task's outermost frame: the agent goes on without it
                failures = len(_RETRY_SECONDS)
                log.exception("cannot %s the CheckpointNode %s", work, self._node)
            pause = _RETRY_SECONDS[min(failures, len(_RETRY_SECONDS)) - 1]
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))  # many agents lose one API server at once

    def _succeeded(self, work: Work) -> None:
        if self._failures.pop(work, 0):
            log.info("the CheckpointNode %s: it is possible again to %s it", self._node, work)

    async def _follow(self, api: Api) -> None:
        """Sees to it that there is an object, and carries out what its spec says, until the server ends the watch."""
        found, version = await api.find(self._node)
        if found is None:
            found = await api.create(await self._new_object(api))
        self._take(found)
        while True:
            async with contextlib.aclosing(api.watch(self._node, version)) as events:
                async for kind, event in events:
                    self._succeeded(Work.FOLLOW)
                    version = event["metadata"]["resourceVersion"]
                    if kind == "DELETED":
                        self._seen = None
                        return
                    if kind != "BOOKMARK":
                        self._take(event)
            self._succeeded(Work.FOLLOW)
            await asyncio.sleep(_GAP_SECONDS)  # between two watches, however short the server makes them

    async def _new_object(self, api: Api) -> Object:
        owner = {"apiVersion": "v1", "kind": "Node", "name": self._node, "uid": await api.node_uid(self._node)}
        metadata = {"name": self._node, "ownerReferences": [owner]}
        return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": {}}

    def _take(self, found: Object) -> None:
        metadata = found["metadata"]
        now_seen = (metadata["uid"], metadata["generation"])
        if now_seen == self._seen:
            return
        if self._seen is None or self._seen[0] != now_seen[0]:
            self._since = time.time()
        self._source.take_gangs(gangs_of(found))
        self._source.carry_out(requests_of(found))
        self._seen = now_seen
        self._wake.set()

    async def _write(self, api: Api) -> None:
        """One status, when there is one to write."""
        await self._wake.wait()
        self._wake.clear()
        now = asyncio.get_running_loop().time()
        if self._seen is None:
            return  # `_take` wakes
        status = self._source.status()
        is_news = (self._seen, news_of(status)) != self._written
        wait_seconds = self._written_time + (_GAP_SECONDS if is_news else self._progress_seconds) - now
        if wait_seconds > 0:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_seconds):
                    await self._wake.wait()
            self._wake.set()
            return
        try:
            await self._patch(api, is_ready=True, reason="Serving", message="the agent serves this node's pods")
        except ApiError:
            self._wake.set()
            raise
        self._succeeded(Work.WRITE)

    async def _patch(self, api: Api, *, is_ready: bool, reason: str, message: str) -> None:
        status, seen = self._source.status(), self._seen
        if seen is None:
            return
        seconds = progress_seconds(status, self._answers.seconds)
        document = status_document(
            replace(status, written_time=time.time(), progress_seconds=round(seconds, 3)),
            generation=seen[1],
            is_ready=is_ready,
            since=self._since,
            reason=reason,
            message=message,
        )
        begin = asyncio.get_running_loop().time()
        await api.patch_status(self._node, document)
        self._progress_seconds = seconds  # not before it was told: a step may be as old as that
        self._written = (seen, news_of(status))
        self._written_time = asyncio.get_running_loop().time()
        self._answers.note(self._written_time - begin)
