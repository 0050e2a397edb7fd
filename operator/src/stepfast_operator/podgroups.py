"""Gangs that somebody admits or schedules as a whole: Kueue's plain pod groups, Volcano's and coscheduling's PodGroups.
What their pods say, the objects beside them, and what is read of both. Pure.

A Kueue group is one stretch of activity: the pods of the next attempt take the places of those before, so that the
quota is kept. A PodGroup belongs to one attempt. Why: docs/adr/a-kueue-group-lasts-a-stretch.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal

from stepfast_operator import groupmember, labels
from stepfast_operator.document import JSON
from stepfast_operator.manifests import Owner
from stepfast_operator.podview import PodView
from stepfast_operator.quantities import amount_text, parse_decimal
from stepfast_operator.spec import PodGroupPolicy

_VOLCANO_GROUP = "scheduling.k8s.io/group-name"
_COSCHEDULING_GROUP = "scheduling.x-k8s.io/pod-group"
UNSEEN = "nobody has looked at it yet"
_VOLCANO = "scheduling.volcano.sh/v1beta1"
_COSCHEDULING = "scheduling.x-k8s.io/v1alpha1"

# The patch of a pod that ends its group: no pod takes the place of one that has ended.
LAST_OF_GROUP: JSON = {"annotations": {groupmember.RETRIABLE: "false"}}
# The status of a pod of which nothing can run any more and no kubelet will say so: one that is kept by Kueue's
# finalizer alone counts as running otherwise, and the pod in its place as one too many.
BURIED: JSON = {
    "phase": "Failed",
    "reason": "NothingRuns",
    "message": "the pod was deleted before it had a node, or by force since its node did not answer",
}


def kueue_group(owner: Owner, attempt: int, nodes: int, pods: Iterable[PodView]) -> str:
    """The group of that attempt's pods. `pods`: of the job, as far as they are remembered.

    That of the attempt before, unless it is over, has another size, or one of its pods has succeeded: Kueue counts that
    one for good, and would find one pod of the next attempt too many.
    """
    grouped = [(pod, pod.member) for pod in pods if pod.member is not None and pod.attempt <= attempt]
    newest = max((pod.attempt for pod, _ in grouped), default=0)
    last = [(pod, member) for pod, member in grouped if pod.attempt == newest]
    fits = bool(last) and all(
        member.size == str(nodes) and not member.is_last and pod.phase != "Succeeded" for pod, member in last
    )
    if newest == attempt or (fits and any(member.is_held for _, member in last)):
        return last[0][1].group
    return group_name(owner, attempt)


def group_name(owner: Owner, attempt: int) -> str:
    """That of the group which begins with this attempt. A job of the same name before this one had other ones."""
    digest = hashlib.sha256(owner.uid.encode()).hexdigest()[:5]
    return f"{owner.job.name}-{attempt}-{digest}"


def joined(pod: JSON, policy: PodGroupPolicy, *, group: str, nodes: int) -> JSON:
    """The pod as a member of that group."""
    metadata, spec = pod["metadata"], pod["spec"]
    if policy.kueue is not None:
        marks = {groupmember.QUEUE: policy.kueue.queue_name, groupmember.GROUP: group}
        # All of them one role, as Kueue takes at most eight: it would tell them apart by the nodes that they prefer.
        notes = {
            groupmember.SIZE: str(nodes),
            groupmember.ROLE: labels.CONTAINER,
            groupmember.INDEX_LABEL: labels.NODE_INDEX,
        }
        # Kueue's webhook adds the gate. Where there is no such webhook, or it leaves the namespace alone, the pods must
        # not run past the quota.
        spec = {
            **spec,
            "schedulingGates": [
                *_without(spec.get("schedulingGates") or (), groupmember.GATE),
                {"name": groupmember.GATE},
            ],
        }
    elif policy.volcano is not None:
        marks, notes = {}, {_VOLCANO_GROUP: group}
        spec = {"schedulerName": "volcano", **spec}
    else:
        marks, notes = {_COSCHEDULING_GROUP: group}, {}
    metadata = {
        **metadata,
        "labels": {**metadata["labels"], **marks},
        "annotations": {**metadata["annotations"], **notes},
    }
    return {**pod, "metadata": metadata, "spec": spec}


def pod_group_of(owner: Owner, policy: PodGroupPolicy, *, group: str, nodes: int, pod: JSON) -> JSON | None:
    """The PodGroup for pods such as this one, with all that each may set aside; None for Kueue, which makes what it
    needs itself.
    """
    metadata = {
        "name": group,
        "namespace": owner.job.namespace,
        "labels": {labels.JOB: owner.job.name, labels.MANAGED_BY: labels.OPERATOR},
        "ownerReferences": [owner.reference()],
    }
    spec: dict[str, JSON] = {"minMember": nodes}
    if policy.volcano is not None:
        spec |= {"queue": policy.volcano.queue, "minResources": _resources(pod["spec"], nodes)}
        if pod["spec"].get("priorityClassName"):
            spec["priorityClassName"] = pod["spec"]["priorityClassName"]
        return {"apiVersion": _VOLCANO, "kind": "PodGroup", "metadata": metadata, "spec": spec}
    if policy.coscheduling is not None:
        if policy.coscheduling.schedule_timeout_seconds is not None:
            spec["scheduleTimeoutSeconds"] = policy.coscheduling.schedule_timeout_seconds
        return {"apiVersion": _COSCHEDULING, "kind": "PodGroup", "metadata": metadata, "spec": spec}
    return None


def pod_groups_path(policy: PodGroupPolicy, namespace: str) -> str | None:
    """Where the API server has PodGroups of that kind; None for Kueue."""
    if policy.kueue is not None:
        return None
    version = _VOLCANO if policy.volcano is not None else _COSCHEDULING
    return f"/apis/{version}/namespaces/{namespace}/podgroups"


def workload_wait(workload: JSON) -> str:
    """Why Kueue has not admitted the group yet, in its own words; empty when it has."""
    conditions = {one["type"]: one for one in (workload.get("status") or {}).get("conditions") or ()}
    if _holds(conditions, "Admitted"):
        return ""
    if (workload.get("spec") or {}).get("active") is False:
        return "the Workload was deactivated: set its spec.active to true to have it queued again"
    reserved = conditions.get("QuotaReserved") or {}
    if _holds(conditions, "QuotaReserved"):
        checks = (workload.get("status") or {}).get("admissionChecks") or ()
        told = [f"{one.get('name')}: {one.get('message') or one.get('state')}" for one in checks]
        return "; ".join(["the quota is reserved, the admission checks are not through", *told])
    return str(reserved.get("message") or UNSEEN)


def volcano_wait(pod_group: JSON) -> str:
    """Why Volcano has not let the gang in yet; empty when it has."""
    status = pod_group.get("status") or {}
    if (status.get("phase") or "Pending") != "Pending":
        return ""
    told = [one.get("message") for one in status.get("conditions") or () if one.get("status") == "True"]
    return str(next(filter(None, reversed(told)), "")) or UNSEEN


def is_group_left(members: Sequence[PodView]) -> bool:
    """Whether Kueue knows, of these pods of one group, that no others follow them."""
    return any(pod.member is not None and pod.member.is_last for pod in members) and not unburied(members)


def unburied(members: Iterable[PodView]) -> list[PodView]:
    """Those of which nothing runs though their phase does not say so."""
    return [pod for pod in members if not pod.is_alive and not pod.has_ended]


def held_groups(pods: Iterable[PodView]) -> dict[str, list[PodView]]:
    """The pods that Kueue keeps, by group."""
    found: dict[str, list[PodView]] = {}
    for pod in pods:
        if pod.member is not None and pod.member.is_held:
            found.setdefault(pod.member.group, []).append(pod)
    return found


def _holds(conditions: Mapping[str, JSON], kind: str) -> bool:
    return (conditions.get(kind) or {}).get("status") == "True"


def _without(named: Iterable[JSON], name: str) -> list[JSON]:
    return [one for one in named if one.get("name") != name]


def _resources(pod: JSON, nodes: int) -> dict[str, str]:
    """What so many such pods set aside together."""
    total: dict[str, Decimal] = {}
    for container in pod["containers"]:
        _add(total, _requests(container))
    first: dict[str, Decimal] = {}  # at least what each of those needs that run before the others
    for container in pod.get("initContainers") or ():
        requests = _requests(container)
        if container.get("restartPolicy") == "Always":
            _add(total, requests)
        else:
            first = {name: max(amount, first.get(name, amount)) for name, amount in {**first, **requests}.items()}
    total = {name: max(total.get(name, Decimal(0)), first.get(name, Decimal(0))) for name in {**total, **first}}
    _add(total, {name: parse_decimal(amount) for name, amount in (pod.get("overhead") or {}).items()})
    return {name: amount_text(amount * nodes) for name, amount in sorted(total.items())}


def _requests(container: JSON) -> dict[str, Decimal]:
    resources = container.get("resources") or {}
    amounts = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: parse_decimal(amount) for name, amount in amounts.items()}


def _add(total: dict[str, Decimal], amounts: Mapping[str, Decimal]) -> None:
    for name, amount in amounts.items():
        total[name] = total.get(name, Decimal(0)) + amount
