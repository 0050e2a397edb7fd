"""Fixtures: helm and an API server, and the chart rendered with each set of values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testchart import chart
from testcluster.controlplane import KubernetesClient
from testcluster.fixtures import api_server

__all__ = ["api_server"]


@pytest.fixture
def render(api_server: KubernetesClient, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Renders the chart with values, to which a storage is added."""

    def run(values: dict[str, Any], *options: str) -> list[dict[str, Any]]:
        return chart.render(api_server, tmp_path, chart.with_storage(values), *options)

    return run


@pytest.fixture(scope="session", params=list(chart.VALUES))
def objects(
    request: pytest.FixtureRequest, api_server: KubernetesClient, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What the chart makes of each set of values. Not to be changed."""
    values = chart.with_storage(chart.VALUES[request.param])
    return chart.render(api_server, tmp_path_factory.mktemp("values"), values)
