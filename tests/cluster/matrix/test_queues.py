"""A gang is preempted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from testcluster.fixtures import loudly
from testcluster.waiting import wait_until
from testjobs.account import COMMITTED, Account, check_ledger
from testjobs.job import Job, Team
from testqueues.kueue import Kueue


@pytest.fixture
def kueue(team: Team) -> Iterator[Kueue]:
    """Kueue beside the cluster, with a queue that has room for one gang."""
    with loudly():
        found = Kueue(team.cluster.control_plane)
    try:
        found.start()
        found.make_queue(team.namespace, "one-gang", cpu="200m")
        yield found
    finally:
        found.stop()


def queued(priority: str) -> dict[str, Any]:
    """A gang of that priority, which fills the queue."""
    return {
        "podGroupPolicy": {"kueue": {"queueName": "one-gang"}},
        "labels": {"kueue.x-k8s.io/priority-class": priority},
        "trainer": {"resourcesPerNode": {"requests": {"cpu": "100m"}}},
    }


@contextmanager
def beside(team: Team, name: str, *arguments: str, **spec: Any) -> Iterator[Job]:
    """Another job, until it is not needed any more."""
    other = team.submit(name, *arguments, **spec)
    try:
        yield other
    finally:
        team.cluster.kubectl("delete", "trainingjob", name, "-n", team.namespace, "--timeout=120s")


@pytest.mark.timeout(1800)  # Kueue may have to be built first
def test_preempted_and_admitted_again(job: Callable[..., Job], account: Account, team: Team, kueue: Kueue) -> None:
    """Kueue lets the gang in once another is suspended, takes its pods away for a more urgent one, and lets it in
    again.
    """
    with beside(team, "first-come", "--hold-at-step", "1", **queued("low")) as first:
        first.wait("it has the quota", lambda status: "podsReadyTime" in status.get("current", {}))
        training = job(startupDeadlineSeconds=120, **queued("low"))
        training.wait("it waits", lambda status: waits_in_queue(status, attempt=1))
        first.patch({"suspend": True})
        training.wait_for_commit(COMMITTED)
    with beside(team, "urgent", "--steps", "40", **queued("high")) as urgent:
        training.wait("it waits again", lambda status: waits_in_queue(status, attempt=2))
        assert urgent.wait_for_end()["restarts"] == 0
    status = account.check_end(training)
    check_ledger(status, "PodEvicted", counted=False)
    assert "Preempted to accommodate a workload" in status["lastFailure"]["message"]
    assert status["queuedSeconds"] > 0
    told = [line.partition(":")[0] for line in training.story()]
    assert (told.count("Queued"), told.count("Admitted")) == (2, 2), training.story()
    wait_until("the quota is free", lambda: kueue.used(team.namespace, "one-gang") == "0")


def waits_in_queue(status: Mapping[str, Any], *, attempt: int) -> bool:
    """In that attempt, and with Kueue's word for why."""
    reasons = [one for one in status.get("conditions", ()) if one["type"] == "PodsReady" and one["reason"] == "Queued"]
    return status.get("attempt") == attempt and any("one-gang" in one["message"] for one in reasons)
