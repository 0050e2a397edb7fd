"""A pod as a member of a plain pod group of Kueue's: the labels and annotations that say so. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from stepfast_operator.document import JSON

QUEUE = "kueue.x-k8s.io/queue-name"
GROUP = "kueue.x-k8s.io/pod-group-name"
SIZE = "kueue.x-k8s.io/pod-group-total-count"
ROLE = "kueue.x-k8s.io/role-hash"
INDEX_LABEL = "kueue.x-k8s.io/pod-group-pod-index-label"
GATE = "kueue.x-k8s.io/admission"
RETRIABLE = "kueue.x-k8s.io/retriable-in-group"
_MANAGED = "kueue.x-k8s.io/managed"  # a label and a finalizer: both come from Kueue's webhook


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """A pod as Kueue's. `is_taken`: its webhook has seen the pod; `is_held`: the pod cannot go before Kueue lets it;
    `is_last`: with it the group ends.
    """

    group: str
    size: str
    is_taken: bool = False
    is_held: bool = False
    is_last: bool = False


def member_of(metadata: JSON) -> GroupMember | None:
    """None of a pod that is in no group of Kueue's."""
    marks, notes = metadata.get("labels") or {}, metadata.get("annotations") or {}
    if not marks.get(GROUP):
        return None
    return GroupMember(
        group=marks[GROUP],
        size=str(notes.get(SIZE) or ""),
        is_taken=marks.get(_MANAGED) == "true",
        is_held=_MANAGED in (metadata.get("finalizers") or ()),
        is_last=notes.get(RETRIABLE) == "false",
    )
