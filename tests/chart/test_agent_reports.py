"""A real agent and a real API server: its CheckpointNode, with the rights and under the policies of the chart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from testchart import chart
from testcluster.controlplane import KubernetesClient
from testcluster.waiting import CommandFailed, wait_until

NODE = "n"  # as the agents of `node.Node` are called


@pytest.fixture(scope="module")
def server(api_server: KubernetesClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesClient]:
    """With the release, but for the CRDs; a node, and a pod of its agent, whose token the agent gets."""
    api_server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": chart.NAMESPACE}})
    api_server.kubectl("delete", "--ignore-not-found", "-f", str(chart.CHART / "crds"))
    values = chart.write_values(tmp_path_factory.mktemp("values"), chart.with_storage({}))
    api_server.helm("install", "stepfast", str(chart.CHART), "-n", chart.NAMESPACE, "-f", str(values), "--skip-crds")
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "agent", "namespace": chart.NAMESPACE},
        "spec": {
            "nodeName": NODE,
            "serviceAccountName": chart.SIDECAR,
            "containers": [{"name": "agent", "image": "none"}],
        },
    }
    api_server.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}, pod)
    yield api_server
    api_server.kubectl("delete", "pod", "agent", "-n", chart.NAMESPACE, "--force")
    api_server.kubectl("delete", "node", NODE)
    api_server.helm("uninstall", "stepfast", "-n", chart.NAMESPACE)


@pytest.fixture
def kubeconfig(server: KubernetesClient, tmp_path: Path) -> Path:
    """What the agent's pod would find mounted."""
    token = server.kubectl(
        "create", "token", chart.SIDECAR, "-n", chart.NAMESPACE, "--bound-object-kind=Pod", "--bound-object-name=agent"
    )
    settings = yaml.safe_load(server.kubectl("config", "view", "--raw", "--flatten"))
    settings["users"] = [{"name": user["name"], "user": {"token": token.strip()}} for user in settings["users"]]
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(settings))
    return path


def test_agent_reports_to_a_cluster_whose_crds_come_later_and_does_what_the_operator_asks(
    server: KubernetesClient,
    kubeconfig: Path,
    start_node: Callable[..., Any],
    train: Callable[..., Any],
    tmp_path: Path,
) -> None:
    def job() -> dict[str, Any]:
        jobs = server.get("checkpointnode", NODE).get("status", {}).get("jobs", [])
        return dict(jobs[0]) if jobs else {}

    def observed() -> int:
        return int(server.get("checkpointnode", NODE).get("status", {}).get("observedGeneration", 0))

    node = start_node(
        (tmp_path / "storage").as_uri(), environment={"KUBECONFIG": str(kubeconfig)}, options=["--checkpoint-node"]
    )
    training = train(node)
    training.save().wait(timeout_seconds=90)
    wait_until("it says that there are no CRDs", lambda: "are the CRDs of Stepfast installed" in node.log)

    server.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(chart.CHART / "crds"))
    wait_until("all is told", lambda: job().get("latestPersistedStep") == 1, seconds=90)
    found = server.get("checkpointnode", NODE)
    uid = server.get("node", NODE)["metadata"]["uid"]
    assert [(owner["kind"], owner["uid"]) for owner in found["metadata"]["ownerReferences"]] == [("Node", uid)]
    assert found["status"]["conditions"][0]["status"] == "True"
    (rank,) = job()["ranks"]
    assert (rank["rank"], rank["alive"]) == (0, True)
    assert rank["joinedTime"].endswith("Z")

    def ask(*actions: str) -> None:
        request = {"namespace": "local", "name": "bad-storage", "run": node.run}
        spec = {"requests": [{**request, "action": action} for action in actions]}
        server.kubectl("patch", "checkpointnode", NODE, "--type=merge", "-p", json.dumps({"spec": spec}))

    ask("Flush")
    wait_until("it is acknowledged", lambda: observed() == 2)
    with pytest.raises(CommandFailed, match="cannot patch"):
        KubernetesClient(kubeconfig, server.binaries).kubectl(
            "patch", "checkpointnode", NODE, "--type=merge", "-p", '{"spec": {"requests": []}}'
        )
    server.kubectl("delete", "checkpointnode", NODE)
    wait_until("it is made again", lambda: job().get("latestPersistedStep") == 1)
    training.save().wait(timeout_seconds=90)
    wait_until("the next commit is told", lambda: job()["latestPersistedStep"] == 2)
    ask("Flush", "Save")
    wait_until("the rank is asked to save", lambda: training.checkpointer._link.save_requested)
    assert node.log.count("again and again") <= 2, node.log
    node.terminate()
    assert server.get("checkpointnode", NODE)["status"]["conditions"][0]["status"] == "False"
