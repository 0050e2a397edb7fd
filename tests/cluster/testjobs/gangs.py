"""From the API server's audit log: that no two gangs of a job ever lived at the same time (I9)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_ENDED = ("Succeeded", "Failed")


def overlapping_gangs(events: Iterable[dict[str, Any]], uid: str) -> list[str]:
    """Each pod that was made while a pod of another attempt of that job still might run; told by what happened.

    A pod may run from its creation until the kubelet says that it has ended, or until its record is removed: by the
    kubelet once its containers are gone, or by force.
    """
    alive: dict[str, str] = {}  # attempt, by the pod's name
    found = []
    for event in sorted(events, key=lambda event: str(event["stageTimestamp"])):
        pod = event.get("responseObject") or {}
        if event["stage"] != "ResponseComplete" or pod.get("kind") != "Pod" or event["responseStatus"]["code"] >= 300:
            continue
        labels = pod["metadata"].get("labels") or {}
        if labels.get("stepfast.dev/job-uid") != uid:
            continue
        name, attempt = pod["metadata"]["name"], labels["stepfast.dev/attempt"]
        if event["verb"] == "create" and "subresource" not in event["objectRef"]:
            others = [other for other, of in alive.items() if of != attempt]
            found += [f"{name} was made while {other} lived" for other in others]
            alive[name] = attempt
        elif pod.get("status", {}).get("phase") in _ENDED or _is_removal(event, pod):
            alive.pop(name, None)
    return found


def made_pods(events: Iterable[dict[str, Any]], uid: str) -> list[str]:
    """The names of all pods that were ever made for that job, in order."""
    return [
        event["responseObject"]["metadata"]["name"]
        for event in sorted(events, key=lambda event: str(event["stageTimestamp"]))
        if event["verb"] == "create"
        and event["stage"] == "ResponseComplete"
        and event["objectRef"].get("resource") == "pods"
        and "subresource" not in event["objectRef"]
        and event["responseStatus"]["code"] < 300
        and (event["responseObject"]["metadata"].get("labels") or {}).get("stepfast.dev/job-uid") == uid
    ]


def _is_removal(event: dict[str, Any], pod: dict[str, Any]) -> bool:
    if event["verb"] != "delete":
        return False
    return not pod["metadata"].get("deletionGracePeriodSeconds")
