"""Fixtures: a real cluster for the session, and an API server alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest

from testcluster.binaries import Binaries
from testcluster.claim import Claim
from testcluster.cluster import Cluster, check_machine
from testcluster.controlplane import ApiServer, KubernetesClient
from testcluster.fixtures import api_server, loudly, started_here
from testcluster.images import ProjectImages, pause, project_images
from testcluster.jobnamespace import job_namespace
from testcluster.kubenode import PLACES
from testcluster.metadataservice import MetadataService
from testjobs.job import Team
from testjobs.release import NAMESPACE, Release, install
from testoperator.crds import install_crds

__all__ = ["api_server"]

BY_HAND = "STEPFAST_CLUSTER"
TRAINERS = [Path(__file__).parent / name for name in ("trainer.py", "elastic_trainer.py")]


@pytest.fixture(scope="session")
def operator_api(api_server: KubernetesClient) -> KubernetesClient:
    """That API server, with our CRDs served."""
    install_crds(api_server)
    return api_server


@pytest.fixture(scope="session")
def audited_api(operator_api: KubernetesClient) -> ApiServer:
    """The same, for tests that read its audit log or use its certificate; elsewhere they are skipped loudly."""
    return started_here(operator_api)


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two nodes, for the session. STEPFAST_CLUSTER=<number> uses one that was started by hand, and leaves it."""
    number = os.environ.get(BY_HAND)
    with loudly():
        if number is not None:
            found = Cluster.open(int(number))
            yield found
            found.claim.leave()
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


@pytest.fixture(scope="session")
def metadata_service(cluster: Cluster) -> Iterator[MetadataService]:
    """The cloud's metadata service, in which each machine is called as its node."""
    addresses = cluster.claim.addresses
    machines = {ip_network(addresses.pods_of(place)): f"node-{place}" for place in PLACES}

    def name_of(address: str) -> str:
        return next(name for pods, name in machines.items() if ip_address(address) in pods)

    service = MetadataService(address=cluster.address, name_of=name_of)
    yield service
    service.close()


@pytest.fixture(scope="session")
def release(
    cluster: Cluster, images: ProjectImages, cluster_azurite: Any, metadata_service: MetadataService
) -> Iterator[Release]:
    """Stepfast, installed by helm."""
    installed = install(cluster, images, cluster_azurite, metadata_service)
    yield installed
    if BY_HAND in os.environ:  # the cluster stays, for the next session
        installed.uninstall()
        cluster.kubectl("delete", "namespace", NAMESPACE, "--timeout=180s", timeout_seconds=200)


@pytest.fixture(scope="session")
def team(release: Release, images: ProjectImages) -> Iterator[Team]:
    """A namespace that enforces the restricted Pod Security Standard, in which jobs train."""
    cluster = release.cluster
    with job_namespace(cluster, "team"):
        scripts = [f"--from-file={script}" for script in TRAINERS]
        cluster.kubectl("create", "configmap", "trainer", "-n", "team", *scripts)
        yield Team(cluster=cluster, namespace="team", image=images.trainer, storage_uri=release.storage_uri)


@pytest.fixture
def storage_access(monkeypatch: pytest.MonkeyPatch, cluster_azurite: Any) -> None:
    """The credentials with which the test itself reads what jobs have stored."""
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", cluster_azurite.connection_string())


@pytest.fixture(scope="session")
def third_node(team: Team, images: ProjectImages, release: Release) -> str:
    """One machine more, for when one is lost: a gang of two then finds another."""
    node = team.cluster.nodes.get("node-3") or team.cluster.add_node(3, images=[pause(), *images.archives])
    release.wait_until_ready()
    release.wait_for_agents(3)
    return node.name


@pytest.fixture(scope="session")
def undisturbed(team: Team) -> Mapping[int, str]:
    """What the ranks of the trainer end with when nothing happens to them."""
    job = team.submit("undisturbed")
    status = job.wait_for_end()
    assert status["restarts"] == 0
    digests = job.digests()
    assert set(digests) == {0, 1}
    return digests


def keep_logs(cluster: Cluster, request: pytest.FixtureRequest) -> None:
    """Where STEPFAST_CLUSTER_LOGS says, when a test of the session failed."""
    folder = os.environ.get("STEPFAST_CLUSTER_LOGS")
    if folder and request.session.testsfailed:
        cluster.keep_logs(Path(folder))
