"""The operator's parts against a real API server: connections, a namespace of a test's own, jobs, backends."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from backendcontract import DictStore
from stepfast.kube import AlreadyExists, Kube, NotFound
from stepfast.nodestatus import JobStatus, NodeStatus, to_document
from stepfast.step import JobKey
from stepfast.storage.base import Store
from stepfast.storage.rules import StorageRules
from stepfast_operator.backends.kubernetes import Cluster, KubernetesBackend
from stepfast_operator.backends.requests import Requests
from stepfast_operator.backends.rings import Rings
from stepfast_operator.clusterjob import ClusterJob, parse_job, status_of
from stepfast_operator.clusterview import ClusterView
from stepfast_operator.eventlog import EventLog
from stepfast_operator.jobs import Jobs
from stepfast_operator.lease import Lease
from stepfast_operator.metrics import Metrics
from stepfast_operator.record import Attempt, Status
from testoperator.connection import connect
from testoperator.kubelet import Kubelets
from testoperator.polling import DEADLINE_SECONDS

WAITS_FOR_NOTHING = {
    "checkpoint": {"storageUri": "memory://contract", "gracefulSuspendSeconds": 0},
    "failurePolicy": {"backoff": {"baseSeconds": 0}, "flushTimeoutSeconds": 0},
}
STORAGE = StorageRules(allowed=("memory://contract",))
API = "/apis/stepfast.dev/v1alpha1"


async def make_namespace(kube: Kube) -> str:
    """A namespace of a test's own, with the service account that controllers would make."""
    name = f"op-{uuid.uuid4().hex[:8]}"
    await kube.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
    await kube.create(f"/api/v1/namespaces/{name}/serviceaccounts", account)
    return name


async def remove_jobs(kube: Kube, namespace: str) -> None:
    """With their pods. Nothing removes a namespace here, and an operator of all of them would run each job that is left
    in one.
    """
    jobs = f"{API}/namespaces/{namespace}/trainingjobs"
    for job in (await kube.get(jobs))["items"]:
        if job["metadata"].get("finalizers"):
            with suppress(NotFound):
                await kube.patch(f"{jobs}/{job['metadata']['name']}", {"metadata": {"finalizers": None}})
    for kind in (jobs, f"/api/v1/namespaces/{namespace}/pods"):
        await kube.delete(kind, grace_seconds=0)


def manifest(namespace: str, name: str = "job", *, trainer: Any = None, **spec: Any) -> Any:
    """A TrainingJob of one node, which waits for nothing: no agent is here that could answer."""
    train = {"image": "registry/trainer:1", "command": ["torchrun", "train.py"], "numNodes": 1, "numProcPerNode": 1}
    return {
        "apiVersion": "stepfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"namespace": namespace, "name": name},
        "spec": {"trainer": {**train, **(trainer or {})}, **WAITS_FOR_NOTHING, **spec},
    }


class World:
    """One namespace, its kubelets, and what the operator consists of. `operate` makes another operator's parts."""

    def __init__(self, kube: Kube, kubelets: Kubelets, namespace: str) -> None:
        self.kube, self.kubelets, self.namespace = kube, kubelets, namespace
        self.store = DictStore()
        self._stack = AsyncExitStack()

    @classmethod
    @asynccontextmanager
    async def open(cls, kubeconfig: Path) -> AsyncIterator[World]:
        kube = await connect(kubeconfig)
        try:
            namespace = await make_namespace(kube)
            try:
                async with Kubelets(kube, namespace).running() as kubelets:
                    world = cls(kube, kubelets, namespace)
                    async with world._stack:
                        yield world
            finally:
                await remove_jobs(kube, namespace)
        finally:
            await kube.close()

    async def make_job(self, name: str = "job", **fields: Any) -> ClusterJob:
        document = manifest(self.namespace, name, **fields)
        return parse_job(await self.kube.create(f"{API}/namespaces/{self.namespace}/trainingjobs", document))

    async def job(self, job: ClusterJob) -> ClusterJob:
        """The job as it is now."""
        return parse_job(await self.kube.get(job.path))

    async def status(self, job: ClusterJob) -> Status:
        return status_of(await self.kube.get(job.path))

    async def pods(self) -> list[str]:
        listed = await self.kube.get(f"/api/v1/namespaces/{self.namespace}/pods")
        return sorted(pod["metadata"]["name"] for pod in listed["items"])

    async def report(self, index: int, *jobs: JobStatus, mirror_address: str | None = None) -> None:
        """What the agent of that node reports, having done all that it was asked."""
        name = self.kubelets.node(index)
        node = {"apiVersion": "stepfast.dev/v1alpha1", "kind": "CheckpointNode", "metadata": {"name": name}}
        with suppress(AlreadyExists):
            await self.kube.create(f"{API}/checkpointnodes", node)
            self._stack.push_async_callback(self.kube.delete, f"{API}/checkpointnodes/{name}")
        held = await self.kube.get(f"{API}/checkpointnodes/{name}")
        told = NodeStatus(
            node=name, memory_limit_bytes=1, memory_used_bytes=0, jobs=jobs, mirror_address=mirror_address
        )  # fmt: skip
        status = to_document(told)
        del status["node"]
        status["observedGeneration"] = held["metadata"]["generation"]
        await self.kube.patch(f"{API}/checkpointnodes/{name}/status", {"status": status})

    async def make_agent(self, index: int) -> None:
        """The agent's pod on that node, ready."""
        name, node = f"agent-{index}", self.kubelets.node(index)
        marks = {"app.kubernetes.io/name": "stepfast", "app.kubernetes.io/component": "sidecar"}
        spec = {"nodeName": node, "containers": [{"name": "agent", "image": "i"}]}
        pods = f"/api/v1/namespaces/{self.namespace}/pods"
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": marks}, "spec": spec}
        await self.kube.create(pods, pod)
        await self.kube.patch(
            f"{pods}/{name}/status", {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
        )

    async def limit_pods(self, count: int) -> None:
        """A ResourceQuota, with the status that its controller would give it."""
        path, limit = f"/api/v1/namespaces/{self.namespace}/resourcequotas", {"pods": str(count)}
        quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "pods"}, "spec": {"hard": limit}}
        await self.kube.create(path, quota)
        await self.kube.patch(f"{path}/pods/status", {"status": {"hard": limit, "used": {"pods": "0"}}})

    @asynccontextmanager
    async def looking(
        self, kube: Kube | None = None, *,
        wake_job: Callable[[JobKey], None] = lambda job: None,
        wake_later: Callable[[JobKey], None] = lambda job: None,
    ) -> AsyncIterator[ClusterView]:  # fmt: skip
        """What an operator sees of the namespace, and nothing that looks after it."""
        view = ClusterView(
            kube or self.kube, namespaces=[self.namespace], agent_namespace=self.namespace,
            wake_uid=lambda uid: None, wake_job=wake_job, wake_later=wake_later,
        )  # fmt: skip
        task = asyncio.create_task(view.run())
        try:
            await asyncio.wait_for(view.synced(), DEADLINE_SECONDS)
            yield view
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def operate(
        self, kube: Kube | None = None, *, namespaces: Sequence[str] = (), identity: str = "one",
        clock: Callable[[], float] | None = None,
    ) -> Operation:  # fmt: skip
        """All that an operator's backends share, once it has read what is there and holds the Lease."""
        operation = Operation(self, kube or self.kube, namespaces, identity, clock)
        await operation.start()
        self._stack.push_async_callback(operation.close)
        return operation


class Operation:
    """What the backends of one operator share, and the tasks behind it."""

    def __init__(
        self, world: World, kube: Kube, namespaces: Sequence[str], identity: str, clock: Callable[[], float] | None
    ) -> None:
        self.kube, self._namespace = kube, world.namespace
        self._backends: list[KubernetesBackend] = []
        self.metrics = Metrics()
        self.jobs = Jobs(self.metrics)
        self.events = EventLog(kube, identity)
        self.view = ClusterView(
            kube,
            namespaces=namespaces,
            agent_namespace=world.namespace,
            wake_uid=self._wake,
            wake_job=self.jobs.wake_job,
            wake_later=self.jobs.wake_job_later,
        )
        self.lease = Lease(kube, world.namespace, identity)
        self.requests = Requests(kube, self.view.reports.get, self.jobs.is_under_way)

        self.opened: list[str] = []  # storages

        def open_store(uri: str) -> Store:
            self.opened.append(uri)
            return world.store  # type: ignore[return-value] # as much as is needed of one

        rings = Rings(kube, self.view.reports.get, self.jobs.is_under_way)
        self.cluster = Cluster(
            kube=kube, view=self.view, requests=self.requests, rings=rings, lease=self.lease, storage=STORAGE,
            open_store=open_store, began_time=0.0, clock=clock or time.time,
        )  # fmt: skip
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self.view.run()), asyncio.create_task(self.lease.run())]
        await asyncio.wait_for(self.view.synced(), DEADLINE_SECONDS)
        await asyncio.wait_for(self.lease.held.wait(), DEADLINE_SECONDS)

    def backend(self, job: ClusterJob) -> KubernetesBackend:
        backend = KubernetesBackend(self.cluster, job)
        self._backends.append(backend)
        return backend

    async def close(self) -> None:
        """As a killed operator: nothing is given up."""
        await self.jobs.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def look_after(self) -> None:
        """Every job of the namespace, as the operator's own process does; a list and a watch stand in for kopf."""
        self._tasks.append(asyncio.create_task(self.events.run()))
        path = f"{API}/namespaces/{self._namespace}/trainingjobs"
        listed = await self.kube.get(path)
        for document in listed["items"]:
            self.jobs.take(document)
        self.jobs.start(self.cluster, self.events)
        self._tasks.append(asyncio.create_task(self._feed(path, str(listed["metadata"]["resourceVersion"]))))

    async def _feed(self, path: str, version: str) -> None:
        async with aclosing(self.kube.watch(path, idle_seconds=DEADLINE_SECONDS, resourceVersion=version)) as events:
            async for event in events:
                if event.kind == "DELETED":
                    self.jobs.forget(event.object["metadata"]["uid"])
                elif event.kind != "BOOKMARK":
                    self.jobs.take(event.object)

    def _wake(self, uid: str = "") -> None:
        for backend in self._backends:
            backend.changed.set()
        self.jobs.wake(uid)


def planned(job: ClusterJob, attempt: int = 1) -> Status:
    """A status whose attempt is planned."""
    run = f"{job.uid}-{attempt}"
    return Status(attempt=attempt, current=Attempt(attempt=attempt, run=run, resume_step=0, planned_time=1.0))
