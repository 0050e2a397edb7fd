"""Fixtures of several folders of tests. What cannot run here says why: a failure in CI, a skip elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from testcluster.binaries import Binaries
from testcluster.claim import Claim
from testcluster.controlplane import ApiServer, KubernetesClient
from testcluster.unavailable import Unavailable


@pytest.fixture(scope="session")
def api_server() -> Iterator[KubernetesClient]:
    """An API server without nodes: that of KUBECONFIG where it is set, else one started for the session.

    For schemas, admission and charts: objects are stored, and nothing acts on them. Needs no root.
    """
    with loudly():
        binaries = Binaries.find_for_api_server()
        if "KUBECONFIG" in os.environ:
            yield KubernetesClient(Path(os.environ["KUBECONFIG"]), binaries)
            return
        server = ApiServer(Claim.take(), binaries)
        try:
            server.start()
            yield server
        finally:
            server.claim.release()


def started_here(client: KubernetesClient) -> ApiServer:
    """The same, as one whose audit log and certificate are at hand, which that of KUBECONFIG keeps to itself."""
    with loudly():
        if not isinstance(client, ApiServer):
            raise Unavailable(
                "KUBECONFIG names the API server, and this test needs one that the session started, for its audit log "
                "or its certificate; run it without KUBECONFIG"
            )
        return client


@contextmanager
def loudly() -> Iterator[None]:
    try:
        yield
    except Unavailable as reason:
        if os.environ.get("CI"):
            pytest.fail(f"a cluster cannot run here: {reason}")
        pytest.skip(f"A CLUSTER CANNOT RUN HERE: {reason}")
