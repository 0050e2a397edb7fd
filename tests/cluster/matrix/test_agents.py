"""The agent of a node ends while a job trains there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from testjobs.account import COMMITTED, Account
from testjobs.job import Job
from testjobs.release import Release


def test_agent_killed(job: Callable[..., Job], account: Account, release: Release) -> None:
    training = job()
    training.wait_for_commit(COMMITTED)
    release.kill_container(release.agent_pod(training.node_of(1)))
    account.check_end(training, restarts=0)


def test_agents_upgraded_while_they_save(
    job: Callable[..., Job], account: Account, release: Release, cluster_azurite: Any
) -> None:
    """By `helm upgrade`, all of them, with a step in memory that the storage does not take until the last is replaced.
    No later step is saved before that one is committed.
    """
    release.upgrade("--set", "sidecar.flushTimeoutSeconds=5")  # how long an agent that ends tries to persist
    release.wait_until_ready()
    training = job("--save-every", "100", "--hold-at-step", "280", "--pace", "0.3")
    training.wait_for_commit(100)
    with cluster_azurite.unanswering():
        training.wait("step 200 waits for the storage", lambda status: status["checkpoint"].get("pendingBytes"))
        replaced = [release.agent_pod(node)["metadata"]["uid"] for node in release.cluster.nodes]
        reached = training.status()["trainerStatus"]["globalStep"]
        release.upgrade()
        release.wait_until_ready()
        assert not {release.agent_pod(node)["metadata"]["uid"] for node in release.cluster.nodes} & {*replaced}
        training.wait("training went on", lambda status: status["trainerStatus"]["globalStep"] > reached)
        assert training.status()["checkpoint"]["latestPersistedStep"] == 100
    training.wait("the new agents commit it", lambda status: status["checkpoint"]["latestPersistedStep"] == 200)
    training.signal_rank("USR1")
    account.check_end(training, restarts=0, committed=200)
    assert {100, 200, 300, 400} <= {*training.commits()[1]}
