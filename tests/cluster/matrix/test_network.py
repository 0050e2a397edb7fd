"""Packets vanish between nodes, or between a node and the storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from testcluster.firewall import cut
from testjobs.account import COMMITTED, Account, check_ledger
from testjobs.job import Job
from testjobs.release import Release


def test_network_cut_between_the_gangs_nodes(job: Callable[..., Job], account: Account) -> None:
    """Ranks wait for each other and say nothing: a hang. The next gang cannot meet either, until the cut is mended."""
    training = job(progressPolicy={"progressDeadlineSeconds": 10}, startupDeadlineSeconds=240)
    training.wait_for_commit(COMMITTED)
    cluster = training.cluster
    node, peer = (cluster.nodes[training.node_of(index)] for index in (0, 1))
    with cut(node, cluster.claim.addresses.pods_of(peer.index)):
        training.wait("it starts again", lambda status: status["attempt"] == 2 and status["state"] == "Starting")
        training.wait("its pods are there", lambda status: has_pods_on_nodes(training, attempt=2))
    check_ledger(account.check_end(training), "HangDetected", counted=True)


def has_pods_on_nodes(job: Job, *, attempt: int) -> bool:
    return len([pod for pod in job.pods(attempt) if pod["status"]["phase"] == "Running"]) == 2


def test_network_cut_between_an_agent_and_the_storage(
    job: Callable[..., Job], account: Account, release: Release, cluster_azurite: Any
) -> None:
    """For all pods of one node. Its part of each step waits in memory, and the other's part waits for it."""
    training = job("--pace", "0.2")
    training.wait_for_commit(COMMITTED)
    name = next(node for node in map(training.node_of, (1, 0)) if node != release.operator_node())
    with cut(training.cluster.nodes[name], cluster_azurite.host, port=cluster_azurite.port):
        before = training.wait("a step waits", lambda status: status["checkpoint"].get("pendingBytes"))
        training.wait(
            "training goes on",
            lambda now: now["trainerStatus"]["globalStep"] > before["trainerStatus"]["globalStep"] + 50,
        )
        committed = before["checkpoint"]["latestPersistedStep"]
        assert training.status()["checkpoint"]["latestPersistedStep"] == committed
    training.wait("steps are committed again", lambda now: now["checkpoint"]["latestPersistedStep"] > committed)
    assert "terminalState" not in training.status()
    account.check_end(training, restarts=0)
