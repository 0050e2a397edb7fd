"""docs/aks.md: every file that it names is there and is taken by a real API server, and no file lies there unnamed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from stepfast_operator.events import EventReason
from testchart import chart
from testcluster.controlplane import KubernetesClient

FOLDER = chart.ROOT / "examples" / "aks"
GUIDE = (chart.ROOT / "docs" / "aks.md").read_text()
VALUES = sorted(FOLDER.glob("values*.yaml"))
MANIFESTS = sorted(set(FOLDER.glob("*.yaml")) - set(VALUES))
# Azure's own API for what its managed Prometheus scrapes: as the Prometheus operator's, in another group.
MONITORS = Path(__file__).with_name("monitors.yaml")
# What the guide gives by --set.
GIVEN = {
    "image": {"registry": "myregistry.azurecr.io"},
    "storage": {"uri": "abfss://checkpoints@mycheckpoints.dfs.core.windows.net/training"},
    "azure": {"workloadIdentity": {"clientId": "00000000-0000-0000-0000-000000000001"}},
}
# Of what the guide has nothing to advise: all is well, or another Event says what there is to do.
FINE = {
    "PodsCreated",
    "Recovered",
    "Suspended",
    "Resumed",
    "Completed",
    "Admitted",
    "ScalingUp",
}


def test_every_file_is_named_and_every_name_a_file() -> None:
    named = set(re.findall(r"examples/aks/([\w-]+\.yaml)", GUIDE))
    assert named == {path.name for path in FOLDER.iterdir()}


def test_every_event_that_tells_of_trouble_has_its_advice() -> None:
    advised = {name for row in re.findall(r"^\| (.*?) \|", GUIDE, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert {str(reason) for reason in EventReason} - FINE <= advised


@pytest.fixture(scope="module")
def server(api_server: KubernetesClient) -> KubernetesClient:
    """With all that the guide's objects need."""
    monitors = MONITORS.read_text()
    azure = monitors.replace("monitoring.coreos.com", "azmonitoring.coreos.com")
    for text in (monitors, azure):
        api_server.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)
    api_server.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(chart.CHART / "crds"))
    names = [one["metadata"]["name"] for text in (monitors, azure) for one in yaml.safe_load_all(text) if one]
    names += [path.stem for path in (chart.CHART / "crds").iterdir()]
    api_server.kubectl("wait", "--for=condition=Established", "--timeout=60s", *(f"crd/{name}" for name in names))
    for name in (chart.NAMESPACE, "team-a"):
        api_server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return api_server


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.name)
def test_release_with_these_values_is_taken(server: KubernetesClient, tmp_path: Path, path: Path) -> None:
    values: dict[str, Any] = {**yaml.safe_load((FOLDER / "values.yaml").read_text()), **GIVEN}
    objects = chart.render(server, tmp_path, values, "-f", str(path))
    text = yaml.safe_dump_all(objects)
    command = ["apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"]
    assert server.kubectl(*command, stdin=text).count("serverside-applied") == len(objects)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifest_is_applied(server: KubernetesClient, path: Path) -> None:
    said = server.kubectl("apply", "--server-side", "--force-conflicts", "--validate=strict", "-f", str(path))
    assert "serverside-applied" in said
    if path.name != "namespace.yaml":  # others have theirs there, too
        server.kubectl("delete", "-f", str(path), "--wait=false")
