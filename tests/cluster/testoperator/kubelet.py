"""The scheduler and the kubelets, played: an API server alone stores pods, and nothing acts on them.

Pods are bound to nodes and run; those that are deleted end with SIGTERM's exit code and vanish; how a pod ends else a
test says.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

from stepfast.kube import AlreadyExists, Conflict, Expired, Kube, KubeUnavailable, NotFound
from stepfast_operator import labels
from stepfast_operator.document import time_text
from testoperator.polling import until

_IDLE_SECONDS = 60.0
READY = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "kubelet is posting ready status"}
SILENT = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": "Kubelet stopped posting"}


class Kubelets:
    """The nodes of one namespace's pods: pod i of a gang runs on node i. `stuck` names nodes that do nothing,
    `slow_to_start` pods that stay pending.
    """

    def __init__(self, kube: Kube, namespace: str) -> None:
        self._kube, self._namespace = kube, namespace
        self.stuck: set[str] = set()
        self.slow_to_start: set[str] = set()
        self.without_place = set[str]()  # pods that the scheduler finds no node for
        self.pods: dict[str, Any] = {}  # as the watch told of them last, by name
        self.ever_made: dict[str, set[str]] = defaultdict(set)  # uids, by name: more than one was made more than once
        self._nodes: set[str] = set()

    def node(self, index: int) -> str:
        """The name of that node; nodes are the cluster's, and a test has its own."""
        return f"{self._namespace}-{index}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Kubelets]:
        task = asyncio.create_task(self._run(), name="kubelets")
        try:
            yield self
        finally:
            task.cancel()
            [ended] = await asyncio.gather(task, return_exceptions=True)
            if not isinstance(ended, asyncio.CancelledError):
                raise RuntimeError("the kubelets ended") from ended
            for name in self._nodes:
                await self._kube.delete(f"/api/v1/nodes/{name}")

    async def say(self, index: int, condition: Mapping[str, str]) -> None:
        """What the node's Ready condition says from now on."""
        now = time_text(time.time()).partition(".")[0] + "Z"
        full = {**condition, "lastTransitionTime": now, "lastHeartbeatTime": now}
        await self._kube.patch(f"/api/v1/nodes/{self.node(index)}/status", {"status": {"conditions": [full]}})

    async def started(self, pod: str) -> None:
        """Returns when it runs."""
        await until(f"{pod} runs", lambda: self._phase(pod) == "Running")

    async def end(self, pod: str, exit_code: int, *, reason: str = "", message: str = "", phase: str = "") -> None:
        """The trainer's container ends so, once it runs."""
        await self.started(pod)
        reason = reason or ("Completed" if exit_code == 0 else "Error")
        terminated = {"exitCode": exit_code, "reason": reason, "message": message, "finishedAt": "2026-01-01T00:00:00Z"}
        await self._set(pod, phase or ("Failed" if exit_code else "Succeeded"), {"terminated": terminated})

    async def remove(self, pod: str) -> None:
        """As a kubelet that has ended the pod."""
        await self._kube.delete(f"{self._pods}/{pod}", grace_seconds=0)

    def _phase(self, pod: str) -> str:
        return str((self.pods.get(pod) or {}).get("status", {}).get("phase", ""))

    @property
    def _pods(self) -> str:
        return f"/api/v1/namespaces/{self._namespace}/pods"

    async def _run(self) -> None:
        while True:
            try:
                listed = await self._kube.get(self._pods)
                self.pods = {pod["metadata"]["name"]: pod for pod in listed.get("items") or ()}
                for pod in list(self.pods.values()):
                    await self._act(pod)
                await self._follow(str(listed["metadata"]["resourceVersion"]))
            except (KubeUnavailable, Expired):
                await asyncio.sleep(0.1)

    async def _follow(self, version: str) -> None:
        watch = self._kube.watch(self._pods, idle_seconds=_IDLE_SECONDS, resourceVersion=version)
        async with aclosing(watch) as events:
            async for event in events:
                name = event.object["metadata"].get("name", "")
                if event.kind == "DELETED":
                    self.pods.pop(name, None)
                elif event.kind != "BOOKMARK":
                    self.pods[name] = event.object
                    await self._act(event.object)

    async def _act(self, pod: Any) -> None:
        """What scheduler and kubelet do about a pod as it stands."""
        metadata, node = pod["metadata"], pod["spec"].get("nodeName")
        self.ever_made[metadata["name"]].add(metadata["uid"])
        try:
            if metadata.get("deletionTimestamp"):
                if node is not None and node not in self.stuck:  # without a node the API server itself removes it
                    await self._terminate(metadata["name"], pod["status"].get("phase"))
            elif node is None and metadata["name"] not in self.without_place:
                await self._bind(metadata["name"], int((metadata.get("labels") or {}).get(labels.NODE_INDEX, 0)))
            elif (
                node is not None
                and pod["status"].get("phase") == "Pending"
                and metadata["name"] not in self.slow_to_start
            ):
                await self._set(metadata["name"], "Running", {"running": {"startedAt": "2026-01-01T00:00:00Z"}})
        except (NotFound, Conflict):
            return  # it has changed since; the watch tells how

    async def _terminate(self, pod: str, phase: str | None) -> None:
        """A kubelet first says how the containers ended, then that the pod is gone."""
        if phase in ("Running", "Pending"):
            await self._set(pod, "Failed", {"terminated": {"exitCode": 143, "reason": "Error"}})
        await self.remove(pod)

    async def _bind(self, pod: str, index: int) -> None:
        name = self.node(index)
        if name not in self._nodes:
            await self.make_node(index)
        target = {"apiVersion": "v1", "kind": "Node", "name": name}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
        await self._kube.create(f"{self._pods}/{pod}/binding", binding)

    async def make_node(self, index: int) -> None:
        """A node that is Ready. The API server taints every new one, and no controller is here to take that away."""
        name = self.node(index)
        self._nodes.add(name)
        try:
            await self._kube.create("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
        except AlreadyExists:
            return
        await self._kube.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": []}})
        await self.say(index, READY)

    async def _set(self, pod: str, phase: str, state: Mapping[str, Any]) -> None:
        status = {
            "name": labels.CONTAINER, "image": "i", "imageID": "", "ready": "running" in state, "restartCount": 0,
            "state": state,
        }  # fmt: skip
        body = {"status": {"phase": phase, "containerStatuses": [json.loads(json.dumps(status))]}}
        await self._kube.patch(f"{self._pods}/{pod}/status", body)
