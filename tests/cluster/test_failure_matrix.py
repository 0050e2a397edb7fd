"""What clusters do to a gang in the middle of training, and that it ends with the same bits as one left alone.

Evidence is the job's own ledger (`status.recoveries`), what its ranks print, and the API server's audit log.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from testcluster.waiting import wait_until
from testjobs.gangs import made_pods, overlapping_gangs
from testjobs.job import SAVE_EVERY, STEPS, Job, Team
from testjobs.release import Release

COMMITTED = 4 * SAVE_EVERY  # before anything happens


@pytest.fixture
def job(request: pytest.FixtureRequest, team: Team) -> Iterator[Callable[..., Job]]:
    """Submits a job that is named after the test, and removes it afterwards; tells the story if the test fails."""
    submitted: list[Job] = []

    def submit(*arguments: str, **options: Any) -> Job:
        name = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_"))[:40].strip("-")
        submitted.append(team.submit(name, *arguments, **options))
        return submitted[-1]

    yield submit
    for one in submitted:
        print("\n".join(one.story()))
        team.cluster.kubectl("delete", "trainingjob", one.name, "-n", team.namespace, "--timeout=120s")


def check_end(job: Job, undisturbed: Mapping[int, str], *, restarts: int = 1) -> dict[str, Any]:
    """It is complete, bit for bit what it would have been, and there never were two gangs. Returns its status."""
    status = job.wait_for_end()
    assert status["restarts"] == restarts, job.story()
    assert status["checkpoint"]["latestPersistedStep"] == STEPS
    assert job.digests() == undisturbed
    events = list(job.cluster.audit())
    uid = job.document()["metadata"]["uid"]
    assert len(made_pods(events, uid)) == len(set(made_pods(events, uid))) == 2 * (restarts + 1)
    assert overlapping_gangs(events, uid) == []
    return status


def check_ledger(status: dict[str, Any], cause: str, *, counted: bool, committed: int = COMMITTED) -> dict[str, Any]:
    """The ledger has every time of the one recovery, in order, and no committed step was lost. Returns it."""
    (recovery,) = status["recoveries"]
    assert (recovery["cause"], recovery["counted"]) == (cause, counted)
    names = (
        "failureTime",
        "detectedTime",
        "flushedTime",
        "launchedTime",
        "podsReadyTime",
        "restoredTime",
        "resumedTime",
    )
    times = [recovery[name] for name in names]
    assert times == sorted(times)
    assert recovery["resumedFromStep"] >= committed
    assert recovery["stepsLost"] == max(0, recovery["stepBefore"] - recovery["resumedFromStep"])
    assert status["restartsCountTowardsMax"] == int(counted)
    return dict(recovery)


def test_rank_killed(job: Callable[..., Job], undisturbed: Mapping[int, str]) -> None:
    training = job()
    training.wait_for_commit(COMMITTED)
    training.signal_rank("KILL")
    status = check_end(training, undisturbed)
    check_ledger(status, "RankFailed", counted=True)
    failure = status["lastFailure"]
    assert (failure["rank"], failure["exitCode"]) == (1, 137)
    assert failure["pod"] == f"{training.name}-1-1"


def test_pod_deleted(job: Callable[..., Job], undisturbed: Mapping[int, str]) -> None:
    training = job()
    training.wait_for_commit(COMMITTED)
    training.delete_pod()
    check_ledger(check_end(training, undisturbed), "PodDeleted", counted=False)


def test_pod_evicted(job: Callable[..., Job], undisturbed: Mapping[int, str]) -> None:
    training = job()
    training.wait_for_commit(COMMITTED)
    training.evict_pod()
    check_ledger(check_end(training, undisturbed), "PodEvicted", counted=False)


def test_rank_out_of_memory(job: Callable[..., Job], undisturbed: Mapping[int, str]) -> None:
    limits = {"limits": {"memory": "1500Mi"}, "requests": {"memory": "300Mi"}}
    training = job("--eat-at-step", str(COMMITTED + 5), trainer={"resourcesPerNode": limits})
    status = check_end(training, undisturbed)
    check_ledger(status, "OOMKilled", counted=True)


def test_node_drained(job: Callable[..., Job], undisturbed: Mapping[int, str], team: Team, third_node: str) -> None:
    training = job()
    training.wait_for_commit(COMMITTED)
    node = training.node_of(1)
    try:
        team.cluster.kubectl(
            "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=120s",
            f"--pod-selector=stepfast.dev/job={training.name}", timeout_seconds=150,
        )  # fmt: skip
        check_ledger(check_end(training, undisturbed), "PodEvicted", counted=False)
        assert node not in {training.node_of(index, attempt=2) for index in (0, 1)}
    finally:
        team.cluster.kubectl("uncordon", node)


def test_node_lost(
    job: Callable[..., Job], undisturbed: Mapping[int, str], team: Team, release: Release, third_node: str
) -> None:
    training = job(failurePolicy={"podDeletionGraceSeconds": 5})
    training.wait_for_commit(COMMITTED)
    operator = release.operator_pod()["spec"]["nodeName"]
    index = next(index for index in (1, 0) if training.node_of(index) != operator)
    name = training.node_of(index)
    node = team.cluster.nodes[name]
    node.kill()
    try:
        status = check_end(training, undisturbed)
        check_ledger(status, "NodeLost", counted=False)
        assert status["recoveries"][0]["node"] == name
    finally:
        node.start()
        wait_until(f"{name} is back", node.is_ready, seconds=120)
        release.wait_until_ready()


def test_agent_killed(job: Callable[..., Job], undisturbed: Mapping[int, str], release: Release) -> None:
    training = job()
    training.wait_for_commit(COMMITTED)
    release.kill_container(release.agent_pod(training.node_of(1)))
    status = check_end(training, undisturbed, restarts=0)
    assert status.get("recoveries", []) == []


def test_storage_down_for_a_minute(
    job: Callable[..., Job], undisturbed: Mapping[int, str], cluster_azurite: Any
) -> None:
    training = job("--pace", "0.2")
    training.wait_for_commit(COMMITTED)
    with cluster_azurite.unanswering():
        seconds = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        before = training.status()["trainerStatus"]["globalStep"]
        training.wait("training goes on", lambda status: status["trainerStatus"]["globalStep"] > before + 20)
        seconds.wait()
    check_end(training, undisturbed, restarts=0)


def test_hang(job: Callable[..., Job], undisturbed: Mapping[int, str]) -> None:
    policy = {"progressDeadlineSeconds": 10}
    training = job("--hang-at-step", str(COMMITTED + 5), progressPolicy=policy, startupDeadlineSeconds=240)
    status = check_end(training, undisturbed)
    check_ledger(status, "HangDetected", counted=True)
    assert any(line.startswith("HangDetected") for line in training.story())


def test_suspended_and_resumed(job: Callable[..., Job], undisturbed: Mapping[int, str]) -> None:
    training = job("--save-every", "1000")
    training.wait("it trains", lambda status: status.get("trainerStatus", {}).get("globalStep", 0) > 20)
    training.patch({"suspend": True})
    status = training.wait("it is suspended", lambda status: status["state"] == "Suspended")
    saved = status["checkpoint"]["latestPersistedStep"]
    assert saved == status["trainerStatus"]["globalStep"] > 20, "the last step was saved before the gang was ended"
    training.wait("no pod lives", lambda _: not training.pods(1))
    training.patch({"suspend": False})
    status = training.wait_for_end()
    assert (status["restarts"], status["stepsLost"], status["attempt"]) == (0, 0, 2)
    assert training.digests() == undisturbed
    assert overlapping_gangs(training.cluster.audit(), training.document()["metadata"]["uid"]) == []


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A moment of a recovery at which the operator is killed: when the job's status is so."""

    name: str
    is_here: Callable[[dict[str, Any]], object]


def newest_recovery(status: dict[str, Any]) -> dict[str, Any]:
    return dict((status.get("recoveries") or [{}])[-1])


PHASES = [
    Phase(name="failure", is_here=lambda status: status["attempt"] == 1),
    Phase(name="ended", is_here=lambda status: "endedTime" in status["current"] or status["attempt"] == 2),
    Phase(name="planned", is_here=lambda status: status["attempt"] == 2),
    Phase(name="pods", is_here=lambda status: "launchedTime" in newest_recovery(status)),
    Phase(name="restored", is_here=lambda status: "restoredTime" in newest_recovery(status)),
]


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_operator_killed(
    job: Callable[..., Job], undisturbed: Mapping[int, str], release: Release, phase: Phase
) -> None:
    training = job()
    training.wait_for_commit(COMMITTED)
    operator = release.operator_pod()
    training.signal_rank("KILL")
    training.wait(f"the recovery is at: {phase.name}", phase.is_here)
    release.kill_container(operator)
    check_ledger(check_end(training, undisturbed), "RankFailed", counted=True)
