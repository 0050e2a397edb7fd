"""Gangs as groups of Kueue, Volcano and coscheduling: what their pods say, the objects beside them, what is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from stepfast.step import JobKey
from stepfast_operator import groupmember, labels, podgroups
from stepfast_operator.document import JSON, decode
from stepfast_operator.groupmember import GroupMember
from stepfast_operator.manifests import Owner
from stepfast_operator.podview import PodView
from stepfast_operator.spec import PodGroupPolicy

OWNER = Owner(job=JobKey(namespace="ml", name="gpt"), uid="0b0e")
ADMISSION = {"name": "kueue.x-k8s.io/admission"}


def policy(**fields: Any) -> PodGroupPolicy:
    return decode(PodGroupPolicy, fields, "spec.podGroupPolicy")


def pod(**spec: Any) -> JSON:
    return {"metadata": {"name": "gpt-1-0", "labels": {"a": "b"}, "annotations": {"c": "d"}}, "spec": spec}


def view(attempt: int = 1, index: int = 0, *, phase: str = "Failed", **fields: Any) -> PodView:
    """A pod of an attempt, held by Kueue in the first group unless `member` says otherwise."""
    member = GroupMember(group="gpt-1-x", size="2", is_taken=True, is_held=True)
    values: dict[str, Any] = {
        "namespace": "ml", "name": f"gpt-{attempt}-{index}", "uid": f"{attempt}-{index}", "job": "gpt",
        "job_uid": "0b0e", "run": f"0b0e-{attempt}", "attempt": attempt, "index": index, "node": "node-a",
        "phase": phase, "reason": "", "message": "", "conditions": (), "created_time": 0.0, "deleted_time": None,
        "waiting": "", "termination": None, "member": member, **fields,
    }  # fmt: skip
    return PodView(**values)


def gang(attempt: int = 1, **member: Any) -> list[PodView]:
    """The two pods of an attempt; `member` is laid over what they say of their group."""
    pods = [view(attempt, index) for index in range(2)]
    return [replace(one, member=replace(one.member, **member)) for one in pods if one.member is not None]


def test_pod_of_kueue_is_gated_whether_its_webhook_sees_it_or_not() -> None:
    joined = podgroups.joined(pod(containers=[]), policy(kueue={"queueName": "q"}), group="g", nodes=4)
    assert joined["metadata"]["labels"] == {
        "a": "b", "kueue.x-k8s.io/queue-name": "q", "kueue.x-k8s.io/pod-group-name": "g",
    }  # fmt: skip
    assert joined["metadata"]["annotations"] == {
        "c": "d", "kueue.x-k8s.io/pod-group-total-count": "4", "kueue.x-k8s.io/role-hash": "node",
        "kueue.x-k8s.io/pod-group-pod-index-label": labels.NODE_INDEX,
    }  # fmt: skip
    assert joined["spec"]["schedulingGates"] == [ADMISSION]


def test_gates_of_the_template_stay_beside_kueues() -> None:
    gates = [{"name": "example.com/wait"}, ADMISSION]
    joined = podgroups.joined(pod(schedulingGates=gates), policy(kueue={"queueName": "q"}), group="g", nodes=1)
    assert joined["spec"]["schedulingGates"] == gates


@pytest.mark.parametrize(
    ("template", "scheduler"), [({}, "volcano"), ({"schedulerName": "mine"}, "mine")], ids=["volcano", "the template's"]
)
def test_pod_of_volcano(template: Mapping[str, Any], scheduler: str) -> None:
    joined = podgroups.joined(pod(**template), policy(volcano={}), group="g", nodes=4)
    assert joined["metadata"]["annotations"] == {"c": "d", "scheduling.k8s.io/group-name": "g"}
    assert joined["spec"] == {"schedulerName": scheduler}


def test_pod_of_coscheduling_keeps_the_templates_scheduler() -> None:
    joined = podgroups.joined(pod(schedulerName="mine"), policy(coscheduling={}), group="g", nodes=4)
    assert joined["metadata"]["labels"] == {"a": "b", "scheduling.x-k8s.io/pod-group": "g"}
    assert joined["spec"] == {"schedulerName": "mine"}


def test_pod_group_of_volcano_asks_for_all_that_the_pods_set_aside() -> None:
    containers = [
        {"name": "node", "resources": {"limits": {"nvidia.com/gpu": 8, "memory": "64Gi"}, "requests": {"cpu": "500m"}}},
        {"name": "logs", "resources": {"requests": {"cpu": "250m", "memory": "1Gi"}}},
    ]
    before = [
        {"name": "fetch", "resources": {"requests": {"cpu": 4}}},
        {"name": "mesh", "restartPolicy": "Always", "resources": {"requests": {"memory": "1Gi"}}},
    ]
    spec = {"containers": containers, "initContainers": before, "overhead": {"cpu": "1m"}, "priorityClassName": "high"}
    made = podgroups.pod_group_of(OWNER, policy(volcano={"queue": "research"}), group="g", nodes=3, pod=pod(**spec))
    assert made["apiVersion"] == "scheduling.volcano.sh/v1beta1"
    assert made["metadata"]["ownerReferences"] == [OWNER.reference()]
    assert made["spec"] == {
        "minMember": 3, "queue": "research", "priorityClassName": "high",
        "minResources": {"cpu": "12003m", "memory": str(3 * 66 * 2**30), "nvidia.com/gpu": "24"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "spec"),
    [({}, {"minMember": 2}), ({"scheduleTimeoutSeconds": 30}, {"minMember": 2, "scheduleTimeoutSeconds": 30})],
    ids=["the scheduler's time", "a time"],
)
def test_pod_group_of_coscheduling(given: Mapping[str, Any], spec: Mapping[str, Any]) -> None:
    made = podgroups.pod_group_of(OWNER, policy(coscheduling=given), group="g", nodes=2, pod=pod(containers=[]))
    assert (made["apiVersion"], made["spec"]) == ("scheduling.x-k8s.io/v1alpha1", spec)


def test_kueue_makes_its_objects_itself() -> None:
    queue = policy(kueue={"queueName": "q"})
    assert podgroups.pod_group_of(OWNER, queue, group="g", nodes=2, pod=pod(containers=[])) is None
    assert podgroups.pod_groups_path(queue, "ml") is None


GONE = replace(view(), phase="Pending", node=None, deleted_time=1.0)
FIRST, NEXT = "gpt-1-x", podgroups.group_name(OWNER, 2)
GROUPS: dict[str, tuple[list[PodView], str]] = {
    "the one before, whose quota is kept": (gang(), FIRST),
    "that of the attempt's own pods, half of which are made": ([*gang(), gang(2, group="other")[0]], "other"),
    "one of its own without any before": ([], NEXT),
    "one of its own without pods of Kueue": ([view(member=None)], NEXT),
    "one of its own after another size": (gang(size="3"), NEXT),
    "one of its own after the end of the last": (gang(is_last=True), NEXT),
    "one of its own when Kueue has let all go": (gang(is_held=False), NEXT),
    "one of its own after a pod that succeeded": ([view(), view(index=1, phase="Succeeded")], NEXT),
}


@pytest.mark.parametrize("name", GROUPS)
def test_second_attempts_group_is(name: str) -> None:
    pods, group = GROUPS[name]
    assert podgroups.kueue_group(OWNER, 2, 2, pods) == group


def test_group_names_differ_between_jobs_of_one_name_and_are_labels() -> None:
    longest = Owner(job=JobKey(namespace="ml", name="a" * 50), uid="0b0e")
    assert podgroups.group_name(OWNER, 1) != podgroups.group_name(replace(OWNER, uid="1b1e"), 1)
    assert len(podgroups.group_name(longest, 99_999)) <= 63


def test_member_is_what_its_metadata_say() -> None:
    said = {
        "labels": {groupmember.GROUP: "g", "kueue.x-k8s.io/managed": "true"},
        "annotations": {groupmember.SIZE: "2", groupmember.RETRIABLE: "false"},
        "finalizers": ["kueue.x-k8s.io/managed"],
    }
    assert groupmember.member_of(said) == GroupMember(group="g", size="2", is_taken=True, is_held=True, is_last=True)
    assert groupmember.member_of({"labels": {groupmember.GROUP: "g"}}) == GroupMember(group="g", size="")
    assert groupmember.member_of({"labels": {"kueue.x-k8s.io/queue-name": "q"}}) is None


def test_group_is_left_once_one_pod_says_so_and_none_seems_to_run() -> None:
    assert not podgroups.is_group_left(gang())
    assert podgroups.is_group_left(gang(is_last=True))
    seems_to_run = replace(GONE, member=GroupMember(group=FIRST, size="2", is_held=True))
    assert podgroups.unburied([*gang(), seems_to_run]) == [seems_to_run]
    assert not podgroups.is_group_left([*gang(is_last=True), seems_to_run])


def condition(kind: str, status: str, message: str = "") -> JSON:
    return {"type": kind, "status": status, "message": message}


NO_ROOM = condition("QuotaReserved", "False", "insufficient unused quota")
RESERVED = condition("QuotaReserved", "True", "Quota reserved")
CHECK = {"name": "capacity", "state": "Pending", "message": "nodes are being made"}
WORKLOADS: dict[str, tuple[JSON, str]] = {
    "that is new": ({}, podgroups.UNSEEN),
    "without room": ({"status": {"conditions": [NO_ROOM]}}, "insufficient unused quota"),
    "that is admitted": ({"status": {"conditions": [RESERVED, condition("Admitted", "True")]}}, ""),
    "that is checked": (
        {"status": {"conditions": [RESERVED], "admissionChecks": [CHECK]}},
        "the quota is reserved, the admission checks are not through; capacity: nodes are being made",
    ),
    "that somebody deactivated": (
        {"spec": {"active": False}, "status": {"conditions": [NO_ROOM]}},
        "the Workload was deactivated: set its spec.active to true to have it queued again",
    ),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_word_for_a_workload(name: str) -> None:
    workload, word = WORKLOADS[name]
    assert podgroups.workload_wait(workload) == word


UNSCHEDULABLE = condition("Unschedulable", "True", "queue resource quota insufficient")
POD_GROUPS: dict[str, tuple[JSON, str]] = {
    "that is new": ({}, podgroups.UNSEEN),
    "without room": (
        {"status": {"phase": "Pending", "conditions": [UNSCHEDULABLE]}}, "queue resource quota insufficient",
    ),
    "that is let in": ({"status": {"phase": "Inqueue", "conditions": [UNSCHEDULABLE]}}, ""),
    "that runs": ({"status": {"phase": "Running"}}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", POD_GROUPS)
def test_word_for_a_pod_group_of_volcano(name: str) -> None:
    pod_group, word = POD_GROUPS[name]
    assert podgroups.volcano_wait(pod_group) == word
