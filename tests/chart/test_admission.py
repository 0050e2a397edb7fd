"""Who may write which half of whose CheckpointNode: the admission policies on a real API server, with the tokens that
pods get. RBAC is opened wide here, so that what refuses is the policy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from testchart import chart
from testcluster.controlplane import KubernetesClient
from testcluster.waiting import CommandFailed, wait_until

Client = Callable[..., KubernetesClient]
REQUEST = {"namespace": "team-a", "name": "gpt", "run": "u-1", "action": "Flush"}
GANG = {"namespace": "team-a", "name": "gpt", "run": "u-1", "node": 0, "neighbours": ["10.0.0.1:9601"]}
NODES = ("own", "other")


@pytest.fixture(scope="module")
def server(api_server: KubernetesClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesClient]:
    """With the release, two nodes, and every verb on CheckpointNodes for both of the release's accounts."""
    api_server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": chart.NAMESPACE}})
    api_server.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(chart.CHART / "crds"))
    api_server.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd/checkpointnodes.stepfast.dev")
    values = chart.write_values(tmp_path_factory.mktemp("values"), chart.with_storage({}))
    api_server.helm("install", "stepfast", str(chart.CHART), "-n", chart.NAMESPACE, "-f", str(values))
    group = "rbac.authorization.k8s.io"
    rules = [
        {"apiGroups": ["stepfast.dev"], "resources": ["checkpointnodes", "checkpointnodes/status"], "verbs": ["*"]}
    ]
    accounts = [
        {"kind": "ServiceAccount", "name": name, "namespace": chart.NAMESPACE}
        for name in (chart.OPERATOR, chart.SIDECAR)
    ]
    api_server.apply(
        {"apiVersion": f"{group}/v1", "kind": "ClusterRole", "metadata": {"name": "wide-open"}, "rules": rules},
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "wide-open"},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "wide-open"},
            "subjects": accounts,
        },
        *({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}} for name in NODES),
        *(_pod_on(node) for node in NODES),
    )
    yield api_server
    api_server.helm("uninstall", "stepfast", "-n", chart.NAMESPACE)
    api_server.kubectl("delete", "clusterrole,clusterrolebinding", "wide-open")
    api_server.kubectl("delete", "pod", *(f"agent-{node}" for node in NODES), "-n", chart.NAMESPACE, "--force")
    api_server.kubectl("delete", "node", *NODES)


@pytest.fixture(autouse=True)
def reports(server: KubernetesClient) -> Iterator[None]:
    """A CheckpointNode of the other node."""
    server.apply(_report("other"))
    yield
    server.kubectl("delete", "checkpointnode", "--all")


@pytest.fixture
def client_of(server: KubernetesClient, tmp_path: Path) -> Client:
    """A client with a token as the kubelet hands it to a pod of that account on that node; no node: one of no pod."""

    def make(account: str, node: str | None) -> KubernetesClient:
        bound = [] if node is None else ["--bound-object-kind=Pod", f"--bound-object-name=agent-{node}"]
        token = server.kubectl("create", "token", account, "-n", chart.NAMESPACE, *bound).strip()
        settings = yaml.safe_load(server.kubectl("config", "view", "--raw", "--flatten"))
        settings["users"] = [{"name": user["name"], "user": {"token": token}} for user in settings["users"]]
        kubeconfig = tmp_path / f"{account}-{node}"
        kubeconfig.write_text(json.dumps(settings))
        return KubernetesClient(kubeconfig, server.binaries)

    # Policies are taken up by a watch of the API server: the first answers may come before that. Asked without writing,
    # because what an API server takes before that would be there when a test makes it.
    for account in (chart.SIDECAR, chart.OPERATOR):
        unnamed = make(account, None)
        wait_until(
            f"the policy of {account} is in force",
            lambda client=unnamed: _refuses(lambda: _create(client, "own", options=["--dry-run=server"])),
        )
    return make


def test_an_agent_makes_and_reports_for_its_own_node(client_of: Client, server: KubernetesClient) -> None:
    agent = client_of(chart.SIDECAR, "own")
    _create(agent, "own")
    _patch(agent, "own", {"status": {"memory": {"limitBytes": 2, "usedBytes": 1}}}, "--subresource=status")
    assert server.get("checkpointnode", "own")["status"]["memory"]["usedBytes"] == 1


REFUSED: dict[str, tuple[Callable[[KubernetesClient], object], str]] = {
    "makes another node's": (
        lambda agent: _create(agent, "third"),
        "the agent of node own writes the CheckpointNode of its own node alone, not third",
    ),
    "reports for another node": (
        lambda agent: _patch(
            agent, "other", {"status": {"memory": {"usedBytes": 1, "limitBytes": 1}}}, "--subresource=status"
        ),
        "the agent of node own writes the CheckpointNode of its own node alone, not other",
    ),
    "makes its own with requests": (
        lambda agent: _create(agent, "own", requests=[REQUEST]),
        "the spec of a CheckpointNode is the operator's: an agent creates it without requests",
    ),
    "makes its own with gangs": (
        lambda agent: _create(agent, "own", gangs=[GANG]),
        "an agent creates it without requests and gangs",
    ),
    "names a gang for itself": (
        lambda agent: _patch(agent, "other", {"spec": {"gangs": [GANG]}}),
        "the CheckpointNode of its own node alone",
    ),
    "removes another node's": (
        lambda agent: agent.kubectl("delete", "checkpointnode", "other"),
        "the CheckpointNode of its own node alone",
    ),
    "asks another node": (
        lambda agent: _patch(agent, "other", {"spec": {"requests": [REQUEST]}}),
        "the CheckpointNode of its own node alone",
    ),
}


@pytest.mark.parametrize(("act", "words"), REFUSED.values(), ids=REFUSED)
def test_an_agent_is_refused(act: Callable[[KubernetesClient], object], words: str, client_of: Client) -> None:
    with pytest.raises(CommandFailed) as refused:
        act(client_of(chart.SIDECAR, "own"))
    assert words in str(refused.value)


def test_an_agent_neither_asks_itself_nor_removes_its_report(client_of: Client) -> None:
    agent = client_of(chart.SIDECAR, "own")
    _create(agent, "own")
    with pytest.raises(CommandFailed, match="a CheckpointNode goes with its Node: an agent removes none"):
        agent.kubectl("delete", "checkpointnode", "own")
    with pytest.raises(
        CommandFailed, match="the spec of a CheckpointNode is the operator's: an agent writes the status"
    ):
        _patch(agent, "own", {"spec": {"requests": [REQUEST]}})


def test_a_token_that_names_no_node_writes_nothing(client_of: Client) -> None:
    with pytest.raises(CommandFailed, match="this token names none"):
        _create(client_of(chart.SIDECAR, None), "own")


def test_the_operator_asks_and_does_not_report(client_of: Client, server: KubernetesClient) -> None:
    operator = client_of(chart.OPERATOR, None)
    _patch(operator, "other", {"spec": {"requests": [REQUEST]}})
    assert server.get("checkpointnode", "other")["spec"]["requests"] == [REQUEST]
    with pytest.raises(CommandFailed, match="the status of a CheckpointNode is its agent's"):
        _patch(operator, "other", {"status": {"memory": {"usedBytes": 1, "limitBytes": 1}}}, "--subresource=status")
    with pytest.raises(CommandFailed, match="CheckpointNodes are made by agents"):
        _create(operator, "third")
    with pytest.raises(CommandFailed, match="go with their Nodes"):
        operator.kubectl("delete", "checkpointnode", "other")


def _pod_on(node: str) -> dict[str, Any]:
    """An agent's pod, as far as tokens go: its account and its node."""
    spec = {"serviceAccountName": chart.SIDECAR, "nodeName": node, "containers": [{"name": "agent", "image": "agent"}]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"agent-{node}", "namespace": chart.NAMESPACE},
        "spec": spec,
    }


def _report(node: str, **spec: Any) -> dict[str, Any]:
    report: dict[str, Any] = {
        "apiVersion": "stepfast.dev/v1alpha1",
        "kind": "CheckpointNode",
        "metadata": {"name": node},
    }
    if spec:
        report["spec"] = spec
    return report


def _create(client: KubernetesClient, node: str, *, options: Sequence[str] = (), **spec: Any) -> None:
    client.kubectl("create", *options, "-f", "-", stdin=json.dumps(_report(node, **spec)))


def _patch(client: KubernetesClient, node: str, change: dict[str, Any], *options: str) -> None:
    client.kubectl("patch", "checkpointnode", node, "--type=merge", "-p", json.dumps(change), *options)


def _refuses(act: Callable[[], object]) -> bool:
    try:
        act()
    except CommandFailed as refused:
        return "ValidatingAdmissionPolicy" in str(refused)
    return False
