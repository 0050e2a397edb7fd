"""The documents are true where a machine can tell: the manifest's fields and examples, links, files."""

from __future__ import annotations

import itertools
import re
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from stepfast_operator import metrics as operator_metrics
from stepfast_operator.document import camel, decode
from stepfast_operator.events import EventReason
from stepfast_operator.failurepolicy import FailurePolicy
from stepfast_operator.spec import Interval, TrainingSpec, parse_manifest
from stepfast_sidecar import metrics as agent_metrics
from stepfast_sidecar.tenants import CREDENTIAL_NAMES

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "guide.md").read_text()
INSTALL = (ROOT / "docs" / "install.md").read_text()
OBSERVING = (ROOT / "docs" / "observing.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *ROOT.glob("docs/**/*.md")]


def fields_of(kind: type, path: str = "") -> Iterator[str]:
    """The paths of all fields of the spec, as a manifest writes them."""
    hints = typing.get_type_hints(kind)
    for field in fields(typing.cast("typing.Any", kind)):
        name, inner = f"{path}{camel(field.name)}", hints[field.name]
        if is_dataclass(inner) and inner is not Interval:
            yield from fields_of(typing.cast("type", inner), f"{name}.")
        else:
            yield name


@pytest.mark.parametrize("field", list(fields_of(TrainingSpec)))
def test_guide_has_a_row_for_every_field_of_the_manifest(field: str) -> None:
    assert re.search(rf"^\|[^|]*`{re.escape(field)}`[^|]*\|", GUIDE, re.MULTILINE)


def test_manifests_in_the_guide_are_understood() -> None:
    blocks = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)]
    manifests = [block for block in blocks if "kind" in block]
    policies = [block["failurePolicy"] for block in blocks if "failurePolicy" in block]

    assert [parse_manifest(manifest, default_namespace="local").job.name for manifest in manifests] == ["gpt"]
    assert [len(decode(FailurePolicy, policy, "failurePolicy").rules) for policy in policies] == [3]


def names_in(document: str, title: str) -> list[str]:
    """What the table below the row of that first title names, row by row; without labels."""
    lines = document.splitlines()
    begin = next(index for index, line in enumerate(lines) if line.startswith(f"| {title} |")) + 2
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[begin:])
    return [name for row in rows for name in re.findall(r"`(\w+)[^`]*`", row.split("|")[1])]


def names_of(registry: CollectorRegistry) -> list[str]:
    """The metrics, as they are scraped."""
    return [f"{one.name}_total" if one.type == "counter" else one.name for one in registry.collect()]


def test_install_has_a_row_for_every_event() -> None:
    assert sorted(names_in(INSTALL, "Event")) == sorted(EventReason)


def test_every_metric_of_the_operator_has_a_row() -> None:
    metrics = operator_metrics.Metrics()
    metrics.watch(statuses=dict, agents=list, ages=dict, now=lambda: 0.0)
    assert sorted(names_in(OBSERVING, "operator's metric")) == sorted(names_of(metrics.registry))


def test_every_metric_of_the_agent_has_a_row() -> None:
    assert sorted(names_in(OBSERVING, "agent's metric")) == sorted(names_of(agent_metrics.Metrics().registry))


def test_install_names_what_the_agent_takes_of_a_secret() -> None:
    assert set(re.findall(r"`((?:AZURE_STORAGE|AWS)_\w+)`", INSTALL)) == set(CREDENTIAL_NAMES)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text())

    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("row", re.findall(r"^\|.*\|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)[2:])
def test_files_that_contributors_are_sent_to_exist(row: str) -> None:
    where = row.rsplit("|", 2)[1]
    paths = [path for path in re.findall(r"`([^`]+)`", where) if "/" in path]

    for path in paths:
        start, brace, rest = path.partition("{")
        names, _, end = rest.partition("}")
        for name in names.split(",") if brace else [""]:
            found = [f"{start}{name}{end}", f"{start}{name}{end}.py"]
            assert any((ROOT / place).exists() for place in found), found
