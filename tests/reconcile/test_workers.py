"""How pods stand, from the API server's JSON to the workers of a decision: every way to end, and not to begin."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from stepfast.nodestatus import (
    EvictionNotice,
    JobStatus,
    NodeStatus,
    RankStatus,
    SaveStatus,
    by_another_clock,
    format_time,
    to_document,
)
from stepfast.step import JobKey
from stepfast_operator import labels
from stepfast_operator.document import JSON
from stepfast_operator.observed import Failure, Worker, WorkerPhase
from stepfast_operator.podview import NodeReport, NodeView, PodView, agent_of, node_of, pod_of, report_of
from stepfast_operator.record import Cause
from stepfast_operator.workers import previous_nodes, workers_of

NOW = 1_767_225_600.0  # 2026-01-01T00:00:00Z
FAILED, RUNNING, PENDING, SUCCEEDED = (
    WorkerPhase.FAILED,
    WorkerPhase.RUNNING,
    WorkerPhase.PENDING,
    WorkerPhase.SUCCEEDED,
)
READY = NodeView(name="node-a", not_ready_time=None)
OWNER = {"apiVersion": "stepfast.dev/v1alpha1", "kind": "TrainingJob", "name": "gpt", "uid": "uid", "controller": True}


def pod_json(*, metadata: Mapping[str, Any] | None = None, node: str | None = "node-a", **status: Any) -> JSON:
    """A pod of a gang as the API server tells of it."""
    marks = {
        labels.JOB: "gpt", labels.JOB_UID: "uid", labels.ATTEMPT: "2", labels.NODE_INDEX: "0",
        labels.MANAGED_BY: labels.OPERATOR,
    }  # fmt: skip
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "gpt-2-0", "namespace": "ml", "uid": "p-0", "resourceVersion": "10",
            "creationTimestamp": "2025-12-31T23:00:00Z", "labels": marks, "annotations": {labels.RUN: "uid-2"},
            "ownerReferences": [OWNER], **(metadata or {}),
        },
        "spec": {"containers": [{"name": "node"}], **({} if node is None else {"nodeName": node})},
        "status": status,
    }  # fmt: skip


def container(name: str = "node", **state: Any) -> JSON:
    return {"name": name, "state": state, "ready": "running" in state, "restartCount": 0}


def ended(exit_code: int, reason: str = "Error", message: str = "", name: str = "node") -> JSON:
    terminated = {"exitCode": exit_code, "reason": reason, "finishedAt": "2025-12-31T23:59:50Z", "message": message}
    return container(name, terminated=terminated)


def condition(kind: str, status: str = "True", reason: str = "", message: str = "") -> JSON:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def view(document: JSON) -> PodView:
    pod = pod_of(document)
    assert pod is not None
    return pod


def worker_of(document: JSON, node: NodeView | None = READY, *, is_stopping: bool = False) -> Worker:
    return workers_of(
        [view(document)], 1, lambda _: node, is_gone=lambda _: node is None, now=NOW, is_stopping=is_stopping
    )[0]


def failure_of(document: JSON, node: NodeView | None = READY) -> Failure:
    failure = worker_of(document, node).failure
    assert failure is not None
    return failure


def launcher(**said: Any) -> str:
    return json.dumps({"rank": 3, "localRank": 1, "exitCode": 139, "message": "killed by SIGSEGV", **said})


UNSCHEDULABLE = pod_json(
    node=None,
    phase="Pending",
    conditions=[condition("PodScheduled", "False", "Unschedulable", "0/3 nodes are available: 3 Insufficient gpu.")],
)
PULLING = pod_json(
    phase="Pending",
    conditions=[condition("PodScheduled")],
    containerStatuses=[container(waiting={"reason": "ImagePullBackOff", "message": "no such image"})],
)
PREPARING = pod_json(
    phase="Pending",
    initContainerStatuses=[container("data", waiting={"reason": "ErrImagePull", "message": "no such image"})],
    containerStatuses=[container(waiting={"reason": "PodInitializing"})],
)
ALIVE = pod_json(phase="Running", containerStatuses=[container(running={"startedAt": "2025-12-31T23:00:05Z"})])
GONE_WELL = pod_json(phase="Succeeded", containerStatuses=[ended(0, "Completed", '{"exitCode": 0}')])
DELETED = pod_json(
    metadata={"deletionTimestamp": "2025-12-31T23:59:40Z", "deletionGracePeriodSeconds": 30},
    phase="Running",
    containerStatuses=[container(running={})],
)


@pytest.mark.parametrize(
    ("pod", "phase", "message"),
    [
        pytest.param(
            UNSCHEDULABLE,
            PENDING,
            "gpt-2-0: Unschedulable: 0/3 nodes are available: 3 Insufficient gpu.",
            id="unschedulable",
        ),
        pytest.param(PULLING, PENDING, "gpt-2-0: ImagePullBackOff: no such image", id="image pull"),
        pytest.param(PREPARING, PENDING, "gpt-2-0: container data: ErrImagePull: no such image", id="init container"),
        pytest.param(pod_json(phase="Pending"), PENDING, "gpt-2-0", id="nothing known yet"),
        pytest.param(pod_json(), PENDING, "gpt-2-0", id="without a status"),
        pytest.param(ALIVE, RUNNING, "", id="running"),
        pytest.param(pod_json(phase="Unknown"), RUNNING, "", id="unknown counts as running"),
        pytest.param(GONE_WELL, SUCCEEDED, "", id="succeeded"),
        pytest.param(
            pod_json(phase="Running", containerStatuses=[ended(0, "Completed"), container("logs", running={})]),
            RUNNING,
            "",
            id="trainer done, another container runs",
        ),
    ],
)
def test_pod_that_has_not_failed(pod: JSON, phase: WorkerPhase, message: str) -> None:
    worker = worker_of(pod)
    assert (worker.phase, worker.message, worker.failure) == (phase, message, None)
    assert (worker.index, worker.pod) == (0, "gpt-2-0")


@pytest.mark.parametrize(
    ("pod", "cause", "exit_code", "rank", "message"),
    [
        pytest.param(
            pod_json(phase="Failed", containerStatuses=[ended(139, message=launcher())]),
            Cause.RANK_FAILED, 139, 3, "killed by SIGSEGV", id="launcher's report",
        ),
        pytest.param(
            pod_json(phase="Running", containerStatuses=[ended(1, message=launcher(exitCode=1, message="no"))]),
            Cause.RANK_FAILED, 1, 3, "no", id="before the pod's phase says so",
        ),
        pytest.param(
            pod_json(phase="Failed", containerStatuses=[ended(1, message='{"exitCode": 1, "message": "no peer"}')]),
            Cause.WORKER_FAILED, 1, None, "no peer", id="launcher without a rank",
        ),
        pytest.param(
            pod_json(phase="Failed", containerStatuses=[ended(2, message="Traceback\nValueError: x\n")]),
            Cause.WORKER_FAILED, 2, None, "Traceback\nValueError: x", id="plain exit code with the log's end",
        ),
        pytest.param(
            pod_json(phase="Failed", containerStatuses=[ended(2, message='{"loss": 3.5, "exitCode": "x"}')]),
            Cause.WORKER_FAILED, 2, None, '{"loss": 3.5, "exitCode": "x"}', id="a log whose end is JSON",
        ),
        pytest.param(
            pod_json(phase="Failed", containerStatuses=[ended(3)]),
            Cause.WORKER_FAILED, 3, None, "its launcher ended with exit code 3", id="exit code alone",
        ),
        pytest.param(
            pod_json(phase="Failed", containerStatuses=[ended(137, "OOMKilled")]),
            Cause.OOM_KILLED, 137, None, "its launcher ended with exit code 137", id="OOMKilled",
        ),
        pytest.param(
            pod_json(phase="Failed", containerStatuses=[ended(137, "OOMKilled", launcher(exitCode=137))]),
            Cause.OOM_KILLED, 137, 3, "killed by SIGSEGV", id="OOMKilled with a report",
        ),
        pytest.param(
            pod_json(phase="Failed", containerStatuses=[ended(255, "Unknown", "step 20\n")]),
            Cause.NODE_LOST, None, None, "node node-a was restarted: nobody saw how its containers ended",
            id="the node was restarted before it counted as lost",
        ),
        pytest.param(
            pod_json(phase="Failed", containerStatuses=[ended(137, "ContainerStatusUnknown")]),
            Cause.NODE_LOST, None, None, "node node-a was restarted: nobody saw how its containers ended",
            id="its runtime knows of no container any more",
        ),
        pytest.param(
            pod_json(phase="Failed", containerStatuses=[ended(255, "Unknown", launcher())]),
            Cause.RANK_FAILED, 139, 3, "killed by SIGSEGV", id="a rank had failed before the node was restarted",
        ),
        pytest.param(
            pod_json(phase="Failed", reason="UnexpectedAdmissionError", message="no device left"),
            Cause.WORKER_FAILED, None, None, "UnexpectedAdmissionError: no device left", id="refused by the kubelet",
        ),
        pytest.param(
            pod_json(phase="Failed", containerStatuses=[ended(0, "Completed"), ended(4, name="logs")]),
            Cause.WORKER_FAILED, None, None, "container logs ended with exit code 4 (Error)", id="another container",
        ),
        pytest.param(
            pod_json(
                phase="Failed", initContainerStatuses=[ended(5, name="data", message="no disk\n")],
                containerStatuses=[container(waiting={"reason": "PodInitializing"})],
            ),
            Cause.WORKER_FAILED, None, None, "container data ended with exit code 5 (Error): no disk",
            id="init container",
        ),
    ],
)  # fmt: skip
def test_pod_that_failed(pod: JSON, cause: Cause, exit_code: int | None, rank: int | None, message: str) -> None:
    failure = failure_of(pod)
    assert (failure.cause, failure.exit_code, failure.rank) == (cause, exit_code, rank)
    assert failure.message == message
    assert (failure.node, failure.pod) == ("node-a", "gpt-2-0")


@pytest.mark.parametrize(
    ("pod", "reason", "message"),
    [
        pytest.param(
            pod_json(phase="Failed", reason="Evicted", message="The node was low on memory", containerStatuses=[]),
            "Evicted", "The node was low on memory", id="kubelet's eviction",
        ),
        pytest.param(
            pod_json(
                phase="Failed", conditions=[condition("DisruptionTarget", "True", "PreemptionByScheduler", "for x")],
                containerStatuses=[ended(143)],
            ),
            "PreemptionByScheduler", "for x", id="preempted",
        ),
        pytest.param(
            pod_json(phase="Failed", reason="Terminated", message="node shutdown", containerStatuses=[ended(143)]),
            "Terminated", "node shutdown", id="node shutdown",
        ),
        pytest.param(
            pod_json(
                metadata={"deletionTimestamp": "2026-01-01T00:00:20Z", "deletionGracePeriodSeconds": 30},
                phase="Running", conditions=[condition("DisruptionTarget", "True", "EvictionByEvictionAPI", "drained")],
                containerStatuses=[container(running={})],
            ),
            "EvictionByEvictionAPI", "drained", id="drained, still ending",
        ),
    ],
)  # fmt: skip
def test_pod_that_was_taken_away(pod: JSON, reason: str, message: str) -> None:
    failure = failure_of(pod)
    assert (failure.cause, failure.reason, failure.message) == (Cause.POD_EVICTED, reason, message)
    assert abs(failure.time - NOW) <= 10


def test_disruption_that_has_not_deleted_the_pod_yet_is_dated_now_and_not_when_the_pod_was_made() -> None:
    pod = pod_json(phase="Running", conditions=[condition("DisruptionTarget", "True", "DeletionByTaintManager")])
    failure = failure_of(pod)
    assert (failure.cause, failure.time) == (Cause.POD_EVICTED, NOW)


def test_disrupted_pod_that_has_ended_is_dated_when_it_was_asked_to_and_not_when_its_grace_let_it() -> None:
    """Its peers fail before it has ended."""
    pod = pod_json(
        phase="Failed",
        metadata={"deletionTimestamp": "2025-12-31T23:59:40Z", "deletionGracePeriodSeconds": 30},
        conditions=[condition("DisruptionTarget", "True", "EvictionByEvictionAPI")],
        containerStatuses=[ended(143)],
    )
    failure = failure_of(pod)
    assert (failure.cause, failure.time) == (Cause.POD_EVICTED, NOW - 50)


def test_condition_that_does_not_hold_is_no_disruption() -> None:
    pod = pod_json(phase="Running", conditions=[condition("DisruptionTarget", "False")])
    assert worker_of(pod).failure is None


def test_deleted_pod_has_failed_when_somebody_asked_for_its_end() -> None:
    failure = failure_of(DELETED)
    assert (failure.cause, failure.time) == (Cause.POD_DELETED, NOW - 50)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (None, "node node-a is gone"),
        (
            NodeView(name="node-a", not_ready_time=NOW - 7, ready_message="NodeStatusUnknown: no word"),
            "node node-a is not ready (NodeStatusUnknown: no word)",
        ),
    ],
    ids=["gone", "NotReady"],
)
@pytest.mark.parametrize("pod", [ALIVE, DELETED, PULLING], ids=["running", "deleted", "pending"])
def test_pod_of_a_lost_node_is_lost(pod: JSON, node: NodeView | None, message: str) -> None:
    failure = failure_of(pod, node)
    assert (failure.cause, failure.message) == (Cause.NODE_LOST, message)


def test_pod_whose_node_nobody_has_told_of_yet_is_not_lost() -> None:
    (worker,) = workers_of([view(ALIVE)], 1, lambda _: None, is_gone=lambda _: False, now=NOW, is_stopping=False)
    assert (worker.phase, worker.failure) == (RUNNING, None)


def test_pod_that_was_placed_on_a_node_after_that_was_called_silent_is_not_lost_with_it() -> None:
    """After an outage of the API server a node may be called silent that is not: gang after gang would be lost."""
    silent = NodeView(name="node-a", not_ready_time=NOW - 3601, ready_message="NodeStatusUnknown: no word")
    [worker] = workers_of(
        [view(pod_json(phase="Running", containerStatuses=[container(running={})]))], 1, lambda name: silent,
        is_gone=lambda _: False, now=NOW,
        is_stopping=False,
    )  # fmt: skip
    assert (worker.phase, worker.failure) == (RUNNING, None)


@pytest.mark.parametrize("pod", [GONE_WELL, pod_json(phase="Succeeded")], ids=["with its status", "without"])
def test_pod_that_succeeded_is_not_lost_with_its_node(pod: JSON) -> None:
    assert worker_of(pod, None).failure is None


def test_failure_before_the_node_was_lost_is_the_failure() -> None:
    pod = pod_json(phase="Failed", containerStatuses=[ended(9)])
    assert failure_of(pod, None).exit_code == 9


def test_missing_pods_were_deleted() -> None:
    other = pod_json(phase="Running", containerStatuses=[container(running={})])
    first, missing = workers_of([view(other)], 2, lambda _: READY, is_gone=lambda _: False, now=NOW, is_stopping=False)
    assert (first.phase, first.failure) == (RUNNING, None)
    assert missing.phase is FAILED
    assert missing.failure is not None
    assert (missing.failure.cause, missing.failure.time) == (Cause.POD_DELETED, NOW)


@pytest.mark.parametrize("pod", [ALIVE, DELETED], ids=["running", "asked to end"])
@pytest.mark.parametrize("node", [READY, None], ids=["node ready", "node gone"])
def test_gang_that_was_asked_to_end_does_not_fail_by_ending(pod: JSON, node: NodeView | None) -> None:
    assert worker_of(pod, node, is_stopping=True).failure is None
    missing = workers_of([], 1, lambda _: node, is_gone=lambda _: node is None, now=NOW, is_stopping=True)[0]
    assert (missing.phase, missing.failure) == (FAILED, None)


WAITS = container(waiting={"reason": "ContainerCreating"})
BESIDE = container("logs", running={"startedAt": "2025-12-31T23:00:01Z"})


@pytest.mark.parametrize(
    ("pod", "since"),
    [
        pytest.param(ALIVE, NOW - 3595, id="running"),
        pytest.param(pod_json(phase="Running", containerStatuses=[BESIDE, WAITS]), None, id="only one beside it runs"),
        pytest.param(PULLING, None, id="image pull"),
        pytest.param(GONE_WELL, None, id="succeeded"),
    ],
)
def test_worker_runs_since_the_trainers_own_container_does(pod: JSON, since: float | None) -> None:
    assert worker_of(pod).running_since == since


def test_rank_that_fails_while_the_gang_ends_is_told() -> None:
    pod = pod_json(phase="Failed", containerStatuses=[ended(139, message=launcher())])
    failure = worker_of(pod, is_stopping=True).failure
    assert failure is not None
    assert failure.exit_code == 139


def test_failure_carries_what_rules_look_at() -> None:
    conditions = [condition("Ready", "False"), condition("PodScheduled")]
    failure = failure_of(pod_json(phase="Failed", conditions=conditions, containerStatuses=[ended(1)]))
    assert failure.pod_conditions == (("Ready", "False"), ("PodScheduled", "True"))
    assert failure.reason == "Error"


@pytest.mark.parametrize("time", ["yesterday", float("nan"), 1e300, -5, True, None, NOW + 86_400, []])
def test_time_that_the_pod_cannot_know_is_not_believed(time: object) -> None:
    """The termination log is a tenant's file: whatever is in it, a decision gets a time that a status can hold."""
    failure = failure_of(pod_json(phase="Failed", containerStatuses=[ended(1, message=launcher(time=time))]))
    assert failure.time == NOW - 10


def test_time_of_the_launcher_is_finer_than_the_kubelets() -> None:
    message = launcher(time=NOW - 10.75)
    assert failure_of(pod_json(phase="Failed", containerStatuses=[ended(1, message=message)])).time == NOW - 10.75


@pytest.mark.parametrize(
    "message", ["[]", "3", "null", '{"rank": "a"}', '{"rank": 1, "exitCode": 10000000000000000000000}', "{", "\x00"]
)
def test_any_termination_message_makes_a_failure(message: str) -> None:
    assert failure_of(pod_json(phase="Failed", containerStatuses=[ended(1, message=message)])).exit_code is not None


def test_long_messages_are_cut() -> None:
    failure = failure_of(pod_json(phase="Failed", containerStatuses=[ended(1, message=launcher(message="x" * 9000))]))
    assert len(failure.message) <= 1000


@pytest.mark.parametrize(
    "change",
    [
        {"labels": {}},
        {"labels": None, "annotations": None},
        {"annotations": {}},
        {"labels": {labels.JOB: "gpt", labels.JOB_UID: "uid", labels.ATTEMPT: "two", labels.NODE_INDEX: "0"}},
        {"ownerReferences": None},
        {"ownerReferences": [{**OWNER, "uid": "another"}]},
        {"ownerReferences": [{**OWNER, "kind": "Job", "apiVersion": "batch/v1"}]},
        {"ownerReferences": [{**OWNER, "apiVersion": "kubeflow.org/v1"}]},
        {"ownerReferences": [{**OWNER, "controller": False}]},
        {"ownerReferences": [{key: value for key, value in OWNER.items() if key != "controller"}]},
    ],
    ids=[
        "no labels",
        "nothing",
        "no run",
        "attempt is no number",
        "no owner",
        "of another job",
        "of another kind",
        "of another group",
        "not controlled",
        "control is not said",
    ],
)
def test_pod_that_is_no_gangs_is_none(change: Mapping[str, Any]) -> None:
    assert pod_of(pod_json(metadata=change)) is None


def test_pod_with_a_second_owner_is_its_jobs() -> None:
    other = {"apiVersion": "v1", "kind": "ConfigMap", "name": "c", "uid": "c"}
    assert view(pod_json(metadata={"ownerReferences": [other, OWNER]})).job_uid == "uid"


def test_pod_is_read_whole() -> None:
    pod = view(DELETED)
    assert (pod.key, pod.job, pod.job_uid, pod.run, pod.attempt, pod.index) == (
        ("ml", "gpt-2-0"), "gpt", "uid", "uid-2", 2, 0
    )  # fmt: skip
    assert (pod.created_time, pod.deleted_time, pod.is_alive) == (NOW - 3600, NOW - 50, True)
    assert not view(GONE_WELL).is_alive
    assert not view(pod_json(phase="Failed")).is_alive


@pytest.mark.parametrize(
    ("conditions", "since", "message"),
    [
        ([condition("Ready")], None, ""),
        (
            [{**condition("Ready", "Unknown", "NodeStatusUnknown", "m"), "lastTransitionTime": "2026-01-01T00:00:00Z"}],
            NOW,
            "NodeStatusUnknown: m",
        ),
        ([{**condition("Ready", "False"), "lastTransitionTime": "2026-01-01T00:00:00Z"}], NOW, ""),
        ([condition("DiskPressure", "False")], 0.0, "NotReady"),
        (None, 0.0, "NotReady"),
    ],
    ids=["ready", "unknown", "not ready", "never said", "new"],
)
def test_node(conditions: Any, since: float | None, message: str) -> None:
    node = node_of({"metadata": {"name": "node-a"}, "status": {"conditions": conditions}})
    assert (node.not_ready_time, node.ready_message) == (since, message)


@pytest.mark.parametrize(
    ("status", "generation"),
    [({}, 0), (None, 0), ({"observedGeneration": 3, "jobs": [{"name": "x"}]}, 3), ({"jobs": "none"}, 0)],
    ids=["empty", "none", "half a job", "no list"],
)
def test_report_that_makes_no_sense_reports_nothing(status: Any, generation: int) -> None:
    report = report_of({"metadata": {"name": "node-a", "uid": "u", "generation": 4}, "status": status})
    assert (report.node, report.generation, report.observed_generation, report.jobs) == ("node-a", 4, generation, ())


def test_report_is_read_with_its_requests() -> None:
    request = {"namespace": "ml", "name": "gpt", "run": "uid-2", "action": "Flush"}
    job = {
        "namespace": "ml", "name": "gpt", "run": "uid-2", "worldSize": 1, "pendingBytes": 0, "pendingSteps": [5],
        "ranks": [], "saves": {},
    }  # fmt: skip
    memory = {"limitBytes": 10, "usedBytes": 1}
    status = {"observedGeneration": 2, "memory": memory, "jobs": [job], "conditions": []}
    document = {
        "metadata": {"name": "n", "uid": "u", "generation": 2},
        "spec": {"requests": [request]},
        "status": status,
    }
    report = report_of(document)
    assert report.requests == (request,)
    assert [(one.job, one.run, tuple(one.pending_steps)) for one in report.jobs] == [
        (JobKey(namespace="ml", name="gpt"), "uid-2", (5,))
    ]


def report_written_by(clock_ahead_seconds: float, *, taken: str = "2026-01-01T00:00:00Z") -> NodeReport:
    """Of a rank that died at NOW - 5, on a node whose clock is so far ahead, taken by the API server at NOW."""
    dead = RankStatus(
        rank=0, pid=1, alive=False, clean=False, joined_time=NOW - 60, global_step=7, step_time=NOW - 6,
        waited_time=NOW - 30, ended_time=NOW - 5, restored_time=NOW - 50,
    )  # fmt: skip
    job = JobStatus(
        job=JobKey(namespace="ml", name="gpt"), run="uid-2", world_size=1, ranks=(dead,), saves=SaveStatus(),
        latest_persisted_step=5, latest_persisted_time=NOW - 10,
    )  # fmt: skip
    notice = EvictionNotice(kind="Preempt", event="e", seen_time=NOW - 3, not_before_time=NOW + 30)
    status = NodeStatus(
        node="n", memory_limit_bytes=1, memory_used_bytes=0, jobs=(job,), notice=notice, written_time=NOW - 0.25
    )  # fmt: skip
    document = to_document(by_another_clock(status, -clock_ahead_seconds))
    document["evictionNotice"]["notBefore"] = format_time(NOW + 30)  # the cloud's
    fields = [{"subresource": "status", "time": "2025-12-31T20:00:00Z"}, {"subresource": "status", "time": taken}]
    metadata = {"name": "n", "uid": "u", "generation": 1, "managedFields": [*fields, {"time": "2026-01-01T02:00:00Z"}]}
    return report_of({"metadata": metadata, "status": document})


@pytest.mark.parametrize("ahead", [300.0, -300.0], ids=["ahead", "behind"])
def test_times_of_a_node_whose_clock_is_off_are_told_by_the_api_servers(ahead: float) -> None:
    report = report_written_by(ahead)
    assert report.clock_ahead_seconds == ahead
    assert (report.jobs, report.notice) == (report_written_by(0.0).jobs, report_written_by(0.0).notice)
    assert report.jobs[0].ranks[0].ended_time == NOW - 5


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(report_written_by(9.0), id="a clock that is nearly right"),
        pytest.param(report_written_by(0.0, taken="2026-01-01T00:00:09Z"), id="a request that took long"),
    ],
)
def test_times_stand_as_they_were_told_where_clocks_seem_to_agree(report: NodeReport) -> None:
    assert report.clock_ahead_seconds == 0.0


@pytest.mark.parametrize("ahead", [300.0, -300.0], ids=["ahead", "behind"])
def test_launchers_time_is_told_by_the_api_servers_clock(ahead: float) -> None:
    pod = view(pod_json(phase="Failed", containerStatuses=[ended(139, message=launcher(time=NOW - 12 + ahead))]))
    skewed = replace(pod, clock_ahead_seconds=ahead)
    (worker,) = workers_of([skewed], 1, lambda _: READY, is_gone=lambda _: False, now=NOW, is_stopping=False)
    assert worker.failure is not None
    assert worker.failure.time == NOW - 12


@pytest.mark.parametrize(
    ("conditions", "deleted", "is_ready"),
    [
        ([condition("Ready")], None, True),
        ([condition("Ready", "False")], None, False),
        (None, None, False),
        ([condition("Ready")], "2026-01-01T00:00:00Z", False),
    ],
    ids=["ready", "not ready", "new", "on its way out"],
)
def test_agent(conditions: Any, deleted: str | None, is_ready: bool) -> None:
    metadata = {"name": "stepfast-agent-x", **({"deletionTimestamp": deleted} if deleted else {})}
    agent = agent_of({"metadata": metadata, "spec": {"nodeName": "n"}, "status": {"conditions": conditions}})
    assert (agent.pod, agent.node, agent.is_ready) == ("stepfast-agent-x", "n", is_ready)


def gang_pod(attempt: int, index: int, node: str | None) -> PodView:
    marks = {labels.JOB: "gpt", labels.JOB_UID: "uid", labels.ATTEMPT: str(attempt), labels.NODE_INDEX: str(index)}
    return view(pod_json(metadata={"labels": marks, "name": labels.pod_name("gpt", attempt, index)}, node=node))


def ranks_on(node: str, run: str, *ranks: int) -> tuple[str, JobStatus]:
    """What the agent there says of a gang of two pods with two ranks each."""
    known = [RankStatus(rank=rank, pid=1, alive=False, clean=False, joined_time=1.0) for rank in ranks]
    job = JobKey(namespace="ml", name="gpt")
    return node, JobStatus(job=job, run=run, world_size=4, ranks=known, saves=SaveStatus())


@pytest.mark.parametrize(
    ("pods", "reports", "attempt", "expected"),
    [
        ([], [], 1, {}),
        ([gang_pod(1, 0, "a"), gang_pod(1, 1, "b")], [], 2, {0: "a", 1: "b"}),
        ([gang_pod(1, 0, "a"), gang_pod(2, 0, "b"), gang_pod(2, 1, None)], [], 3, {0: "b"}),
        ([gang_pod(2, 0, "a")], [ranks_on("a", "uid-2", 0, 1)], 2, {}),
        ([], [ranks_on("b", "uid-1", 0, 1), ranks_on("a", "uid-1.2", 3)], 2, {0: "b", 1: "a"}),
        ([gang_pod(2, 0, "c"), gang_pod(2, 1, "d")], [ranks_on("a", "uid-1", 0, 1)], 3, {0: "a", 1: "d"}),
        ([], [ranks_on("a", "uid-1", 0, 1), ranks_on("b", "uid-2", 0, 1)], 3, {0: "b"}),
    ],
    ids=["first attempt", "pods", "newest before, where it ran", "not its own", "ranks", "ranks first", "newest ranks"],
)
def test_pods_come_back_to_where_the_attempt_before_ran(
    pods: list[PodView], reports: list[tuple[str, JobStatus]], attempt: int, expected: dict[int, str]
) -> None:
    assert previous_nodes(pods, reports, attempt, 2) == expected


@pytest.mark.parametrize("lookup", [lambda _: READY, lambda _: None], ids=["ready", "unknown"])
def test_pod_that_runs_nowhere_is_on_no_lost_node(lookup: Callable[[str], NodeView | None]) -> None:
    worker = workers_of([view(UNSCHEDULABLE)], 1, lookup, is_gone=lambda _: False, now=NOW, is_stopping=False)[0]
    assert (worker.failure, worker.node) == (None, "gpt-2-0")


GOING = {"deletionTimestamp": "2026-01-01T00:00:20Z", "deletionGracePeriodSeconds": 30}


def test_pod_that_kueue_took_away_was_evicted_in_its_words() -> None:
    why = condition("TerminationTarget", "True", "WorkloadEvictedByPreemption", "Preempted to accommodate a workload")
    for document in (
        pod_json(metadata=GOING, phase="Running", conditions=[why]),
        pod_json(metadata=GOING, phase="Failed", conditions=[why], containerStatuses=[ended(143)]),
    ):
        failure = failure_of(document)
        assert (failure.cause, failure.message) == (Cause.POD_EVICTED, "Preempted to accommodate a workload")


@pytest.mark.parametrize(("node", "lives"), [(None, False), ("node-a", True)], ids=["without a node", "on a node"])
def test_pod_that_is_deleted_and_kept_by_a_finalizer_lives_where_a_kubelet_has_it(
    node: str | None, lives: bool
) -> None:
    document = pod_json(metadata={**GOING, "finalizers": ["kueue.x-k8s.io/managed"]}, node=node, phase="Pending")
    assert view(document).is_alive is lives
    worker = worker_of(document)
    assert worker.phase is (PENDING if lives else FAILED)
    assert worker.failure is not None
    assert worker.failure.cause is Cause.POD_DELETED
    assert worker_of(document, is_stopping=True).failure is None
