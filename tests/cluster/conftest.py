"""Fixtures: a real cluster for the session, and an API server alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from testcluster.binaries import Binaries
from testcluster.claim import Claim
from testcluster.cluster import Cluster, check_machine
from testcluster.controlplane import KubernetesClient
from testcluster.fixtures import api_server, loudly
from testcluster.images import ProjectImages, pause, project_images
from testoperator.crds import install_crds

__all__ = ["api_server"]


@pytest.fixture(scope="session")
def operator_api(api_server: KubernetesClient) -> KubernetesClient:
    """That API server, with our CRDs served."""
    install_crds(api_server)
    return api_server


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two nodes, for the session. STEPFAST_CLUSTER=<number> uses one that was started by hand, and leaves it."""
    number = os.environ.get("STEPFAST_CLUSTER")
    with loudly():
        if number is not None:
            yield Cluster.open(int(number))
            return
        check_machine()
        cluster = Cluster(Claim.take(), Binaries.find())
        try:
            cluster.up(2, images=[pause()])
            yield cluster
        finally:
            keep_logs(cluster, request)
            cluster.down()


@pytest.fixture(scope="session")
def images(cluster: Cluster) -> ProjectImages:
    """The project's own images, built from this checkout and loaded onto every node."""
    with loudly():
        built = project_images()
    cluster.load(*built.archives)
    return built


@pytest.fixture(scope="session")
def cluster_azurite(cluster: Cluster, serve_azurite: Callable[[str], AbstractContextManager[Any]]) -> Iterator[Any]:
    """An `Azurite` (tests/conftest.py) that pods and the host reach at the same address."""
    with serve_azurite(cluster.address) as started:
        yield started


def keep_logs(cluster: Cluster, request: pytest.FixtureRequest) -> None:
    """Where STEPFAST_CLUSTER_LOGS says, when a test of the session failed."""
    folder = os.environ.get("STEPFAST_CLUSTER_LOGS")
    if folder and request.session.testsfailed:
        cluster.keep_logs(Path(folder))
