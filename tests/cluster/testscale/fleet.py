"""The agents of thousands of nodes, played: what each reports in its CheckpointNode, and when, as the real one does.

News (a rank that joined or died, a request that was carried out) is written at once, progress every few seconds while
`is_training`. A rank joins when its pod runs. Nothing is ever left to flush.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from stepfast.answertime import AnswerTime
from stepfast.kube import Kube
from stepfast.nodestatus import JobStatus, NodeStatus, RankStatus, SaveStatus, to_document
from stepfast.step import JobKey
from stepfast_operator import labels
from stepfast_operator.cache import Reflector
from stepfast_operator.podview import NodeReport, PodView, pod_of, report_of
from stepfast_sidecar.checkpointnode import progress_seconds

STEP_SECONDS = 0.5
_GAP_SECONDS = 0.2
_PARALLEL = 64
_API = "/apis/stepfast.dev/v1alpha1/checkpointnodes"


class Fleet:
    """One agent a node, in the pods of a DaemonSet. `namespace` is the operator's."""

    def __init__(self, kube: Kube, nodes: Sequence[str], namespace: str, *, gang_size: dict[str, int]) -> None:
        """`gang_size`: how many pods a job has, by the job's name and from then on; the caller adds to it."""
        self._kube, self._nodes, self._namespace, self._gang_size = kube, nodes, namespace, gang_size
        self.is_training = False
        self.writes = 0
        self._ranks: dict[str, dict[tuple[JobKey, str, int], RankStatus]] = defaultdict(dict)  # by node
        self._newest: dict[JobKey, str] = {}  # runs
        self._has_news: dict[str, asyncio.Event] = {node: asyncio.Event() for node in nodes}
        self._gate = asyncio.Semaphore(_PARALLEL)
        selector = f"{labels.MANAGED_BY}={labels.OPERATOR},{labels.JOB_UID}"
        self.pods: Reflector[tuple[str, str], PodView] = Reflector(
            kube, "/api/v1/pods", _keyed_pod, self._on_pod, selector=selector
        )
        self.reports: Reflector[str, NodeReport] = Reflector(kube, _API, _keyed_report, self._on_report)

    async def make(self) -> None:
        """Their pods, which KWOK runs, and their empty CheckpointNodes."""
        await asyncio.gather(*(self._make_one(node) for node in self._nodes))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Fleet]:
        work = [self.pods.run(), self.reports.run(), *(self._serve(node) for node in self._nodes)]
        async with asyncio.TaskGroup() as group:  # an agent that ends, ends the trial
            tasks = [group.create_task(one) for one in work]
            try:
                yield self
            finally:
                for task in tasks:
                    task.cancel()

    async def _make_one(self, node: str) -> None:
        marks = {"app.kubernetes.io/name": "stepfast", "app.kubernetes.io/component": "sidecar"}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"stepfast-sidecar-{node}", "labels": marks},
            "spec": {"nodeName": node, "containers": [{"name": "agent", "image": "registry/sidecar:1"}]},
        }
        async with self._gate:
            await self._kube.create(f"/api/v1/namespaces/{self._namespace}/pods", pod)
            uid = (await self._kube.get(f"/api/v1/nodes/{node}"))["metadata"]["uid"]
            owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}
            metadata = {"name": node, "ownerReferences": [owner]}
            await self._kube.create(
                _API, {"apiVersion": "stepfast.dev/v1alpha1", "kind": "CheckpointNode", "metadata": metadata}
            )
        self._has_news[node].set()

    async def _serve(self, node: str) -> None:
        """One agent: writes what it knows when that changed, or when progress is due."""
        answers, seconds = AnswerTime(inertia=2.0), progress_seconds(self._status(node))
        await asyncio.sleep(seconds * self._nodes.index(node) / len(self._nodes))  # nodes did not start together
        while True:
            has_news = await _is_set_within(self._has_news[node], seconds)
            if has_news or (self.is_training and self._ranks[node]):
                self._has_news[node].clear()
                async with self._gate:
                    begin, status = time.monotonic(), self._status(node)
                    seconds = progress_seconds(status, answers.seconds)
                    await self._write(replace(status, progress_seconds=seconds))
                    answers.note(time.monotonic() - begin)
            await asyncio.sleep(_GAP_SECONDS)

    def _status(self, node: str) -> NodeStatus:
        return NodeStatus(node=node, memory_limit_bytes=1 << 36, memory_used_bytes=1 << 30, jobs=self._jobs(node))

    async def _write(self, told: NodeStatus) -> None:
        report, status = self.reports.get(told.node), to_document(told)
        del status["node"]
        status["observedGeneration"] = report.generation if report is not None else 1
        await self._kube.patch(f"{_API}/{told.node}/status", {"status": status})
        self.writes += 1

    def _jobs(self, node: str) -> list[JobStatus]:
        now = time.time()
        by_run: dict[tuple[JobKey, str], list[RankStatus]] = defaultdict(list)
        for (job, run, _), rank in self._ranks[node].items():
            by_run[job, run].append(self._advanced(rank, now))
        return [self._job(job, run, ranks) for (job, run), ranks in by_run.items()]

    def _job(self, job: JobKey, run: str, ranks: Sequence[RankStatus]) -> JobStatus:
        step = min((rank.global_step for rank in ranks if rank.global_step), default=None)
        return JobStatus(
            job=job, run=run, world_size=self._gang_size[job.name], ranks=ranks, latest_memory_step=step,
            saves=SaveStatus(count=step or 0, stall_seconds_total=0.01 * (step or 0), stall_seconds_last=0.01),
        )  # fmt: skip

    def _advanced(self, rank: RankStatus, now: float) -> RankStatus:
        """The step that it has made by now, unless training stands still."""
        if not self.is_training or not rank.alive:
            return rank
        step = int((now - rank.joined_time) / STEP_SECONDS)
        return replace(rank, global_step=step, step_time=rank.joined_time + step * STEP_SECONDS) if step else rank

    def _on_pod(self, old: PodView | None, new: PodView | None) -> None:
        pod = new or old
        if pod is None or pod.node is None:
            return
        job = JobKey(namespace=pod.namespace, name=pod.job)
        ranks, key = self._ranks[pod.node], (job, pod.run, pod.index)
        rank = ranks.get(key)
        if new is not None and new.phase == "Running" and rank is None:
            now = time.time()
            ranks[key] = RankStatus(
                rank=pod.index, pid=7, alive=True, clean=False, joined_time=now, restored_step=0, restored_time=now
            )
            self._forget_before(job, pod.run)
        elif (new is None or not new.is_alive) and rank is not None and rank.alive:
            ranks[key] = replace(rank, alive=False, ended_time=time.time())
        else:
            return
        self._has_news[pod.node].set()

    def _forget_before(self, job: JobKey, run: str) -> None:
        """Agents forget a run once the job's next one has begun."""
        if self._newest.get(job) == run:
            return
        self._newest[job] = run
        for node, ranks in self._ranks.items():
            for key in [key for key in ranks if key[0] == job and key[1] != run]:
                del ranks[key]
                self._has_news[node].set()

    def _on_report(self, old: NodeReport | None, new: NodeReport | None) -> None:
        if new is not None and new.observed_generation < new.generation:
            self._has_news[new.node].set()  # something was asked: there is nothing to do for it but to say so


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def _keyed_pod(document: object) -> tuple[tuple[str, str], PodView] | None:
    pod = pod_of(document)
    return None if pod is None else (pod.key, pod)


def _keyed_report(document: object) -> tuple[str, NodeReport]:
    report = report_of(document)
    return report.node, report
