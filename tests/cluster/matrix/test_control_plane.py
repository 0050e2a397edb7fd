"""The API server or etcd is away for a while: training needs neither, and the operator takes up where it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from testcluster.waiting import lasting, wait_until
from testjobs.account import COMMITTED, Account, check_ledger
from testjobs.job import Job
from testjobs.release import Release


def wait_for_stored(job: Job, step: int) -> None:
    """Until the storage itself has that step committed, or a later one."""
    wait_until(
        f"step {step} is committed, by the storage",
        lambda: max(job.commits()[1]) >= step,
        seconds=120,
        every_seconds=1,
    )


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("seconds", "pace"), [(30, 0.2), (300, 1.0)], ids=["30-s", "5-min"])
def test_api_server_stopped(
    job: Callable[..., Job], account: Account, release: Release, seconds: int, pace: float
) -> None:
    operator = release.operator_pod()
    training = job("--pace", str(pace))
    committed = training.wait_for_commit(COMMITTED)["checkpoint"]["latestPersistedStep"]
    with training.cluster.control_plane.without_api_server():
        with lasting(seconds):
            wait_for_stored(training, committed + 30)
        stored = max(training.commits()[1])
        assert release.is_running(operator), "it waits for the API server"
    training.wait("the status catches up", lambda status: status["checkpoint"]["latestPersistedStep"] >= stored)
    account.check_end(training, restarts=0, seconds=900)
    now = release.operator_pod()
    if now["metadata"]["uid"] == operator["metadata"]["uid"]:
        assert restarts_of(now) == restarts_of(operator), "it begins anew by itself, and waits for no kubelet"
    else:  # its kubelet was slow to come back, and the node looked lost
        assert release.was_moved(operator)


def restarts_of(pod: Mapping[str, Any]) -> list[int]:
    return [container["restartCount"] for container in pod["status"]["containerStatuses"]]


def test_api_server_stopped_and_a_rank_killed_meanwhile(job: Callable[..., Job], account: Account) -> None:
    """Nodes look lost, too, until their kubelets reach it again: the gang may be started more than once."""
    training = job()
    training.wait_for_commit(COMMITTED)
    node = training.node_of(1)
    with training.cluster.control_plane.without_api_server(), lasting(30):
        training.signal_rank_on(node, "KILL")
    status = account.check_end(training, restarts=None)
    assert {recovery["cause"] for recovery in status["recoveries"]} <= {"RankFailed", "NodeLost"}


def test_etcd_restarted(job: Callable[..., Job], account: Account) -> None:
    training = job("--pace", "0.1")
    committed = training.wait_for_commit(COMMITTED)["checkpoint"]["latestPersistedStep"]
    with training.cluster.control_plane.without_etcd(), lasting(5):
        wait_for_stored(training, committed + 10)
    account.check_end(training, restarts=0)


def test_etcd_restarted_while_the_gang_is(job: Callable[..., Job], account: Account) -> None:
    training = job()
    training.wait_for_commit(COMMITTED)
    training.signal_rank("KILL")
    training.wait("the gang starts again", lambda status: "launchedTime" in (status.get("recoveries") or [{}])[-1])
    with training.cluster.control_plane.without_etcd(), lasting(5):
        pass
    check_ledger(account.check_end(training), "RankFailed", counted=True)
