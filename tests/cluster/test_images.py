"""Images and torch without a registry."""

from __future__ import annotations

from typing import Any

import pytest

from testcluster.cluster import Cluster
from testcluster.images import BASE, PAUSE, Build, ProjectImages
from testcluster.jobnamespace import job_namespace, torch_pod_parts
from testcluster.waiting import wait_until

# Each rank tells the sum over all ranks' numbers; rank 0, which all have their connections to, goes last.
TORCH = """
import os, torch, torch.distributed as d
rank = int(os.environ["RANK"])
store = d.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, rank == 0)
d.init_process_group("gloo", store=store, rank=rank, world_size=2)
x = torch.ones(1) * (rank + 1)
d.all_reduce(x)
print("sum", int(x), flush=True)
store.set(f"rank {rank} is over", "")
if rank == 0:
    store.wait(["rank 1 is over"])
d.destroy_process_group()
"""


@pytest.fixture(scope="session")
def python_image(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The base image and one layer, on every node."""
    folder = tmp_path_factory.mktemp("image")
    text = f"FROM {BASE}\nRUN python3 -m venv --without-pip /opt/venv && id > /built\nUSER 1000:1000\n"
    (folder / "Dockerfile").write_text(text)
    build = Build(context=folder, name="localhost/test-python", sources=text)
    cluster.load(build.archive())
    return build.reference


def gang_pod(name: str, namespace: str, image: str, node: str, other: dict[str, Any]) -> dict[str, Any]:
    """One node of a gang of two, as the restricted standard wants it."""
    torch = torch_pod_parts()
    container = {
        "name": "node", "image": image, "command": ["python3", "-c", TORCH], "volumeMounts": torch["volumeMounts"],
        "env": [*torch["env"], *({"name": key, "value": value} for key, value in other.items())],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }  # fmt: skip
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": "gang"}},
        "spec": {"containers": [container], "volumes": torch["volumes"], "restartPolicy": "Never", "nodeName": node,
                 "hostname": name, "subdomain": "gang",
                 "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}},
    }  # fmt: skip


def test_torch_runs_across_nodes_in_restricted_pods(cluster: Cluster, python_image: str) -> None:
    with job_namespace(cluster, "torch-across") as namespace:
        cluster.apply({
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": "gang", "namespace": namespace},
            "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": "gang"}},
        })  # fmt: skip
        for rank in (0, 1):
            environment = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": "29400",
                           "MASTER_ADDR": f"rank-0.gang.{namespace}.svc.cluster.local"}  # fmt: skip
            cluster.apply(gang_pod(f"rank-{rank}", namespace, python_image, f"node-{rank + 1}", environment))

        def is_over() -> bool:
            pods = cluster.get("pods", "-n", namespace)["items"]
            return all(pod["status"].get("phase") in {"Succeeded", "Failed"} for pod in pods)

        wait_until("both ranks have ended", is_over, seconds=180)
        for rank in (0, 1):
            assert "sum 3" in cluster.kubectl("logs", "-n", namespace, f"rank-{rank}").splitlines()


def test_pods_reach_the_storage_of_the_tests(cluster: Cluster, cluster_azurite: Any) -> None:
    ask = f"printf 'GET / HTTP/1.0\\r\\n\\r\\n' | /bin/busybox nc -w 5 {cluster_azurite.host} {cluster_azurite.port}"
    asker = {"name": "main", "image": PAUSE, "command": ["/bin/busybox", "sh", "-c", ask]}
    with job_namespace(cluster, "storage-reached") as namespace:
        restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsUser": 1000}
        pod_security = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        cluster.apply({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "asker", "namespace": namespace},
            "spec": {"restartPolicy": "Never", "securityContext": pod_security,
                     "containers": [{**asker, "securityContext": restricted}]},
        })  # fmt: skip
        wait_until(
            "the storage has answered the pod",
            lambda: "HTTP/1.1" in cluster.kubectl("logs", "asker", "-n", namespace),
            seconds=60,
        )


@pytest.mark.parametrize(
    ("image", "command"),
    [
        pytest.param("operator", ["stepfast-operator", "--help"], id="operator"),
        pytest.param("sidecar", ["stepfast-agent", "--help"], id="sidecar"),
        pytest.param("trainer", ["python3", "-c", "import stepfast, torch; print('usage: any')"], id="trainer"),
    ],
)
def test_the_projects_own_images_run(cluster: Cluster, images: ProjectImages, image: str, command: list[str]) -> None:
    with job_namespace(cluster, f"image-of-{image}") as namespace:
        torch = torch_pod_parts()
        restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        container = {"name": "main", "image": getattr(images, image), "command": command, "imagePullPolicy": "Never",
                     "securityContext": restricted}  # fmt: skip
        if image == "trainer":
            container |= {"volumeMounts": torch["volumeMounts"], "env": torch["env"]}
        security = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
        cluster.apply({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "image", "namespace": namespace},
            "spec": {"restartPolicy": "Never", "securityContext": security, "volumes": torch["volumes"],
                     "containers": [container]},
        })  # fmt: skip
        wait_until(
            "it has told how it is used",
            lambda: "usage:" in cluster.kubectl("logs", "image", "-n", namespace).lower(),
            seconds=120,
        )
