"""From the API server's audit log: when the pods of a job were made and ended, and that no two of its gangs ever lived
at the same time (I9).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

_ENDED = ("Succeeded", "Failed")


class PodChange(StrEnum):
    """What happened to a pod. ENDED: by the kubelet's word, or because its record is gone."""

    MADE = "made"
    CONTAINER_FAILED = "container failed"
    DELETED = "deleted"  # to be ended by the kubelet
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodEvent:
    """A change of one of the job's pods, and when the API server had written it."""

    time: datetime
    pod: str
    attempt: int
    change: PodChange


def pod_events(events: Iterable[dict[str, Any]], uid: str) -> Iterator[PodEvent]:
    """What happened to the pods of that job's gangs, in that order; the same change may be told several times.

    A pod may run from its creation until the kubelet says that it has ended, or until its record is removed: by the
    kubelet once its containers are gone, or by force.
    """
    found = [event for event in events if _is_of_job(event, uid) and not _is_spare(event)]
    # By revision: the answers to two clients may come in another order than the changes that they tell of.
    for event in sorted(found, key=lambda event: int(event["responseObject"]["metadata"]["resourceVersion"])):
        pod = event["responseObject"]
        time = datetime.fromisoformat(event["stageTimestamp"])
        name, attempt = pod["metadata"]["name"], int(pod["metadata"]["labels"]["stepfast.dev/attempt"])
        for change in _changes(event, pod):
            yield PodEvent(time=time, pod=name, attempt=attempt, change=change)


def overlapping_gangs(events: Iterable[dict[str, Any]], uid: str) -> list[str]:
    """Each pod that was made while a pod of another attempt of that job still might run; told by what happened."""
    alive: dict[str, int] = {}  # attempt, by the pod's name
    found = []
    for event in pod_events(events, uid):
        match event.change:
            case PodChange.MADE:
                others = [other for other, attempt in alive.items() if attempt != event.attempt]
                found += [f"{event.pod} was made while {other} lived" for other in others]
                alive[event.pod] = event.attempt
            case PodChange.ENDED:
                alive.pop(event.pod, None)
            case PodChange.CONTAINER_FAILED | PodChange.DELETED:
                pass
    return found


def made_pods(events: Iterable[dict[str, Any]], uid: str) -> list[str]:
    """The names of all pods that were ever made for that job, in order."""
    return [event.pod for event in pod_events(events, uid) if event.change is PodChange.MADE]


def _is_spare(event: dict[str, Any]) -> bool:
    """Whether it is of a pod that only holds a place."""
    return "stepfast.dev/spare" in event["responseObject"]["metadata"]["labels"]


def _is_of_job(event: dict[str, Any], uid: str) -> bool:
    """Whether the request changed a pod of that job."""
    pod = event.get("responseObject") or {}
    if event["stage"] != "ResponseComplete" or pod.get("kind") != "Pod" or event["responseStatus"]["code"] >= 300:
        return False
    return (pod["metadata"].get("labels") or {}).get("stepfast.dev/job-uid") == uid


def _changes(event: dict[str, Any], pod: dict[str, Any]) -> Iterator[PodChange]:
    if event["verb"] == "create":
        if "subresource" not in event["objectRef"]:
            yield PodChange.MADE
        return
    if event["verb"] == "delete":
        yield PodChange.DELETED if pod["metadata"].get("deletionGracePeriodSeconds") else PodChange.ENDED
    states = [container.get("state", {}) for container in pod.get("status", {}).get("containerStatuses", ())]
    if any(state.get("terminated", {}).get("exitCode") for state in states):
        yield PodChange.CONTAINER_FAILED
    if pod.get("status", {}).get("phase") in _ENDED:
        yield PodChange.ENDED
