"""What clusters do to a gang in the middle of training, and that it ends with the same bits as one left alone.

Evidence is the job's own ledger (`status.recoveries`), what its ranks print, and the API server's audit log.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from testcluster.fixtures import loudly
from testcluster.metadataservice import MetadataService
from testcluster.waiting import wait_until
from testjobs.gangs import made_pods, overlapping_gangs
from testjobs.job import SAVE_EVERY, STEPS, Job, Team
from testjobs.release import Release
from testqueues.kueue import Kueue

COMMITTED = 4 * SAVE_EVERY  # before anything happens

pytestmark = pytest.mark.usefixtures("storage_access")


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


def check_end(
    job: Job, undisturbed: Mapping[int, str], *, restarts: int = 1, committed: int = COMMITTED
) -> dict[str, Any]:
    """It is complete, bit for bit what it would have been, no committed step was lost, and there never were two gangs.
    `committed`: before anything happened. Returns its status.
    """
    status = job.wait_for_end()
    assert status["restarts"] == restarts, job.story()
    assert status["checkpoint"]["latestPersistedStep"] == STEPS
    assert job.digests() == undisturbed
    events = list(job.cluster.audit())
    uid = job.document()["metadata"]["uid"]
    assert len(made_pods(events, uid)) == len(set(made_pods(events, uid))) == 2 * (restarts + 1)
    assert overlapping_gangs(events, uid) == []
    commits = job.commits()
    for recovery in status.get("recoveries", ()):
        newest = max([committed, *commits.get(recovery["attempt"], ())])
        assert recovery["resumedFromStep"] >= newest, "a committed step is never lost"
    return status


def check_ledger(status: dict[str, Any], *causes: str, counted: bool, tier: str = "Persistent") -> None:
    """The ledger has every time of the one recovery, in order, and the tier: the storage unless steps are mirrored,
    since of what is replicated each node's memory holds its half.
    """
    (recovery,) = status["recoveries"]
    assert recovery["cause"] in causes
    assert (recovery["counted"], recovery["restoredTier"]) == (counted, tier)
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
    assert recovery["stepsLost"] == max(0, recovery["stepBefore"] - recovery["resumedFromStep"])
    assert status["restartsCountTowardsMax"] == int(counted)


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


def test_node_drained(
    job: Callable[..., Job], undisturbed: Mapping[int, str], release: Release, third_node: str
) -> None:
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
        status = check_end(training, undisturbed)
        check_ledger(status, "PodEvicted", "PodDeleted", counted=False)
        assert node not in {training.node_of(index, attempt=2) for index in (0, 1)}
    finally:
        release.cluster.kubectl("uncordon", node)


def test_node_lost(job: Callable[..., Job], undisturbed: Mapping[int, str], release: Release, third_node: str) -> None:
    training = job(failurePolicy={"podDeletionGraceSeconds": 5})
    training.wait_for_commit(COMMITTED)
    name = next(node for node in map(training.node_of, (1, 0)) if node != release.operator_node())
    with lost(release, name):
        status = check_end(training, undisturbed)
        check_ledger(status, "NodeLost", counted=False)
        assert status["recoveries"][0]["node"] == name


def test_node_lost_whose_steps_are_mirrored(
    job: Callable[..., Job], undisturbed: Mapping[int, str], release: Release, third_node: str
) -> None:
    training = job(failurePolicy={"podDeletionGraceSeconds": 5}, checkpoint={"memory": {"mirrors": 1}})
    training.wait_for_commit(COMMITTED)
    training.wait_for_mirrors(COMMITTED)
    name = next(node for node in map(training.node_of, (1, 0)) if node != release.operator_node())
    with lost(release, name):
        status = check_end(training, undisturbed)
        check_ledger(status, "NodeLost", counted=False, tier="Memory")
        assert status["recoveries"][0]["node"] == name


def test_node_of_the_operator_lost(
    job: Callable[..., Job], undisturbed: Mapping[int, str], release: Release, third_node: str
) -> None:
    training = start_beside_operator(job, release, failurePolicy={"podDeletionGraceSeconds": 5})
    training.wait_for_commit(COMMITTED)
    name = release.operator_node()
    with lost(release, name):
        status = check_end(training, undisturbed)
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
    job: Callable[..., Job], undisturbed: Mapping[int, str], third_node: str, metadata_service: MetadataService
) -> None:
    training = job("--save-every", "1000", failurePolicy={"maxRestarts": 0})
    training.wait("it trains", lambda status: status.get("trainerStatus", {}).get("globalStep", 0) > COMMITTED)
    name = training.node_of(1)
    event = metadata_service.announce("Preempt", name, seconds=60)
    try:
        status = check_end(training, undisturbed, committed=0)
        check_ledger(status, "EvictionNotice", counted=False)
        assert (status["recoveries"][0]["node"], status["recoveries"][0]["stepsLost"]) == (name, 0)
        assert name not in {training.node_of(index, attempt=2) for index in (0, 1)}
    finally:
        metadata_service.withdraw(event)
    assert any(line.startswith("EvictionNotice: ") for line in training.story())


def test_node_that_falls_ill(
    job: Callable[..., Job], undisturbed: Mapping[int, str], release: Release, third_node: str
) -> None:
    rule = {"name": "gpu", "action": "RestartJobAndIgnoreMaxRestarts", "onNodeConditions": [{"type": "XIDErrors"}]}
    training = job(failurePolicy={"maxRestarts": 0, "rules": [rule]})
    training.wait_for_commit(COMMITTED)
    name = training.node_of(1)
    with ill(release, name, "XIDErrors"):
        status = check_end(training, undisturbed)
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


def test_node_on_which_ranks_die_again_and_again(
    job: Callable[..., Job], undisturbed: Mapping[int, str], third_node: str
) -> None:
    training = job("--pace", "0.1")
    training.wait_for_commit(COMMITTED)
    name = training.node_of(1)
    training.signal_rank("KILL")
    training.wait_for_commit(2 * COMMITTED, attempt=2)
    assert training.node_of(1, attempt=2) == name, "its memory holds the rank's steps"
    training.signal_rank("KILL", attempt=2)
    status = check_end(training, undisturbed, restarts=2)
    assert [node["name"] for node in status["excludedNodes"]] == [name]
    assert name not in {training.node_of(index, attempt=3) for index in (0, 1)}
    assert any(line.startswith(f"NodeExcluded: node {name} ") for line in training.story())


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


def test_operator_away_when_a_rank_is_killed(
    job: Callable[..., Job], undisturbed: Mapping[int, str], release: Release
) -> None:
    training = job()
    training.wait_for_commit(COMMITTED)
    release.kill_container(release.operator_pod())
    training.signal_rank("KILL")
    check_ledger(check_end(training, undisturbed), "RankFailed", counted=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A moment of a recovery at which the operator is killed: while the job's status is so. `hold`: what keeps the
    recovery there meanwhile, where it would be over in less time than a look at it takes.
    """

    name: str
    is_here: Callable[[dict[str, Any]], object]
    hold: Callable[[Job, Any], AbstractContextManager[None]] = lambda job, azurite: nullcontext()


@contextmanager
def without_storage(job: Job, azurite: Any) -> Iterator[None]:
    with azurite.unanswering():
        job.wait("a step waits for the storage", lambda status: status["checkpoint"].get("pendingBytes"))
        yield


@contextmanager
def without_new_pods(job: Job, azurite: Any) -> Iterator[None]:
    job.cluster.kubectl("create", "quota", "none", "--hard=pods=0", "-n", job.namespace)
    try:
        yield
    finally:
        job.cluster.kubectl("delete", "quota", "none", "-n", job.namespace)


def newest_recovery(status: dict[str, Any]) -> dict[str, Any]:
    return dict((status.get("recoveries") or [{}])[-1])


PHASES = [
    Phase(
        name="flushing",
        is_here=lambda status: "endedTime" in status["current"] and "flushedTime" not in status["current"],
        hold=without_storage,
    ),
    Phase(
        name="planned",
        is_here=lambda status: status["attempt"] == 2 and "podsReadyTime" not in status["current"],
        hold=without_new_pods,
    ),
    Phase(
        name="pods made",
        is_here=lambda status: "launchedTime" in newest_recovery(status) and "restoredTime" not in status["current"],
    ),
    Phase(name="restored", is_here=lambda status: "restoredTime" in newest_recovery(status)),
]


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name.replace(" ", "-"))
def test_operator_killed(
    job: Callable[..., Job],
    undisturbed: Mapping[int, str],
    release: Release,
    cluster_azurite: Any,
    phase: Phase,
) -> None:
    training = job()
    training.wait_for_commit(COMMITTED)
    operator = release.operator_pod()
    with phase.hold(training, cluster_azurite):
        training.signal_rank("KILL")
        training.wait(f"the recovery is at: {phase.name}", phase.is_here)
        release.kill_container(operator)
        assert phase.is_here(training.status()), "still, when nobody moved it any more"
    check_ledger(check_end(training, undisturbed), "RankFailed", counted=True)


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


def test_preempted_and_admitted_again(
    job: Callable[..., Job], undisturbed: Mapping[int, str], team: Team, kueue: Kueue
) -> None:
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
    status = check_end(training, undisturbed)
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
