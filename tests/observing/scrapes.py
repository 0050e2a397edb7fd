"""The chart's rules, and the series that operator and agent are scraped for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import yaml
from prometheus_client import CollectorRegistry

from stepfast_operator import metrics as operator_metrics
from stepfast_sidecar import metrics as agent_metrics

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "charts" / "stepfast" / "alerts" / "stepfast.yaml"
ALERTS = {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}


def scraped_series() -> set[str]:
    """The names of all series of both."""
    operator, agent = operator_metrics.Metrics(), agent_metrics.Metrics()
    operator.watch(statuses=dict, agents=list, ages=dict, now=lambda: 0.0)
    return _series_of(operator.registry) | _series_of(agent.registry)


def series_in(expressions: Iterable[str]) -> set[str]:
    """The series of ours that expressions name."""
    return {name for expr in expressions for name in re.findall(r"\bstepfast_\w+", expr)}


def _series_of(registry: CollectorRegistry) -> set[str]:
    found = set()
    for family in registry.collect():
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        found |= {f"{family.name}{suffix}" for suffix in suffixes}
    return found
