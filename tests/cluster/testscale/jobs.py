"""Thousands of TrainingJobs: made, watched, disturbed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from stepfast.kube import Kube
from stepfast.step import JobKey
from stepfast_operator import labels
from stepfast_operator.cache import Reflector
from stepfast_operator.document import time_text
from testoperator.polling import until

API = "/apis/stepfast.dev/v1alpha1"
_PARALLEL = 16
_LOOK_SECONDS = 1.0
_LONGEST_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """What a trial looks at."""

    key: JobKey
    state: str
    attempt: int
    desired: int
    ready: int


def manifest(job: JobKey, pods: int, storage_uri: str) -> dict[str, Any]:
    """A job as users write them: a GPU a pod, an environment, nothing that is unusual."""
    trainer = {
        "image": "registry.example/training/gpt:1.4.2",
        "command": ["torchrun", "train.py"],
        "args": ["--config", "configs/gpt.yaml", "--data", "/data/tokens"],
        "env": [{"name": "NCCL_DEBUG", "value": "WARN"}, {"name": "OMP_NUM_THREADS", "value": "8"}],
        "numNodes": pods,
        "numProcPerNode": 1,
        "resourcesPerNode": {"limits": {"cpu": "1", "memory": "8Gi", "nvidia.com/gpu": 1}},
    }
    policy = {"maxRestarts": 100, "backoff": {"baseSeconds": 0}}
    progress = {"progressDeadlineSeconds": 7200}  # ranks stand still until all jobs are there
    return {
        "apiVersion": "stepfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"namespace": job.namespace, "name": job.name},
        "spec": {
            "trainer": trainer,
            "failurePolicy": policy,
            "progressPolicy": progress,
            "checkpoint": {"storageUri": storage_uri},
        },
    }


class Jobs:
    """Those of a cluster, as a watch tells of them."""

    def __init__(self, kube: Kube, storage_uri: str) -> None:
        self._kube, self._storage_uri = kube, storage_uri
        self._changed = asyncio.Event()
        self._reflector: Reflector[JobKey, JobView] = Reflector(kube, f"{API}/trainingjobs", _viewed, self._on_change)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[Jobs]:
        task = asyncio.create_task(self._reflector.run())
        try:
            await self._reflector.synced.wait()
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def make(self, keys: Sequence[JobKey], pods: int) -> None:
        gate = asyncio.Semaphore(_PARALLEL)

        async def make(key: JobKey) -> None:
            async with gate:
                path = f"{API}/namespaces/{key.namespace}/trainingjobs"
                await self._kube.create(path, manifest(key, pods, self._storage_uri))

        await asyncio.gather(*map(make, keys))

    async def remove(self, key: JobKey) -> None:
        """Deletes it; returns when it is gone, with its pods."""
        await self._kube.delete(f"{API}/namespaces/{key.namespace}/trainingjobs/{key.name}")
        while self.get(key) is not None:
            self._changed.clear()
            await self._changed.wait()
        pods, query = f"/api/v1/namespaces/{key.namespace}/pods", {"labelSelector": f"{labels.JOB}={key.name}"}

        async def are_gone() -> bool:
            return not (await self._kube.get(pods, **query))["items"]

        await until("its pods are gone", are_gone, seconds=_LONGEST_SECONDS)

    def get(self, key: JobKey) -> JobView | None:
        return self._reflector.get(key)

    def are_running(self, keys: Sequence[JobKey], *, attempt: int = 1) -> bool:
        """Whether all ranks of all pods of that attempt have joined, as the jobs' own status says."""
        views = [self.get(key) for key in keys]
        return all(
            view is not None and view.state == "Running" and view.attempt >= attempt and view.ready == view.desired
            for view in views
        )

    async def until_running(
        self, keys: Sequence[JobKey], *, attempt: int = 1, seconds: float, check: Callable[[], None]
    ) -> float:
        """How long it took from now; `check` raises when it is in vain."""
        begin = time.monotonic()
        async with asyncio.timeout(seconds):
            while not self.are_running(keys, attempt=attempt):
                self._changed.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), _LOOK_SECONDS)
                check()
        return time.monotonic() - begin

    async def fail_pod(self, job: JobKey, index: int = 0) -> None:
        """Its container ends with status 1, as the kubelet says it."""
        view = self.get(job)
        assert view is not None
        name = labels.pod_name(job.name, view.attempt, index)
        terminated = {"exitCode": 1, "reason": "Error", "finishedAt": time_text(time.time()).partition(".")[0] + "Z"}
        container = {"name": labels.CONTAINER, "image": "i", "imageID": "", "ready": False, "restartCount": 0}
        status = {"phase": "Failed", "containerStatuses": [{**container, "state": {"terminated": terminated}}]}
        await self._kube.patch(f"/api/v1/namespaces/{job.namespace}/pods/{name}/status", {"status": status})

    def _on_change(self, old: JobView | None, new: JobView | None) -> None:
        self._changed.set()


def _viewed(document: Mapping[str, Any]) -> tuple[JobKey, JobView]:
    metadata, status = document["metadata"], document.get("status") or {}
    key = JobKey(namespace=metadata["namespace"], name=metadata["name"])
    nodes = status.get("nodes") or {}
    return key, JobView(
        key=key,
        state=status.get("state") or "",
        attempt=int(status.get("attempt") or 0),
        desired=int(nodes.get("desired") or 0),
        ready=int(nodes.get("ready") or 0),
    )
