"""The cluster itself: what other tests rely on holds."""

from __future__ import annotations

import glob
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from testcluster.binaries import Binaries
from testcluster.claim import Claim
from testcluster.cluster import Cluster
from testcluster.controlplane import KubernetesClient
from testcluster.fixtures import started_here
from testcluster.images import PAUSE
from testcluster.kubenode import Node
from testcluster.waiting import CommandFailed, wait_until
from testjobs.gangs import made_pods, overlapping_gangs

FOLDER = Path(__file__).parent


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    name = f"harness-{os.urandom(4).hex()}"
    cluster.kubectl("create", "namespace", name)
    account = ("get", "serviceaccount", "default", "-n", name)
    wait_until(
        "the namespace has its service account, without which it takes no pod", lambda: cluster.kubectl(*account)
    )
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


def pod(name: str, namespace: str, **spec: object) -> dict[str, Any]:
    container = {"name": "main", "image": PAUSE}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": "gang"}},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0, **spec},
    }


def wait_for(cluster: Cluster, namespace: str, name: str, path: str, value: str) -> None:
    """Until `path` of the pod's status is `value`."""

    def is_so() -> bool:
        return cluster.kubectl("get", "pod", name, "-n", namespace, "-o", f"jsonpath={{.status.{path}}}") == value

    wait_until(f"pod {name}: {path} is {value}", is_so, seconds=60)


def test_pods_on_two_nodes_reach_each_other_by_the_names_of_a_headless_service(
    cluster: Cluster, namespace: str
) -> None:
    service = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "gang", "namespace": namespace},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": "gang"}},
    }  # fmt: skip
    cluster.apply(service, *(
        pod(name, namespace, hostname=name, subdomain="gang", nodeName=node)
        for name, node in (("zero", "node-1"), ("one", "node-2"))
    ))  # fmt: skip
    for name in ("zero", "one"):
        wait_for(cluster, namespace, name, "phase", "Running")

    def has_answered(name: str, other: str) -> bool:
        host = f"{other}.gang.{namespace}.svc.cluster.local"
        return "1 packets received" in cluster.kubectl(
            "exec", "-n", namespace, name, "--", "/bin/busybox", "ping", "-c", "1", "-W", "2", host
        )

    wait_until("zero reaches one", lambda: has_answered("zero", "one"))
    wait_until("one reaches zero", lambda: has_answered("one", "zero"))
    reached = cluster.kubectl(
        "exec", "-n", namespace, "zero", "--", "/bin/busybox", "ping", "-c", "1", "-W", "2", cluster.address
    )
    assert "1 packets received" in reached, "pods reach the host, where the tests' storage listens"


def test_a_service_address_is_answered_by_the_pod_behind_it(cluster: Cluster, namespace: str) -> None:
    answer = ["/bin/busybox", "nc", "-ll", "-p", "8000", "-e", "/bin/busybox", "echo", "hello"]
    server = {"name": "main", "image": PAUSE, "command": answer}
    service = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "hello", "namespace": namespace},
        "spec": {"selector": {"app": "gang"}, "ports": [{"port": 80, "targetPort": 8000}]},
    }  # fmt: skip
    cluster.apply(service, pod("server", namespace, containers=[server], nodeName="node-1"))
    cluster.apply(pod("asker", namespace, nodeName="node-2"))
    for name in ("server", "asker"):
        wait_for(cluster, namespace, name, "phase", "Running")
    ask = ("exec", "-n", namespace, "asker", "--", "/bin/busybox", "nc", "-w", "2", "hello", "80")
    wait_until("the Service answers", lambda: cluster.kubectl(*ask).strip() == "hello")


def test_two_gangs_at_once_are_found_in_the_audit_log(cluster: Cluster, namespace: str) -> None:
    def make(name: str, attempt: int) -> None:
        document = pod(name, namespace, schedulerName="nobody")
        document["metadata"]["labels"] = {"stepfast.dev/job-uid": namespace, "stepfast.dev/attempt": f"{attempt}"}
        cluster.apply(document)

    make("one", 1)
    make("one-more", 1)
    cluster.kubectl("delete", "pod", "one", "one-more", "-n", namespace)
    make("two", 2)
    assert overlapping_gangs(cluster.audit(), namespace) == []
    make("three", 3)
    assert overlapping_gangs(cluster.audit(), namespace) == ["three was made while two lived"]
    assert made_pods(cluster.audit(), namespace) == ["one", "one-more", "two", "three"]


def test_a_restricted_namespace_refuses_a_pod_with_a_host_path(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    volume = {"name": "host", "hostPath": {"path": "/"}}
    with pytest.raises(CommandFailed, match=r"violates PodSecurity.*hostPath"):
        cluster.apply(pod("prying", namespace, volumes=[volume]))


def test_a_container_over_its_memory_limit_is_killed_and_says_so(cluster: Cluster, namespace: str) -> None:
    fill = "x=0123456789abcdef; while true; do x=$x$x; done"
    container = {"name": "main", "image": PAUSE, "command": ["/bin/busybox", "sh", "-c", fill],
                 "resources": {"limits": {"memory": "32Mi"}}}  # fmt: skip
    cluster.apply(pod("greedy", namespace, containers=[container], restartPolicy="Never"))
    wait_for(cluster, namespace, "greedy", "containerStatuses[0].state.terminated.reason", "OOMKilled")


def test_a_node_may_change_no_other_node_and_pods_tokens_name_their_node(cluster: Cluster, namespace: str) -> None:
    identity = cluster.node_client("node-1")
    assert identity.kubectl("get", "node", "node-1", "-o", "name").strip() == "node/node-1"
    with pytest.raises(CommandFailed, match=r"only its own Node object"):
        identity.kubectl("annotate", "node", "node-2", "taken=over")
    cluster.apply(pod("named", namespace, nodeName="node-2"))
    wait_for(cluster, namespace, "named", "phase", "Running")
    file = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    token = cluster.kubectl("exec", "-n", namespace, "named", "--", "/bin/busybox", "cat", file)
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
    answer = json.loads(cluster.kubectl("create", "-f", "-", "-o", "json", stdin=json.dumps(review)))
    assert answer["status"]["user"]["extra"]["authentication.kubernetes.io/node-name"] == ["node-2"]


def test_the_audit_log_tells_who_made_and_who_deleted_a_pod(cluster: Cluster, namespace: str) -> None:
    cluster.apply(pod("short", namespace, nodeName="node-1"))
    cluster.kubectl("delete", "pod", "short", "-n", namespace)
    story = []
    for event in cluster.audit():
        about = event.get("objectRef", {})
        if about.get("namespace") == namespace and about["resource"] == "pods" and "subresource" not in about:
            story.append((event["verb"], event["user"]["username"]))
    changes = [(verb, user) for verb, user in story if verb in {"create", "delete"}]
    assert changes == [("create", "admin"), ("delete", "admin")]


def test_a_lost_node_becomes_not_ready_and_comes_back_with_its_pods(cluster: Cluster, namespace: str) -> None:
    cluster.apply(pod("there", namespace, nodeName="node-2"))
    wait_for(cluster, namespace, "there", "phase", "Running")
    node = cluster.nodes["node-2"]
    cards = cards_of(cluster, node)
    node.kill()
    try:
        assert not node.is_running
        wait_until("node-2 is NotReady", lambda: not node.is_ready(), seconds=60)
        assert cluster.nodes["node-1"].is_ready()
    finally:
        node.start()
    wait_until("node-2 is Ready", node.is_ready, seconds=60)
    assert cards_of(cluster, node) == cards, "who knows the addresses of before sends into the void for seconds"
    wait_for(cluster, namespace, "there", "containerStatuses[0].restartCount", "1")
    assert "hello" in cluster.kubectl("exec", "-n", namespace, "there", "--", "/bin/busybox", "echo", "hello")


def cards_of(cluster: Cluster, node: Node) -> tuple[str, str]:
    """The addresses of the bridge's network card and of the node's."""
    bridge = Path("/sys/class/net", cluster.claim.bridge_name, "address").read_text().strip()
    return bridge, json.loads(node.run("ip", "-json", "link", "show", "eth0"))[0]["address"]


def test_a_kubelet_that_fails_is_started_again(cluster: Cluster, namespace: str) -> None:
    node = cluster.nodes["node-2"]
    before = node.run("pidof", "kubelet")
    node.run("kill", "-KILL", before.strip())
    wait_until("another kubelet runs", lambda: node.run("pidof", "kubelet") != before)
    cluster.apply(pod("next", namespace, nodeName="node-2"))
    wait_for(cluster, namespace, "next", "phase", "Running")


def test_a_node_without_containerd_is_down_and_says_why(cluster: Cluster) -> None:
    node = cluster.nodes["node-2"]
    node.run("pkill", "-KILL", "-x", "containerd")
    try:
        wait_until("node-2 is down", lambda: not node.is_running)
        assert "ended with status 137" in cluster.claim.log("node-2").read_text()
    finally:
        node.kill()
        node.start()
    wait_until("node-2 is Ready", node.is_ready, seconds=60)


def test_nodes_share_no_memory_and_no_kubelet_folder(cluster: Cluster) -> None:
    one, two = cluster.nodes["node-1"], cluster.nodes["node-2"]
    one.run("touch", "/dev/shm/mine", "/var/lib/kubelet/mine", "/run/mine")
    for path in ("/dev/shm/mine", "/var/lib/kubelet/mine", "/run/mine"):
        assert not Path(path).exists()
        with pytest.raises(CommandFailed, match="No such file"):
            two.run("ls", path)
    assert two.run("hostname").strip() == "node-2"


def test_an_api_server_alone_stores_objects_and_ends_without_a_trace(api_server: KubernetesClient) -> None:
    assert "default" in api_server.kubectl("get", "namespaces", "-o", "name")


@pytest.mark.usefixtures("cluster")  # what cannot run a node, cannot run this
@pytest.mark.parametrize(
    ("environment", "outcome"),
    [pytest.param("", pytest.skip.Exception, id="by hand"), pytest.param("true", pytest.fail.Exception, id="in CI")],
)
def test_what_needs_an_audit_log_says_loudly_that_kubeconfigs_api_server_shows_none(
    environment: str, outcome: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", environment)
    given = KubernetesClient(tmp_path / "kubeconfig", Binaries(folders=()))
    with pytest.raises(outcome, match=r"KUBECONFIG names the API server.*audit log.*run it without KUBECONFIG"):
        started_here(given)


def test_processes_that_are_started_at_once_are_all_remembered() -> None:
    """A cluster's nodes are: one that was forgotten would look dead, and would outlive the cluster."""
    claim = Claim.take()
    names = [f"process-{index}" for index in range(32)]
    try:
        with ThreadPoolExecutor(max_workers=len(names)) as pool:
            list(pool.map(lambda name: claim.spawn(name, ["sleep", "60"]), names))
        assert [name for name in names if not claim.is_alive(name)] == []
    finally:
        claim.release()
    assert claim.remaining() == []


def test_folder_in_memory_goes_with_its_claim() -> None:
    claim = Claim.take()
    try:
        (claim.make_memory_folder() / "data").write_text("of etcd")
        assert f"folder {claim.memory_folder}" in claim.remaining()
    finally:
        claim.release()
    assert claim.remaining() == []


def test_down_leaves_nothing_behind() -> None:
    cluster = Cluster(Claim.take(), Binaries.find())
    before = machine_settings()
    try:
        cluster.up(1)
        kinds = {line.split()[0] for line in left_of(cluster.claim.number)}
        assert kinds == {"link", "namespace", "group", "process"}
        assert cluster.claim.remaining()
    finally:
        cluster.down()
    assert left_of(cluster.claim.number) == []
    assert cluster.claim.remaining() == []
    assert machine_settings() == before


@pytest.mark.usefixtures("cluster")
def test_the_next_session_ends_what_a_killed_one_left() -> None:
    script = (
        "from testcluster.binaries import Binaries\n"
        "from testcluster.claim import Claim; from testcluster.cluster import Cluster\n"
        "cluster = Cluster(Claim.take(), Binaries.find()); cluster.up(1)\n"
        "print(cluster.claim.number, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=FOLDER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as session:
        assert session.stdout is not None
        number = int(session.stdout.readline())
        session.send_signal(signal.SIGKILL)
    left = Claim.open(number)
    assert left.is_alive("node-1")
    claims = []
    try:
        while number not in {claim.number for claim in claims}:  # others may be taking and leaving numbers, too
            claims.append(Claim.take())
    finally:
        for claim in claims:
            claim.release()
    assert left_of(number) == []


def left_of(number: int) -> list[str]:
    """Everything on the machine that bears a cluster's number: looked for here, not by the code under test."""
    names = f"sf{number}-", f"sfbr{number}", f"stepfast-{number}-"
    places = {"link": "/sys/class/net/*", "namespace": "/run/netns/*", "group": "/sys/fs/cgroup/**/stepfast-*"}
    found = [f"{kind} {path}" for kind, pattern in places.items() for path in glob.glob(pattern, recursive=True)
             if Path(path).name.startswith(names) or f"/stepfast-{number}-" in path]  # fmt: skip
    folder = f"/stepfast-clusters-{os.getuid()}/{number}/"
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    found += [f"mount {line}" for line in mounts if folder in line]
    for process in psutil.process_iter(["cmdline"]):
        if any(folder in argument for argument in process.info["cmdline"] or ()):
            found.append(f"process {process.pid} {process.info['cmdline'][0]}")
    return sorted(found)


def machine_settings() -> dict[str, str]:
    """What belongs to the whole machine, and the kubelet or kube-proxy of an ordinary node would change."""
    names = ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops", "kernel/keys/root_maxkeys")
    settings = {name: Path("/proc/sys", name).read_text() for name in (*names, "net/ipv4/ip_forward")}
    rules = subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True, check=True).stdout
    return {**settings, "rules": rules}
