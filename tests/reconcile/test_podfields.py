"""What is read of the API's objects is all that is looked at: their views are those of the whole objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import pytest

from stepfast.kube import Fields
from stepfast.nodestatus import EvictionNotice, NodeStatus, to_document
from stepfast_operator import groupmember, labels
from stepfast_operator.document import JSON
from stepfast_operator.podfields import NODE_FIELDS, POD_FIELDS, REPORT_FIELDS
from stepfast_operator.podview import agent_of, node_of, pod_of, report_of

TIME = "2026-01-01T00:00:00Z"
OWNER = {
    "apiVersion": f"{labels.PREFIX}/v1alpha1",
    "kind": "TrainingJob",
    "name": "gpt",
    "uid": "u",
    "controller": True,
}
MARKS = {labels.JOB: "gpt", labels.JOB_UID: "u", labels.ATTEMPT: "2", labels.NODE_INDEX: "1"}


def pod(*, marks: JSON = None, notes: JSON = None, metadata: JSON = None, spec: JSON = None, **status: Any) -> JSON:
    meant = {
        "namespace": "ml", "name": "gpt-2-1", "uid": "p", "resourceVersion": "7", "ownerReferences": [OWNER],
        "labels": {**MARKS, **(marks or {})}, "annotations": {labels.RUN: "u-2", **(notes or {})},
    }  # fmt: skip
    document = {"metadata": {**meant, **(metadata or {})}}
    return {**document, "spec": spec, "status": status or None}


def container(name: str, **state: Any) -> JSON:
    return {"name": name, "state": state}


FAILED = {"exitCode": 7, "reason": "Error", "message": "no", "finishedAt": TIME}
PLACED = {"type": "PodScheduled", "status": "True", "reason": "r", "message": "m", "lastTransitionTime": TIME}
READY = {"type": "Ready", "status": "True"}
GROUPED = {groupmember.GROUP: "g", groupmember.QUEUE: "q"}
PODS = [
    pod(
        spec={"nodeName": "a"},
        phase="Running",
        conditions=[PLACED],
        containerStatuses=[container("node", running={"startedAt": TIME})],
    ),
    pod(phase="Failed", reason="Evicted", message="m", containerStatuses=[container("node", terminated=FAILED)]),
    pod(initContainerStatuses=[container("data", terminated=FAILED)]),
    pod(initContainerStatuses=[container("data", waiting={"reason": "ErrImagePull", "message": "m"})]),
    pod(spec={"schedulingGates": [{"name": groupmember.GATE}]}, marks=GROUPED, notes={groupmember.SIZE: "2"}),
    pod(marks=GROUPED, metadata={"finalizers": ["kueue.x-k8s.io/managed"]}),
    pod(metadata={"creationTimestamp": TIME, "deletionTimestamp": TIME, "deletionGracePeriodSeconds": 5}),
    pod(marks={labels.SPARE: "3"}, notes={labels.AVOIDED_NODES: "a,b"}),
]
NODES = [
    {
        "metadata": {"name": "a", "uid": "n", "resourceVersion": "7", "labels": {"zone": "1"}},
        "spec": {"unschedulable": True, "taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}]},
        "status": {
            "allocatable": {"memory": "1Gi", "nvidia.com/gpu": "8"},
            "conditions": [
                {"type": "Ready", "status": "False", "reason": "r", "message": "m", "lastTransitionTime": TIME},
                {"type": "XIDErrors", "status": "True", "reason": "r", "message": "m", "lastTransitionTime": TIME},
            ],
        },
    },
    {"metadata": {"name": "a"}, "status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}},
]
NOTICE = EvictionNotice(kind="Preempt", event="e", seen_time=1.0, not_before_time=2.0)
TOLD = NodeStatus(
    node="a", memory_limit_bytes=1, memory_used_bytes=0, jobs=(), notice=NOTICE, written_time=1e9, progress_seconds=5.0,
    mirror_address="10.0.0.1:1",
)  # fmt: skip
REPORTS = [
    {
        "metadata": {
            "name": "a", "uid": "n", "resourceVersion": "7", "generation": 3,
            "managedFields": [{"subresource": "status", "time": TIME, "fieldsV1": {"f:status": {}}}],
        },
        "spec": {"requests": [{"name": "gpt"}], "gangs": [{"name": "gpt"}]},
        "status": {**to_document(TOLD), "observedGeneration": 2},
    }
]  # fmt: skip


@pytest.mark.parametrize(
    ("view_of", "read", "bare", "documents", "constant"),
    [
        pytest.param(
            pod_of,
            POD_FIELDS,
            pod(),
            PODS,
            {"namespace", "name", "uid", "job", "job_uid", "clock_ahead_seconds"},
            id="pods",
        ),
        pytest.param(
            node_of,
            NODE_FIELDS,
            {"metadata": {"name": "a"}, "status": {"conditions": [READY]}},
            NODES,
            {"name"},
            id="nodes",
        ),
        pytest.param(
            report_of, REPORT_FIELDS, {"metadata": {"name": "a", "uid": "u"}}, REPORTS, {"node", "jobs"}, id="reports"
        ),
        pytest.param(
            agent_of, POD_FIELDS, pod(), [pod(spec={"nodeName": "a"}, conditions=[READY])], {"pod"}, id="agents"
        ),
    ],
)
def test_what_is_read_is_all_that_is_looked_at(
    view_of: Callable[[JSON], Any], read: Fields, bare: JSON, documents: Sequence[JSON], constant: set[str]
) -> None:
    views = [view_of(document) for document in documents]
    assert [view_of(read.read(json.dumps(document).encode())) for document in documents] == views
    silent = {
        field.name for field in fields(view_of(bare))
        if all(getattr(view, field.name) == getattr(view_of(bare), field.name) for view in views)
    }  # fmt: skip
    assert silent == constant, "each field of a view is told by one of these documents"


def test_document_that_is_too_deep_is_one_that_cannot_be_read() -> None:
    with pytest.raises((ValueError, RecursionError)):
        POD_FIELDS.read(b'{"kind":' + b"[" * 5000 + b"]" * 5000 + b"}")


def test_nothing_else_is_read() -> None:
    document = pod(spec={"nodeName": "a", "containers": [{}]}, phase="Running", podIP="10.0.0.1")
    read = POD_FIELDS.read(json.dumps({**document, "kind": "Pod"}).encode())
    assert (set(read), read["spec"], read["status"]) == (
        {"metadata", "spec", "status"}, {"nodeName": "a"}, {"phase": "Running"}
    )  # fmt: skip
