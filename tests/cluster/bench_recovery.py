"""How long each part of a recovery takes, from the job's own ledger: `make bench-cluster`. No test: it asserts no time.

A rank of a job is killed again and again. The table tells the operator's share, from the failure to the new pods beyond
the flush, and what the rest of a recovery is made of; it is written into docs/recovery.md.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from testjobs.job import Job, Team

FAILURES = int(os.environ.get("STEPFAST_BENCH_FAILURES", "20"))
REPORT = Path(__file__).parents[2] / "docs" / "recovery.md"
# From, to, and what is between them.
PARTS = {
    "detect": ("failureTime", "detectedTime", "the rank dies, its pod tells, the operator reads"),
    "flush": ("detectedTime", "flushedTime", "staged steps reach the storage; the old pods are ended meanwhile"),
    "replace": ("flushedTime", "launchedTime", "the kubelets have ended the last old pod; the new pods are made"),
    "start": ("launchedTime", "podsReadyTime", "kubelet, rendezvous, `import torch`"),
    "restore": ("podsReadyTime", "restoredTime", "every rank has the step"),
    "resume": ("restoredTime", "resumedTime", "the first new step"),
}


def test_recoveries(team: Team) -> None:
    """Kills a rank of one job FAILURES times and writes down what the ledger says."""
    policy = {"maxRestarts": 1000, "maxRestartsWithoutProgress": 1000, "backoff": {"baseSeconds": 0}}
    job = team.submit("recoveries", "--steps", "1000000", failurePolicy=policy)
    try:
        ledger = list(recoveries(job))
    finally:
        team.cluster.kubectl("delete", "trainingjob", job.name, "-n", team.namespace, "--timeout=150s")
    report = describe(ledger)
    REPORT.write_text(report)
    print(report)


def recoveries(job: Job) -> Iterator[Mapping[str, float]]:
    """The seconds of each part of each recovery."""
    for attempt in range(1, FAILURES + 1):
        job.wait_for_commit(1, attempt=attempt)
        job.wait(
            "it has trained on", lambda status: status["trainerStatus"]["globalStep"] > status["current"]["firstStep"]
        )
        job.signal_rank("KILL", index=attempt % 2, attempt=attempt)
        status = job.wait("it trains again", partial(is_over, attempt))
        recovery = status["recoveries"][-1]
        seconds = {name: between(recovery, begin, end) for name, (begin, end, _) in PARTS.items()}
        yield {"operator's share": seconds["detect"] + seconds["replace"], **seconds, "in all": sum(seconds.values())}


def is_over(attempt: int, status: Mapping[str, Any]) -> bool:
    recovery = (status.get("recoveries") or [{}])[-1]
    return recovery.get("attempt") == attempt and "restoredTime" in recovery and "resumedTime" in recovery


def between(recovery: Mapping[str, str], begin: str, end: str) -> float:
    first, last = (datetime.fromisoformat(recovery[name]) for name in (begin, end))
    return max(0.0, (last - first).total_seconds())


def describe(ledger: Sequence[Mapping[str, float]]) -> str:
    rows = []
    for name in ledger[0]:
        seconds = sorted(recovery[name] for recovery in ledger)
        meaning = (
            PARTS[name][2] if name in PARTS else "detect and replace" if name.startswith("operator") else "all parts"
        )
        p99 = statistics.quantiles(seconds, n=100, method="inclusive")[98]
        rows.append(f"| {name} | {statistics.median(seconds):.2f} | {p99:.2f} | {seconds[-1]:.2f} | {meaning} |")
    day = datetime.now(UTC).date().isoformat()
    intro = (
        f"Made by `make bench-cluster` on {day}: {len(ledger)} times a rank of a job of two pods on two nodes was "
        f"killed, on one machine with {os.cpu_count()} processors ({platform.machine()}) that ran the control plane, "
        "both nodes, both pods and the storage (Azurite). Seconds, from the job's own `status.recoveries`."
    )
    header = ["| part | p50 | p99 | longest | what it is |", "|---|---|---|---|---|"]
    return "\n".join(["# What a recovery is made of", "", intro, "", *header, *rows, ""])
