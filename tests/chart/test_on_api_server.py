"""The chart against a real API server: its objects are accepted, its pods as restricted as they claim to be, and a
release comes, changes and goes while the jobs stay.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

from stepfast_sidecar.neighbours import AGENTS_NAME
from testchart import chart
from testcluster.controlplane import KubernetesClient
from testcluster.waiting import CommandFailed

Render = Callable[..., list[dict[str, Any]]]
CRDS = ("trainingjobs.stepfast.dev", "checkpointnodes.stepfast.dev")
JOB = Path(__file__).parents[2] / "examples" / "gpt_stdlib" / "job.yaml"


@pytest.fixture(scope="module")
def server(api_server: KubernetesClient) -> KubernetesClient:
    """With the namespaces and the CRDs that the chart's objects live in."""
    for name in (chart.NAMESPACE, "team-a", "team-b"):
        api_server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    folders = (chart.CHART / "crds", Path(__file__).with_name("monitors.yaml"))
    for folder in folders:
        api_server.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(folder))
    kinds = ("podmonitors", "servicemonitors", "prometheusrules")
    names = [*CRDS, *(f"{kind}.monitoring.coreos.com" for kind in kinds)]
    api_server.kubectl("wait", "--for=condition=Established", "--timeout=60s", *(f"crd/{name}" for name in names))
    return api_server


def test_every_object_is_accepted(server: KubernetesClient, objects: list[dict[str, Any]]) -> None:
    text = yaml.safe_dump_all(objects)
    command = ["apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"]
    said = server.kubectl(*command, stdin=text)
    assert said.count("serverside-applied") == len(objects)


def test_the_operators_pod_is_restricted(server: KubernetesClient, render: Render) -> None:
    _try_pod(server, render, "operator", level="restricted")


def test_of_the_restricted_level_the_agent_lacks_host_paths_and_another_uid_alone(
    server: KubernetesClient, render: Render
) -> None:
    with pytest.raises(CommandFailed) as refused:
        _try_pod(server, render, "sidecar", level="restricted")
    words = str(refused.value)
    assert 'violates PodSecurity "restricted:latest"' in words
    for word in ("restricted volume types", "runAsNonRoot != true", "runAsUser=0"):
        assert word in words
    for word in ("privileged", "capabilities", "seccompProfile", "allowPrivilegeEscalation", "host namespaces"):
        assert word not in words.partition("violates")[2]
    with pytest.raises(CommandFailed) as refused:
        _try_pod(server, render, "sidecar", level="baseline")
    assert str(refused.value).partition('"baseline:latest": ')[2].startswith("hostPath volumes")
    assert "), " not in str(refused.value).partition('"baseline:latest": ')[2]
    _try_pod(server, render, "sidecar", level="privileged")


@pytest.fixture
def release(server: KubernetesClient, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Installs or upgrades the release `stepfast` with values."""

    def run(command: str, values: dict[str, Any], folder: Path = chart.CHART) -> str:
        file = chart.write_values(tmp_path, chart.with_storage(values))
        return server.helm(command, "stepfast", str(folder), "-n", chart.NAMESPACE, "-f", str(file))

    yield run
    server.helm("uninstall", "stepfast", "-n", chart.NAMESPACE, "--ignore-not-found")


def test_jobs_outlive_upgrade_and_uninstall(server: KubernetesClient, release: Callable[..., str]) -> None:
    release("install", {})
    server.kubectl("apply", "-n", "team-a", "-f", str(JOB))
    before = server.get("tj", "-n", "team-a")["items"]
    release("upgrade", {"watchNamespaces": ["team-a"], "networkPolicy": {"enabled": False}})
    assert server.get("networkpolicy", "-n", chart.NAMESPACE)["items"] == []
    assert server.get("role", "stepfast-operator-jobs", "-n", "team-a")
    server.helm("uninstall", "stepfast", "-n", chart.NAMESPACE)
    assert server.get("tj", "-n", "team-a")["items"] == before
    assert [one["metadata"]["name"] for one in server.get("crd", *CRDS)["items"]] == list(CRDS)
    left = server.get("clusterrole,clusterrolebinding,csidriver,validatingadmissionpolicy", "-A")["items"]
    assert [one["metadata"]["name"] for one in left if "stepfast" in one["metadata"]["name"]] == []
    assert server.get("role,rolebinding,deployment,daemonset,service,sa", "-n", chart.NAMESPACE)["items"] == []
    assert server.get("role,rolebinding", "-n", "team-a")["items"] == []
    server.kubectl("delete", "-n", "team-a", "-f", str(JOB), "--wait=false")


def test_agents_certificate_is_made_once(server: KubernetesClient, release: Callable[..., str]) -> None:
    values = {"sidecar": {"mirrors": {"enabled": True}}}
    release("install", values)
    made = server.get("secret", "stepfast-sidecar-mirrors", "-n", chart.NAMESPACE)["data"]
    release("upgrade", {"sidecar": {"mirrors": {"enabled": True, "port": 9700}}})
    assert server.get("secret", "stepfast-sidecar-mirrors", "-n", chart.NAMESPACE)["data"] == made
    certificate, authority = (
        x509.load_pem_x509_certificate(base64.b64decode(made[name])) for name in ("tls.crt", "ca.crt")
    )
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [AGENTS_NAME]
    release("upgrade", {"sidecar": {"mirrors": {"enabled": True, "secretName": "of-my-own"}}})
    mounted = server.get("daemonset", "stepfast-sidecar", "-n", chart.NAMESPACE)["spec"]["template"]["spec"]["volumes"]
    assert {"secretName": "of-my-own", "defaultMode": 0o400} in [volume.get("secret") for volume in mounted]


def test_crds_are_upgraded_as_documented(server: KubernetesClient, release: Callable[..., str], tmp_path: Path) -> None:
    """helm makes CRDs and never changes them; what docs/install.md says does, also over what helm made."""
    old = tmp_path / "chart"
    shutil.copytree(chart.CHART, old)
    crd = old / "crds" / "trainingjobs.stepfast.dev.yaml"
    document = yaml.safe_load(crd.read_text())
    document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["description"] = "of the last release"
    crd.write_text(json.dumps(document))
    server.kubectl("delete", "crd", "trainingjobs.stepfast.dev", "--wait=true")
    release("install", {}, old)
    assert _description(server) == "of the last release"
    release("upgrade", {})
    assert _description(server) == "of the last release"
    documented = "kubectl apply --server-side --force-conflicts -f charts/stepfast/crds/"
    assert documented in (chart.ROOT / "docs" / "install.md").read_text()
    server.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(chart.CHART / "crds"))
    assert _description(server) == yaml.safe_load((chart.CHART / "crds" / crd.name).read_text())["spec"]["versions"][0][
        "schema"]["openAPIV3Schema"]["description"]  # fmt: skip


LEASES = "leases.coordination.k8s.io"
ABILITIES: dict[str, tuple[str, str, str, str, bool]] = {
    "agent reads a secret": ("sidecar", "get", "secrets", "team-a", False),
    "agent reads its own secrets": ("sidecar", "list", "secrets", "stepfast-system", False),
    "agent makes a pod": ("sidecar", "create", "pods", "team-a", False),
    "agent reads jobs": ("sidecar", "get", "trainingjobs.stepfast.dev", "team-a", False),
    "agent asks itself": ("sidecar", "patch", "checkpointnodes.stepfast.dev", "", False),
    "agent reports": ("sidecar", "patch", "checkpointnodes.stepfast.dev:status", "", True),
    "agent makes its report": ("sidecar", "create", "checkpointnodes.stepfast.dev", "", True),
    "operator reads a secret": ("operator", "get", "secrets", "team-a", False),
    "operator reads its own secrets": ("operator", "get", "secrets", "stepfast-system", False),
    "operator runs in a pod": ("operator", "create", "pods:exec", "team-a", False),
    "operator makes tokens": ("operator", "create", "serviceaccounts:token", "team-a", False),
    "operator makes a pod": ("operator", "create", "pods", "team-a", True),
    "operator makes a pod elsewhere": ("operator", "create", "pods", "team-b", False),
    "operator makes a pod of its own": ("operator", "create", "pods", "stepfast-system", False),
    "operator sees agents": ("operator", "watch", "pods", "stepfast-system", True),
    "operator takes the lease": ("operator", "update", f"{LEASES}/stepfast-operator", "stepfast-system", True),
    "operator takes another lease": ("operator", "update", f"{LEASES}/other", "stepfast-system", False),
    "operator writes a job's status": ("operator", "patch", "trainingjobs.stepfast.dev:status", "team-a", True),
    "operator makes a job": ("operator", "create", "trainingjobs.stepfast.dev", "team-a", False),
    "operator asks an agent": ("operator", "patch", "checkpointnodes.stepfast.dev", "", True),
    "operator writes a report": ("operator", "patch", "checkpointnodes.stepfast.dev:status", "", False),
    "operator changes a node": ("operator", "patch", "nodes", "", False),
    "operator changes a pod": ("operator", "patch", "pods", "team-a", False),
    "operator changes a Service": ("operator", "patch", "services", "team-a", False),
    "operator makes an Event": ("operator", "create", "events", "team-a", True),
    "operator changes an Event": ("operator", "patch", "events", "team-a", False),
}  # fmt: skip


def test_roles_allow_what_is_needed_and_no_more(server: KubernetesClient, release: Callable[..., str]) -> None:
    release("install", {"watchNamespaces": ["team-a"]})
    wrong = []
    for name, (component, verb, resource, namespace, expected) in ABILITIES.items():
        account = f"system:serviceaccount:{chart.NAMESPACE}:stepfast-{component}"
        if _may(server, account, verb, resource, namespace) != expected:
            wrong.append(name)
    assert wrong == []


def _may(server: KubernetesClient, account: str, verb: str, resource: str, namespace: str) -> bool:
    """`resource` as in `leases.coordination.k8s.io/the-name` or `pods:exec`."""
    resource, _, name = resource.partition("/")
    resource, _, subresource = resource.partition(":")
    resource, _, group = resource.partition(".")
    attributes = {"verb": verb, "group": group, "resource": resource, "subresource": subresource, "name": name}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": account,
            "groups": ["system:serviceaccounts", "system:authenticated"],
            "resourceAttributes": {**attributes, "namespace": namespace},
        },
    }
    answer = json.loads(server.kubectl("create", "-f", "-", "-o", "json", stdin=json.dumps(review)))
    return bool(answer["status"]["allowed"])


def _description(server: KubernetesClient) -> str:
    crd = server.get("crd", "trainingjobs.stepfast.dev")
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["description"]


def _try_pod(server: KubernetesClient, render: Render, component: str, *, level: str) -> None:
    """Asks the API server for the pod of the component's template in a namespace of that Pod Security level."""
    template = chart.pod_templates(render({}))[component]
    account = template["spec"]["serviceAccountName"]
    labels = {"pod-security.kubernetes.io/enforce": level}
    server.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": level, "labels": labels}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account, "namespace": level}},
    )
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "tried", "namespace": level},
        "spec": template["spec"],
    }
    server.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
