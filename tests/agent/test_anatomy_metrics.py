"""What a training tells of its anatomy, as the agent's Prometheus endpoint shows it."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stepfast.anatomymetrics import METRICS, PREFIX
from stepfast.messages import Progress

TOLD = {"anatomy_step_seconds": 0.25, "anatomy_memory_peak_bytes": 4096.0, "loss": 1.5, "anatomy_invented": 7.0}


def gauges(port: int) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples of the families that are about anatomy, by name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        family.name: [(sample.labels, sample.value) for sample in family.samples]
        for family in families
        if "anatomy" in family.name
    }


@pytest.fixture
def rank(new_agent: Callable[..., Any], ranks: Any, free_port: int) -> Any:
    """A rank that has told, of an agent that shows it."""
    peer = new_agent("--metrics-port", str(free_port)).join()
    peer.client.send(Progress(step=1, time=time.time(), metrics=TOLD))
    ranks.eventually(lambda: gauges(free_port)["stepfast_anatomy_step_seconds"], "the figures are shown")
    return peer


def test_gauges_show_a_jobs_anatomy_while_its_ranks_live(rank: Any, ranks: Any, free_port: int) -> None:
    shown = gauges(free_port)
    labels, value = shown["stepfast_anatomy_step_seconds"][0]
    assert value == 0.25
    assert labels.keys() == {"namespace", "name"}
    assert shown["stepfast_anatomy_memory_peak_bytes"] == [(labels, 4096.0)]
    rank.die()
    ranks.eventually(lambda: not gauges(free_port)["stepfast_anatomy_step_seconds"], "they go with the job")


@pytest.mark.usefixtures("rank")
def test_names_are_a_closed_set_whatever_a_tenant_tells(free_port: int) -> None:
    assert gauges(free_port).keys() == {f"stepfast_{PREFIX}{name}" for name in METRICS}
