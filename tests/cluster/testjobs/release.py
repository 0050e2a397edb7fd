"""Stepfast, installed with helm into a cluster as its administrator does it."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testcluster.cluster import Cluster
from testcluster.images import ProjectImages
from testcluster.kubenode import Node
from testcluster.metadataservice import MetadataService
from testcluster.waiting import CommandFailed, wait_until

NAMESPACE = "stepfast-system"
CHART = Path(__file__).parents[3] / "charts" / "stepfast"
_SECRET = "storage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """An installed chart, with its storage in Azurite."""

    cluster: Cluster
    storage_uri: str
    options: tuple[str, ...]

    def install(self) -> None:
        """Returns when operator and agents are ready and every agent has said so."""
        self.cluster.helm("install", "stepfast", str(CHART), "--namespace", NAMESPACE, *self.options)
        self.wait_until_ready()
        self.wait_for_agents(len(self.cluster.nodes))

    def upgrade(self, *options: str) -> None:
        self.cluster.helm(
            "upgrade", "stepfast", str(CHART), "--namespace", NAMESPACE, *self.options, *options, "--wait"
        )

    def uninstall(self) -> None:
        self.cluster.helm("uninstall", "stepfast", "--namespace", NAMESPACE, "--wait")

    def operator_pod(self) -> dict[str, Any]:
        """The operator's only pod that is not on its way out."""
        return self.pods("operator")[0]

    def operator_node(self) -> str:
        return str(self.operator_pod()["spec"]["nodeName"])

    def was_moved(self, pod: dict[str, Any]) -> bool:
        """Whether Kubernetes had that pod end because its node had not answered for longer than the pod tolerates."""
        chosen = f"involvedObject.name={pod['metadata']['name']},reason=TaintManagerEviction"
        events = self.cluster.get("events", "-n", NAMESPACE, "--field-selector", chosen)["items"]
        return any(event["message"].startswith("Marking for deletion") for event in events)

    def agent_pod(self, node: str) -> dict[str, Any]:
        return next(pod for pod in self.pods("sidecar") if pod["spec"].get("nodeName") == node)

    def kill_container(self, pod: dict[str, Any]) -> None:
        """SIGKILL to its first process, from the node: the kubelet starts it again in the same pod."""
        node, container = self._container_of(pod)
        node.containerd("tasks", "kill", "--signal", "SIGKILL", container)

    def is_running(self, pod: dict[str, Any]) -> bool:
        """Whether its container is still the one that it was, as the node has it: asks no API server."""
        node, container = self._container_of(pod)
        lines = map(str.split, node.containerd("tasks", "list").splitlines())
        return any(line[0] == container and line[-1] == "RUNNING" for line in lines if line)

    def _container_of(self, pod: dict[str, Any]) -> tuple[Node, str]:
        node = self.cluster.nodes[pod["spec"]["nodeName"]]
        return node, pod["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")

    def last_words(self, lines: int = 20) -> str:
        """The ends of the logs of operator and agents, as far as they can be had, for whoever looks into a failure."""
        found = []
        with suppress(CommandFailed, subprocess.TimeoutExpired):  # the cluster may be what is wrong
            for pod in self.pods("operator", "sidecar"):
                name, node = pod["metadata"]["name"], pod["spec"].get("nodeName")
                with suppress(CommandFailed):  # the node may be lost
                    log = self.cluster.kubectl("logs", "-n", NAMESPACE, name, f"--tail={lines}")
                    found.append(f"{name} on {node}:\n{log}")
        return "\n".join(found)

    def wait_until_ready(self) -> None:
        for what in ("deployment/stepfast-operator", "daemonset/stepfast-sidecar"):
            self.cluster.kubectl("rollout", "status", what, "-n", NAMESPACE, "--timeout=180s", timeout_seconds=200)

    def wait_for_agents(self, nodes: int) -> None:
        """Until every node's agent says in its CheckpointNode that it serves."""

        def have_all() -> bool:
            found = self.cluster.get("checkpointnodes")["items"]
            return sum("status" in node for node in found) >= nodes

        wait_until("every agent has its CheckpointNode", have_all, seconds=60)

    def pods(self, *components: str) -> list[dict[str, Any]]:
        """Of these components, without those on their way out; of none named: all that there are."""
        chosen = "app.kubernetes.io/name=stepfast"
        if components:
            chosen += f",app.kubernetes.io/component in ({', '.join(components)})"
        items = self.cluster.get("pods", "-n", NAMESPACE, "-l", chosen)["items"]
        return [pod for pod in items if not components or "deletionTimestamp" not in pod["metadata"]]


def install(cluster: Cluster, images: ProjectImages, azurite: Any, metadata_service: MetadataService) -> Release:
    """Installs the chart and waits until operator and agents are ready."""
    container = azurite.new_container()
    cluster.kubectl("create", "namespace", NAMESPACE)
    cluster.kubectl(
        "create", "secret", "generic", _SECRET, "-n", NAMESPACE,
        f"--from-literal=AZURE_STORAGE_CONNECTION_STRING={azurite.connection_string()}",
    )  # fmt: skip
    values = {
        "storage.uri": f"az://{container}/jobs",
        "storage.secretName": _SECRET,
        "image.pullPolicy": "Never",
        "networkPolicy.storagePorts": f"{{{azurite.port}}}",
        "sidecar.memory.limit": "1Gi",
        "podGroups.kueue": "true",
        "sidecar.mirrors.enabled": "true",
        "sidecar.evictionNotices.endpoint": metadata_service.url,
    }
    for component, reference in (("operator", images.operator), ("sidecar", images.sidecar)):
        repository, _, tag = reference.rpartition(":")
        values |= {f"{component}.image.repository": repository, f"{component}.image.tag": tag}
    options = tuple(part for name, value in values.items() for part in ("--set", f"{name}={value}"))
    release = Release(cluster=cluster, storage_uri=values["storage.uri"], options=options)
    release.install()
    return release
