"""What may be said to the chart, and what it answers when that is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from testchart import chart
from testcluster.controlplane import KubernetesClient
from testcluster.waiting import CommandFailed

CHART = Path(__file__).parents[2] / "charts" / "stepfast"
VALUES = (CHART / "values.yaml").read_text()
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
ID = "11111111-2222-3333-4444-555555555555"

# What is written, and words of the message.
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt": ({"storage": {"urii": "abfs://a@b/c"}}, "/storage.*'urii' not allowed"),
    "misspelt at the top": ({"storages": {}}, "'storages' not allowed"),
    "storage is no uri": ({"storage": {"uri": "/data"}}, "/storage/uri"),
    "allowed is no uri": ({"storage": {"allowed": ["container"]}}, "/storage/allowed/0.*container"),
    "hostPath volume": (
        {"storage": {"volume": {"hostPath": {"path": "/"}}}},
        "/storage/volume.*'hostPath' not allowed",
    ),
    "two volumes": ({"storage": {"volume": {"nfs": {}, "csi": {}}}}, "/storage/volume.*maxProperties"),
    "unknown unit": ({"sidecar": {"memory": {"limit": "64GB"}}}, "/sidecar/memory/limit.*64GB"),
    "no overhead": ({"sidecar": {"memory": {"overhead": 0}}}, "/sidecar/memory/overhead.*minimum"),
    "relative kubelet folder": ({"sidecar": {"kubeletDir": "var/lib/kubelet"}}, "/sidecar/kubeletDir"),
    "no folder of memory": ({"sidecar": {"memory": {"hostPath": "/"}}}, "/sidecar/memory/hostPath"),
    "tag as a number": ({"image": {"tag": 1.2}}, "/image/tag.*want string"),
    "digest": ({"operator": {"image": {"digest": "sha256:abc"}}}, "/operator/image/digest.*sha256:abc"),
    "pull policy": ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy.*one of"),
    "pull secret as text": ({"image": {"pullSecrets": ["registry"]}}, "/image/pullSecrets/0.*want object"),
    "client id": ({"azure": {"workloadIdentity": {"clientId": "stepfast"}}}, "/azure/workloadIdentity/clientId"),
    "namespace": ({"watchNamespaces": ["Team_A"]}, "/watchNamespaces/0.*Team_A"),
    "pod groups of nobody's": ({"podGroups": {"slurm": True}}, "podGroups.*slurm"),
    "namespace twice": ({"watchNamespaces": ["a", "a"]}, "/watchNamespaces.*equal"),
    "port": ({"networkPolicy": {"storagePorts": [0]}}, "/networkPolicy/storagePorts/0.*minimum"),
    "share of nodes": ({"sidecar": {"maxUnavailable": "0%"}}, "/sidecar/maxUnavailable"),
    "notices from nowhere": (
        {"sidecar": {"evictionNotices": {"endpoint": "169.254.169.254"}}},
        "/sidecar/evictionNotices/endpoint.*does not match pattern",
    ),
    "no time to flush": ({"sidecar": {"flushTimeoutSeconds": 0}}, "/sidecar/flushTimeoutSeconds.*minimum"),
    "variable without a name": ({"operator": {"extraEnv": [{"value": "a"}]}}, "/operator/extraEnv/0.*'name'"),
    "toleration misspelt": (
        {"operator": {"tolerations": [{"key": "a", "tolerationSecond": 1}]}},
        "/operator/tolerations/0.*'tolerationSecond' not allowed",
    ),
    "time of a toleration as text": (
        {"operator": {"tolerations": [{"key": "a", "tolerationSeconds": "10s"}]}},
        "/operator/tolerations/0/tolerationSeconds.*want integer",
    ),
    "monitors of another API": ({"metrics": {"monitors": {"apiVersion": "v1"}}}, "/metrics/monitors/apiVersion"),
    "two identities": (
        {"azure": {"workloadIdentity": {"clientId": ID}, "managedIdentity": {"clientId": ID}}},
        "exclude each other",
    ),
    "file without a volume": (
        {"storage": {"uri": "file:///checkpoints"}},
        "storage.volume and storage.mountPath must say",
    ),
    "volume without a path": (
        {"storage": {"volume": {"nfs": {"server": "a", "path": "/b"}}}},
        "needs storage.mountPath",
    ),
    "file beside its volume": (
        {
            "storage": {
                "uri": "file:///checkpoints-b",
                "mountPath": "/checkpoints",
                "volume": {"nfs": {"server": "a", "path": "/b"}},
            }
        },
        "file:///checkpoints-b is not below storage.mountPath /checkpoints",
    ),
}


@pytest.mark.parametrize(("values", "words"), BAD.values(), ids=BAD)
def test_wrong_values_are_refused_with_a_message_that_names_them(
    values: dict[str, Any], words: str, render: Callable[..., Any]
) -> None:
    with pytest.raises(CommandFailed) as refused:
        render(values)
    assert re.search(words, str(refused.value), re.DOTALL), refused.value


def test_without_a_storage_the_message_says_what_to_set(api_server: KubernetesClient, tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=r"storage\.uri is required.*--set storage\.uri=abfs://"):
        chart.render(api_server, tmp_path, {})


def test_helm_lint_finds_nothing(api_server: KubernetesClient, tmp_path: Path) -> None:
    for name, values in chart.VALUES.items():
        file = chart.write_values(tmp_path, chart.with_storage(values))
        said = api_server.helm("lint", "--strict", str(CHART), "-f", str(file), *chart.KUBERNETES)
        assert "1 chart(s) linted, 0 chart(s) failed" in said, name
        assert "WARNING" not in said, name


def test_every_value_is_explained() -> None:
    unexplained = [".".join(path) for path, is_explained, _ in _leaves(VALUES) if not is_explained]
    assert not unexplained


def test_schema_and_values_name_the_same() -> None:
    in_values = {path for path, _, _ in _leaves(VALUES)}
    in_schema = set(_schema_leaves(SCHEMA, stop=in_values))
    in_schema.discard(("global",))  # helm's own
    assert in_schema == in_values


def test_documented_values_exist() -> None:
    text = (CHART.parents[1] / "docs" / "install.md").read_text() + (CHART / "templates" / "NOTES.txt").read_text()
    words = re.findall(r"`([A-Za-z]+(?:\.[A-Za-z]+)+)(?:=[^`]*)?`|--set ([A-Za-z.]+)=", text)
    tops = {path[0] for path, _, _ in _leaves(VALUES)}
    named = {tuple(first.split(".")) for pair in words if (first := pair[0] or pair[1]).split(".")[0] in tops}
    assert len(named) > 15
    assert named - {path for path, _, _ in _leaves(VALUES)} == set()


def test_schema_is_closed() -> None:
    open_ones = [
        path
        for path, node in _objects(SCHEMA)
        if "properties" in node and node.get("additionalProperties") is not False
    ]
    assert not open_ones


def test_the_charts_crds_are_the_projects() -> None:
    ours = {path.name: path.read_text() for path in (CHART.parents[1] / "crds").glob("*.yaml")}
    assert {path.name: path.read_text() for path in (CHART / "crds").glob("*.yaml")} == ours, "run make crds"
    assert len(ours) == 2


def _leaves(text: str) -> Iterator[tuple[tuple[str, ...], bool, Any]]:
    """Values with whether a comment `# --` stands above them. What is explained as a whole is one value."""
    lines = text.splitlines()
    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    yield from _leaves_of(root, lines, ())


def _leaves_of(
    mapping: yaml.MappingNode, lines: list[str], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], bool, Any]]:
    for key, value in mapping.value:
        is_explained = _is_explained(lines, key.start_mark.line)
        if not is_explained and isinstance(value, yaml.MappingNode) and not value.flow_style:
            yield from _leaves_of(value, lines, (*path, key.value))
        else:
            yield (*path, key.value), is_explained, value


def _is_explained(lines: list[str], line: int) -> bool:
    while line > 0 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        if lines[line].lstrip().startswith("# -- "):
            return True
    return False


def _schema_leaves(
    node: dict[str, Any], *, stop: set[tuple[str, ...]], path: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    node = _resolved(node)
    if path in stop or "properties" not in node:
        yield path
        return
    for name, inner in node["properties"].items():
        yield from _schema_leaves(inner, stop=stop, path=(*path, name))


def _objects(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, dict):
        if node.get("type") == "object":
            yield path, node
        for name, inner in node.items():
            yield from _objects(inner, f"{path}/{name}")


def _resolved(node: dict[str, Any]) -> dict[str, Any]:
    reference = node.get("$ref")
    return SCHEMA["definitions"][reference.rpartition("/")[2]] if reference else node
