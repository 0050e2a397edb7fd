"""A node is drained, lost, announced to be lost, or falls ill."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from testcluster.metadataservice import MetadataService
from testcluster.waiting import lasting, wait_until
from testjobs.account import COMMITTED, Account, check_ledger
from testjobs.job import Job
from testjobs.release import Release

NOTICE_SECONDS = 30.0  # of a preemption


def test_node_drained(job: Callable[..., Job], account: Account, release: Release, third_node: str) -> None:
    """With all that runs there, the operator among it."""
    training = start_beside_operator(job, release)
    training.wait_for_commit(COMMITTED)
    node = release.operator_node()
    try:
        release.cluster.kubectl(
            "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=120s",
            timeout_seconds=150,
        )  # fmt: skip
        # Of a pod that is gone before the next operator looks nobody knows more than that it is.
        status = account.check_end(training)
        check_ledger(status, "PodEvicted", "PodDeleted", counted=False)
        assert node not in {training.node_of(index, attempt=2) for index in (0, 1)}
    finally:
        release.cluster.kubectl("uncordon", node)


def test_node_lost(job: Callable[..., Job], account: Account, release: Release, third_node: str) -> None:
    training = job(failurePolicy={"podDeletionGraceSeconds": 5})
    training.wait_for_commit(COMMITTED)
    name = next(node for node in map(training.node_of, (1, 0)) if node != release.operator_node())
    with lost(release, name):
        status = account.check_end(training)
        check_ledger(status, "NodeLost", counted=False)
        assert status["recoveries"][0]["node"] == name


def test_node_lost_whose_steps_are_mirrored(
    job: Callable[..., Job], account: Account, release: Release, third_node: str
) -> None:
    # Seldom enough that no step is in the storage already and not yet in a neighbour's memory when the node goes.
    training = job(
        "--save-every", str(COMMITTED), "--pace", "0.2", failurePolicy={"podDeletionGraceSeconds": 5},
        checkpoint={"memory": {"mirrors": 1}},
    )  # fmt: skip
    training.wait_for_commit(COMMITTED)
    name = next(node for node in map(training.node_of, (1, 0)) if node != release.operator_node())
    training.wait_for_mirrors(COMMITTED)
    with lost(release, name):
        status = account.check_end(training)
        check_ledger(status, "NodeLost", counted=False, tier="Memory")
        assert status["recoveries"][0]["node"] == name


def test_node_of_the_operator_lost(
    job: Callable[..., Job], account: Account, release: Release, third_node: str
) -> None:
    training = start_beside_operator(job, release, failurePolicy={"podDeletionGraceSeconds": 5})
    training.wait_for_commit(COMMITTED)
    name = release.operator_node()
    with lost(release, name):
        status = account.check_end(training)
        check_ledger(status, "NodeLost", counted=False)
        assert status["recoveries"][0]["node"] == name
        assert release.operator_node() != name


def start_beside_operator(job: Callable[..., Job], release: Release, **spec: Any) -> Job:
    """A gang of which one pod is on the operator's node, and none on one other node."""
    spare = next(name for name in sorted(release.cluster.nodes) if name != release.operator_node())
    release.cluster.kubectl("cordon", spare)
    try:
        training = job(**spec)
        training.wait("it has pods on nodes", lambda status: "podsReadyTime" in status.get("current", {}))
    finally:
        release.cluster.kubectl("uncordon", spare)
    assert release.operator_node() in map(training.node_of, (0, 1))
    return training


@contextmanager
def lost(release: Release, name: str) -> Iterator[None]:
    """Its plug is pulled; in the end it is started again."""
    node = release.cluster.nodes[name]
    node.kill()
    try:
        yield
    finally:
        node.start()
        wait_until(f"{name} is back", node.is_ready, seconds=120)
        release.wait_until_ready()


def test_eviction_notice_that_no_pod_gets_a_signal_of(
    job: Callable[..., Job], account: Account, release: Release, third_node: str, metadata_service: MetadataService
) -> None:
    """Of the half minute that Azure gives; then the node is gone."""
    # At a pace at which it is not at its end before it is asked to leave, however long that takes.
    training = job("--save-every", "1000", "--pace", "0.15", failurePolicy={"maxRestarts": 0})
    training.wait("it trains", lambda status: "firstStepTime" in status.get("current", {}))
    name = next(node for node in map(training.node_of, (1, 0)) if node != release.operator_node())
    event = metadata_service.announce("Preempt", name, seconds=NOTICE_SECONDS)
    try:
        with lasting(NOTICE_SECONDS):
            training.wait("it has left", lambda status: status["attempt"] == 2, seconds=NOTICE_SECONDS)
        with lost(release, name):
            status = account.check_end(training, committed=0)
            check_ledger(status, "EvictionNotice", counted=False)
            assert (status["recoveries"][0]["node"], status["recoveries"][0]["stepsLost"]) == (name, 0)
            assert name not in {training.node_of(index, attempt=2) for index in (0, 1)}
    finally:
        metadata_service.withdraw(event)
    assert any(line.startswith("EvictionNotice: ") for line in training.story())


def test_node_that_falls_ill(job: Callable[..., Job], account: Account, release: Release, third_node: str) -> None:
    rule = {"name": "gpu", "action": "RestartJobAndIgnoreMaxRestarts", "onNodeConditions": [{"type": "XIDErrors"}]}
    training = job(failurePolicy={"maxRestarts": 0, "rules": [rule]})
    training.wait_for_commit(COMMITTED)
    name = training.node_of(1)
    with ill(release, name, "XIDErrors"):
        status = account.check_end(training)
        check_ledger(status, "NodeUnhealthy", counted=False)
        assert (status["lastFailure"]["node"], status["lastFailure"]["rule"]) == (name, "gpu")
        assert name not in {training.node_of(index, attempt=2) for index in (0, 1)}


@contextmanager
def ill(release: Release, name: str, condition: str) -> Iterator[None]:
    """The node has that condition, as its monitor would tell."""

    def tell(**fields: str) -> None:
        patch = {"status": {"conditions": [{"type": condition, **fields}]}}
        release.cluster.kubectl("patch", "node", name, "--subresource=status", "-p", json.dumps(patch))

    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    tell(status="True", reason="XID79", message="GPU 3 has fallen off the bus", lastTransitionTime=now)
    try:
        yield
    finally:
        tell(**{"$patch": "delete"})


def test_node_on_which_ranks_die_again_and_again(job: Callable[..., Job], account: Account, third_node: str) -> None:
    training = job("--pace", "0.1")
    training.wait_for_commit(COMMITTED)
    name = training.node_of(1)
    training.signal_rank("KILL")
    training.wait_for_commit(2 * COMMITTED, attempt=2)
    assert training.node_of(1, attempt=2) == name, "its memory holds the rank's steps"
    training.signal_rank("KILL", attempt=2)
    status = account.check_end(training, restarts=2)
    check_ledger(status, "RankFailed", counted=True)
    assert [node["name"] for node in status["excludedNodes"]] == [name]
    assert name not in {training.node_of(index, attempt=3) for index in (0, 1)}
    assert any(line.startswith(f"NodeExcluded: node {name} ") for line in training.story())
