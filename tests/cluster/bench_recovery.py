"""How long each part of a recovery takes: `make bench-cluster`. No test: it asserts no time.

A rank of a job is killed again and again, or a pod of it deleted. When the failure was told and the new pods were made
stands in the API server's audit log; what lies between, and what comes after, in the job's own ledger. The table tells
the operator's share and what the rest of a recovery is made of; it is written into docs/recovery.md.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from testjobs.gangs import PodChange, PodEvent, pod_events
from testjobs.job import Job, Team

FAILURES = int(os.environ.get("STEPFAST_BENCH_FAILURES", "20"))  # of each kind
REPORT = Path(__file__).parents[2] / "docs" / "recovery.md"
Seconds = Mapping[str, float]
Times = Mapping[str, datetime]

SHARE = "the operator's share, flush included"
BEYOND_FLUSH = "failure event → new pods, beyond the flush"
# Name, from, to, and what is between them. The failure event is what the API server wrote first: a container that
# failed, or a pod that is to be deleted.
PARTS = (
    ("death → failure event", "failureTime", "told", "the launcher sees its rank die and ends; its kubelet says so"),
    ("failure event → detected", "told", "detectedTime", "the operator hears of it and writes it down"),
    ("detected → old pods ended", "detectedTime", "ended", "the operator ends the gang, the kubelets say that it has"),
    ("flush", "ended", "flushedTime", "what is staged reaches the storage; 4 s when a node lacks its part"),
    ("flushed → new pods", "flushedTime", "made", "the next attempt is planned and its pods are made"),
    ("start", "made", "podsReadyTime", "scheduler, kubelet, rendezvous, `import torch`"),
    ("restore", "podsReadyTime", "restoredTime", "every rank has the step"),
    ("resume", "restoredTime", "resumedTime", "the first new step"),
)
SHARED = ("failure event → detected", "flush", "flushed → new pods")
NOT_FLUSHED = ("failure event → detected", "detected → old pods ended", "flushed → new pods")
MEANINGS = {
    SHARE: "failure event → new pods, but for what the old ones take to end",
    BEYOND_FLUSH: "the same with what the old ones take to end, and without the flush",
    "death → first new step": "all of it",
    **{name: meaning for name, _, _, meaning in PARTS},
}


def test_recoveries(team: Team) -> None:
    """Disturbs one job FAILURES times in each way, and writes down how it recovered."""
    kinds: dict[str, Callable[[Job, int], None]] = {
        "A rank is killed": lambda job, attempt: job.signal_rank("KILL", index=attempt // 2 % 2, attempt=attempt),
        "A pod is deleted": lambda job, attempt: job.delete_pod(index=attempt // 2 % 2, attempt=attempt),
    }
    policy = {"maxRestarts": 1000, "maxRestartsWithoutProgress": 1000, "backoff": {"baseSeconds": 0}}
    job = team.submit("recoveries", "--steps", "1000000", failurePolicy=policy)
    recoveries: dict[str, list[Seconds]] = {kind: [] for kind in kinds}
    try:
        uid = job.document()["metadata"]["uid"]
        for attempt in range(1, FAILURES * len(kinds) + 1):
            kind = list(kinds)[attempt % len(kinds)]
            ledger = disturb(job, attempt, kinds[kind])
            recoveries[kind].append(describe_recovery(ledger, list(pod_events(team.cluster.audit(), uid)), attempt))
    finally:
        team.cluster.kubectl("delete", "trainingjob", job.name, "-n", team.namespace, "--timeout=150s")
    report = describe(recoveries)
    REPORT.write_text(report)
    print(report)


def disturb(job: Job, attempt: int, disturbance: Callable[[Job, int], None]) -> Mapping[str, Any]:
    """The ledger's entry of the recovery from it."""
    job.wait_for_commit(1, attempt=attempt)
    job.wait("it has trained on", lambda status: status["trainerStatus"]["globalStep"] > status["current"]["firstStep"])
    disturbance(job, attempt)
    recovery: Mapping[str, Any] = job.wait("it trains again", partial(is_over, attempt))["recoveries"][-1]
    return recovery


def is_over(attempt: int, status: Mapping[str, Any]) -> bool:
    recovery = (status.get("recoveries") or [{}])[-1]
    return recovery.get("attempt") == attempt and "restoredTime" in recovery and "resumedTime" in recovery


def describe_recovery(ledger: Mapping[str, Any], events: Sequence[PodEvent], attempt: int) -> Seconds:
    """How long each part of the recovery from that attempt's end took."""
    old = [event for event in events if event.attempt == attempt]
    tells = (PodChange.CONTAINER_FAILED, PodChange.DELETED)
    told = min((event for event in old if event.change in tells), key=lambda event: event.time)
    ledger_times = {name: datetime.fromisoformat(time) for name, time in ledger.items() if name.endswith("Time")}
    if told.change is PodChange.DELETED:  # the ledger has the pod's deletionTimestamp, which is in whole seconds
        ledger_times["failureTime"] = told.time
    times: Times = {
        **ledger_times,
        # An agent's word of a dead rank may come before the kubelet's.
        "told": min(told.time, ledger_times["detectedTime"]),
        "ended": max(first_time(old, PodChange.ENDED, pod) for pod in {event.pod for event in old}),
        "made": max(event.time for event in events if event.attempt == attempt + 1 and event.change is PodChange.MADE),
    }
    parts = {name: between(times, begin, end) for name, begin, end, _ in PARTS}
    return {
        SHARE: sum(parts[name] for name in SHARED),
        BEYOND_FLUSH: sum(parts[name] for name in NOT_FLUSHED),
        "death → first new step": between(times, "failureTime", "resumedTime"),
        **parts,
    }


def first_time(events: Sequence[PodEvent], change: PodChange, pod: str) -> datetime:
    return min(event.time for event in events if event.change is change and event.pod == pod)


def between(times: Times, begin: str, end: str) -> float:
    return (times[end] - times[begin]).total_seconds()


def describe(recoveries: Mapping[str, Sequence[Seconds]]) -> str:
    day = datetime.now(UTC).date().isoformat()
    lines = [
        "# What a recovery is made of",
        "",
        f"`make bench-cluster`, {day}: {FAILURES} times each, a rank of a job of two pods on two nodes was killed, and",
        f"one of its pods deleted, on one machine with {os.cpu_count()} processors ({platform.machine()}) that ran the",
        "control plane, both nodes, both pods and the storage (Azurite). Seconds, from the API server's audit log and",
        "the job's own `status.recoveries`. The failure event is the API server's first word of it: a container that",
        "failed, or a pod that is to be deleted.",
        "",
        "Before new pods are made the old ones must have ended, for there are never two gangs (I9): the operator gives",
        "them a grace of 1 s, and their kubelets say when they are over. The first row leaves that out; the second has",
        f"it, and leaves out the flush. 'Longest' is the longest of {FAILURES}, which are too few for a p99.",
    ]
    for kind, found in recoveries.items():
        lines += ["", f"## {kind}", "", "| part | p50 | longest | what it is |", "|---|---|---|---|"]
        for name, meaning in MEANINGS.items():
            seconds = sorted(recovery[name] for recovery in found)
            if max(map(abs, seconds)) < 0.005:  # a deletion is no death that somebody has to tell of
                continue
            lines.append(f"| {name} | {statistics.median(seconds):.2f} | {seconds[-1]:.2f} | {meaning} |")
    return "\n".join([*lines, ""])
