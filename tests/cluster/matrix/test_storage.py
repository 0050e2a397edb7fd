"""The storage does not answer, or not at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from testcluster.cluster import Cluster
from testcluster.firewall import redirected
from testcluster.waiting import lasting
from testjobs.account import COMMITTED, Account
from testjobs.job import Job


def test_storage_down_for_a_minute(job: Callable[..., Job], account: Account, cluster_azurite: Any) -> None:
    training = job("--pace", "0.2")
    training.wait_for_commit(COMMITTED)
    with cluster_azurite.unanswering(), lasting(60):
        before = training.status()["trainerStatus"]["globalStep"]
        training.wait("training goes on", lambda status: status["trainerStatus"]["globalStep"] > before + 20)
    account.check_end(training, restarts=0)


@pytest.fixture
def throttling(cluster: Cluster, cluster_azurite: Any, load_module: Callable[[str], Any]) -> Iterator[Any]:
    """`faults.Proxy` in front of the storage. Of four requests in a row it refuses three and holds the fourth up."""
    proxy = load_module("faults").Proxy(cluster_azurite.port, host=cluster.address)
    proxy.break_down("503:2 503:1 slow 503:1")
    yield proxy
    proxy.close()


def test_storage_throttled_for_a_minute(
    job: Callable[..., Job], account: Account, cluster_azurite: Any, throttling: Any
) -> None:
    """503 ServerBusy with Retry-After, for all nodes."""
    training = job("--pace", "0.2")
    training.wait_for_commit(COMMITTED)
    with ExitStack() as nodes, lasting(60):
        for node in training.cluster.nodes.values():
            nodes.enter_context(redirected(node, cluster_azurite.host, cluster_azurite.port, throttling.port))
        before = training.status()["trainerStatus"]["globalStep"]
        training.wait("a step is late", lambda status: status["checkpoint"].get("pendingBytes"))
        training.wait("training goes on", lambda status: status["trainerStatus"]["globalStep"] > before + 20)
    assert len(throttling.requests) > 4
    account.check_end(training, restarts=0)
