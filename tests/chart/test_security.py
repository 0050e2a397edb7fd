"""What the rendered objects allow, whatever the values: from the pods' own fields, and from the roles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from testchart import chart

WRITES = {"create", "update", "patch", "delete", "deletecollection"}


def test_containers_can_do_nothing_but_their_work(objects: list[dict[str, Any]]) -> None:
    templates = chart.pod_templates(objects)
    assert set(templates) == {"operator", "sidecar"}
    for component, template in templates.items():
        spec = template["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace", "hostUsers"} & spec.keys()
        assert "initContainers" not in spec
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["privileged"] is False
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
            assert context["runAsUser"] == {"operator": 65532, "sidecar": 0}[component]
            assert context["runAsNonRoot"] is (component == "operator")
            assert not any("hostPort" in port for port in container["ports"])
            assert container["resources"]["requests"]


def test_the_agent_sees_four_folders_of_the_node_and_the_operator_none(objects: list[dict[str, Any]]) -> None:
    operator, agent = (_host_paths(chart.pod_templates(objects)[name]) for name in ("operator", "sidecar"))
    assert operator == {}
    kubelet = agent["registry"].removesuffix("/plugins_registry")
    assert kubelet in {"/var/lib/kubelet", "/mnt/kubelet"}
    assert agent == {
        "memory": "/dev/shm/stepfast" if kubelet == "/var/lib/kubelet" else "/dev/shm/tier",
        "pods": f"{kubelet}/pods",
        "driver": f"{kubelet}/plugins/csi.stepfast.dev",
        "registry": f"{kubelet}/plugins_registry",
    }


def test_no_role_reaches_secrets_or_makes_its_own_power_larger(objects: list[dict[str, Any]]) -> None:
    for role, rule in _rules(objects):
        assert "*" not in rule["resources"] + rule["verbs"] + rule["apiGroups"], role
        forbidden = {"secrets", "configmaps", "serviceaccounts", "serviceaccounts/token", "pods/exec", "nodes/proxy"}
        assert not forbidden & set(rule["resources"]), role
        assert not {"impersonate", "escalate", "bind"} & set(rule["verbs"]), role
        assert "nodes" not in rule["resources"] or not WRITES & set(rule["verbs"]), role
        assert rule["apiGroups"] != ["rbac.authorization.k8s.io"], role


def test_the_agent_writes_checkpoint_nodes_and_nothing_else(objects: list[dict[str, Any]]) -> None:
    written = {
        (resource, verb)
        for role, rule in _rules(objects)
        if role.endswith("-sidecar")
        for resource in rule["resources"]
        for verb in WRITES & set(rule["verbs"])
    }
    assert written == {("checkpointnodes", "create"), ("checkpointnodes/status", "patch")}


def test_rights_for_pod_groups_are_there_only_when_they_are_asked_for(
    render: Callable[..., list[dict[str, Any]]],
) -> None:
    def rights(**values: bool) -> set[tuple[str, str, str]]:
        return {
            (group, resource, verb)
            for role, rule in _rules(render({"podGroups": values}))
            if role == chart.OPERATOR
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }

    least = rights()
    pod_groups = {"get", "create", "delete"}
    assert rights(kueue=True) - least == {
        ("kueue.x-k8s.io", "workloads", "get"), ("", "pods", "patch"), ("", "pods/status", "patch")
    }  # fmt: skip
    assert rights(volcano=True) - least == {("scheduling.volcano.sh", "podgroups", verb) for verb in pod_groups}
    assert rights(coscheduling=True) - least == {
        ("scheduling.x-k8s.io", "podgroups", verb) for verb in pod_groups - {"get"}
    }


def test_a_namespaced_operator_touches_jobs_in_its_namespaces_alone(
    render: Callable[..., list[dict[str, Any]]],
) -> None:
    objects = render({"watchNamespaces": ["team-a", "team-b"]})
    clusterwide = {
        resource
        for role, rule in _rules(chart.of_kind(objects, "ClusterRole"))
        if role == chart.OPERATOR
        for resource in rule["resources"]
    }
    assert clusterwide == {"nodes", "checkpointnodes"}
    roles = {role["metadata"]["namespace"]: role["rules"] for role in chart.of_kind(objects, "Role")}
    assert set(roles) == {"team-a", "team-b", chart.NAMESPACE}
    own = {resource for rule in roles[chart.NAMESPACE] for resource in rule["resources"]}
    assert own == {"leases", "pods"}
    assert not any(WRITES & set(rule["verbs"]) for rule in roles[chart.NAMESPACE] if "pods" in rule["resources"])
    everywhere = next(
        role for role in chart.of_kind(render({}), "ClusterRole") if role["metadata"]["name"] == chart.OPERATOR
    )
    for namespace in ("team-a", "team-b"):
        assert all(rule in everywhere["rules"] for rule in roles[namespace])
    watched = [argument for argument in _arguments(objects, "operator") if "namespace" in argument]
    assert watched == ["--watch-namespace=team-a", "--watch-namespace=team-b"]


def test_every_binding_is_to_our_own_service_accounts(objects: list[dict[str, Any]]) -> None:
    accounts = {one["metadata"]["name"] for one in chart.of_kind(objects, "ServiceAccount")}
    for binding in chart.of_kind(objects, "RoleBinding", "ClusterRoleBinding"):
        (subject,) = binding["subjects"]
        assert (subject["kind"], subject["namespace"]) == ("ServiceAccount", chart.NAMESPACE)
        assert subject["name"] in accounts
    used = {template["spec"]["serviceAccountName"] for template in chart.pod_templates(objects).values()}
    assert used == accounts


@pytest.mark.parametrize("component", ["operator", "sidecar"])
def test_traffic_is_limited_to_what_is_needed(component: str, render: Callable[..., list[dict[str, Any]]]) -> None:
    policy = _policy(render({}), component)
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == component
    assert [rule["ports"] for rule in policy["ingress"]] == [[{"port": "metrics", "protocol": "TCP"}]]
    assert all(rule["ports"] for rule in policy["egress"])
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {53, 80, 443, 6443}
    metadata = [rule["to"] for rule in policy["egress"] if rule["ports"][0]["port"] == 80]
    assert all(to == [{"ipBlock": {"cidr": "169.254.169.254/32"}}] for to in metadata)
    federated = _policy(render(chart.VALUES["workload-identity"]), component)
    asks_metadata = {80} if component == "sidecar" else set()
    assert {port["port"] for rule in federated["egress"] for port in rule["ports"]} == {53, 443, 6443} | asks_metadata
    azurite = _policy(render(chart.VALUES["secret"]), component)
    assert 10000 in {port["port"] for rule in azurite["egress"] for port in rule["ports"]}


@pytest.mark.parametrize(
    ("endpoint", "rule"),
    [
        ("http://169.254.169.254", {"to": [{"ipBlock": {"cidr": "169.254.169.254/32"}}], "ports": [80]}),
        ("https://10.1.2.3", {"to": [{"ipBlock": {"cidr": "10.1.2.3/32"}}], "ports": [443]}),
        ("http://notices.example:8080", {"ports": [8080]}),
    ],
)
def test_agents_reach_whoever_tells_of_evictions(
    endpoint: str, rule: dict[str, Any], render: Callable[..., list[dict[str, Any]]]
) -> None:
    """Also where no identity is asked for there."""
    values = {"sidecar": {"evictionNotices": {"endpoint": endpoint}}}
    policy = _policy(render({**chart.VALUES["workload-identity"], **values}), "sidecar")
    found = [{**one, "ports": [port["port"] for port in one["ports"]]} for one in policy["egress"]]
    assert rule in found
    silent = {"sidecar": {"evictionNotices": {"enabled": False}}}
    policy = _policy(render({**chart.VALUES["workload-identity"], **silent}), "sidecar")
    assert {port["port"] for one in policy["egress"] for port in one["ports"]} == {53, 443, 6443}


def test_agents_alone_reach_each_other_where_they_take_mirrors(
    render: Callable[..., list[dict[str, Any]]],
) -> None:
    policy = _policy(render(chart.VALUES["mirrors"]), "sidecar")
    selector = policy["podSelector"]["matchLabels"]
    (into,) = [rule for rule in policy["ingress"] if rule["ports"][0]["port"] == "mirrors"]
    (out,) = [rule for rule in policy["egress"] if rule["ports"][0]["port"] == 9601]
    assert into["from"] == out["to"] == [{"podSelector": {"matchLabels": selector}}]


def _policy(objects: list[dict[str, Any]], component: str) -> dict[str, Any]:
    (policy,) = [
        one["spec"] for one in chart.of_kind(objects, "NetworkPolicy") if one["metadata"]["name"].endswith(component)
    ]
    return policy


def _arguments(objects: list[dict[str, Any]], component: str) -> list[str]:
    return chart.pod_templates(objects)[component]["spec"]["containers"][0]["args"]


def _host_paths(template: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["hostPath"]["path"] for one in template["spec"]["volumes"] if "hostPath" in one}


def _rules(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for one in objects:
        if one["kind"] in ("Role", "ClusterRole"):
            for rule in one["rules"]:
                yield one["metadata"]["name"], rule
