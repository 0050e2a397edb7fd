"""What a trial found, beside its goals: a page. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepfast_operator.metrics import RECONCILE_SECONDS
from testscale.trial import Findings, Size, Stretch

MIB = 1 << 20
_CHANGING = ("create", "patch", "update", "delete")
# What each stretch is; in the order in which a trial goes through them.
STRETCHES = {
    "large": "one job of one large gang, before there is any other",
    "large restart": "one pod of that gang fails, until all ranks of the next attempt have joined",
    "create": "all jobs are made at once, until every rank of every job has joined and the jobs' status says Running",
    "quiet": "no pod changes and no agent has anything to tell",
    "train": "every rank of every job makes two steps a second, of which its agent tells now and then",
    "fail": "the same, while a pod of one job after another fails, until these jobs run again",
    "restart": "the operator was killed (SIGKILL), a pod failed meanwhile, and the operator is started again",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One promise, and whether it was kept."""

    name: str
    wanted: str
    measured: str
    is_met: bool


def goals_of(findings: Findings) -> list[Goal]:
    """Each goal of the trial, in the order in which it is told."""
    size, seconds, stretches = findings.size, findings.seconds, findings.stretches
    # A large gang's few passes are as long as it takes to make its pods, which has goals of its own.
    of_many = [stretch for stretch in stretches.values() if not stretch.name.startswith("large")]
    slowest = max(of_many, key=lambda stretch: stretch.p99_seconds)
    peak = max(stretch.peak_bytes for stretch in stretches.values())
    quiet = stretches["quiet"]
    per_job = _per_job(stretches["create"], size)
    per_pod = _asked_of_jobs(stretches["large restart"]) / size.large
    return [
        Goal(
            name=f"reconcile p99 with {size.jobs:,} jobs, in every stretch",
            wanted="< 1 s",
            measured=f"{slowest.p99_seconds:.3f} s at most ({slowest.name})",
            is_met=slowest.p99_seconds < 1,
        ),
        Goal(
            name="memory of the operator, at its peak",
            wanted="< 250 MiB",
            measured=f"{peak / MIB:.0f} MiB",
            is_met=peak < 250 * MIB,
        ),
        Goal(
            name=f"API requests to create a job of {size.pods} pods",
            wanted=f"≤ {size.most_requests_per_job}",
            measured=f"{per_job:.1f}",
            is_met=per_job <= size.most_requests_per_job,
        ),
        Goal(
            name="API requests of a gang's restart, for each of its pods (ended, asked of its node, made anew)",
            wanted=f"≤ {size.most_requests_per_restarted_pod}",
            measured=f"{per_pod:.1f}",
            is_met=per_pod <= size.most_requests_per_restarted_pod,
        ),
        Goal(
            name=f"written in {quiet.seconds:.0f} s in which nothing changed, but for the Lease",
            wanted="nothing",
            measured=_list(Counter(f"{event['verb']}" for event in quiet.changes)) or "nothing",
            is_met=not quiet.changes,
        ),
        _time("killed and started again: it decides", 10, seconds["decide again"]),
        _time(f"a job of {size.large} pods: all pods made", 30, seconds["large made"]),
        _time(f"a gang of {size.large} pods fails: it runs again", 60, seconds["large runs again"]),
    ]


def describe(findings: Findings, machine: str, day: str) -> str:
    """The page."""
    size, seconds = findings.size, findings.seconds
    lines = [
        f"# {size.jobs:,} jobs with {size.jobs * size.pods:,} pods",
        "",
        f"`make bench-scale`, {day}: the operator as its users run it, with the rights that the chart gives it, on a",
        "real API server, etcd (whose data are in memory) and scheduler. It begins when all nodes take pods.",
        f"{size.nodes:,} nodes are played by KWOK (their pods run as soon as they",
        "are bound, and end at once when told to), their agents by the benchmark: a rank joins when its pod runs,",
        "progress is told as real agents tell it (every 5 s, and the more seldom the slower the API server answers),",
        "requests to flush are answered at once. All of it ran on one machine with",
        f"{machine}: each second below is one of the API server's and the scheduler's, too. Requests are from the",
        "API server's audit log, passes from the operator's own `stepfast_reconcile_duration_seconds`.",
        "",
        "| goal | wanted | measured | met |",
        "|---|---|---|---|",
        *(f"| {one.name} | {one.wanted} | {one.measured} | {_said(is_met=one.is_met)} |" for one in goals_of(findings)),
        "",
        "## How long what took",
        "",
        "| what | seconds |",
        "|---|---|",
        f"| {size.jobs:,} jobs made, until all ranks in {size.jobs * size.pods:,} pods have joined | "
        f"{seconds['create']:.1f} |",
        f"| killed: process begins → all is read and the Lease is held | {seconds['begin again']:.1f} |",
        f"| killed: process begins → the first decision about the pod that failed meanwhile is written | "
        f"{seconds['decide again']:.1f} |",
        f"| {size.large} pods: job made → its last pod made | {seconds['large made']:.1f} |",
        f"| {size.large} pods: job made → all ranks have joined | {seconds['large runs']:.1f} |",
        f"| {size.large} pods: a pod fails → last pod of the next attempt made | {seconds['large made again']:.1f} |",
        f"| {size.large} pods: a pod fails → all ranks of the next attempt have joined | "
        f"{seconds['large runs again']:.1f} |",
        "",
        "## The operator, stretch by stretch",
        "",
        f"Without any job it takes {findings.idle_bytes / MIB:.0f} MiB. 'Turn' is how long a job waited until it was",
        "looked at (`stepfast_reconcile_wait_seconds`), for a few are at a time. 'Answers' are those of the health",
        "probe: how long the event loop had no time.",
        "",
        "| stretch | s | passes | p50, p99 (ms) | turn p99 (ms) | MiB | processors | answers p99, longest (ms) |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(findings.stretches[name]) for name in STRETCHES),
        "",
        *(f"- {name}: {what}" for name, what in STRETCHES.items()),
        "",
        "## Requests",
        "",
        "| stretch | all | changes a job and minute | what |",
        "|---|---|---|---|",
        *(_requests_row(findings.stretches[name], size) for name in STRETCHES),
    ]
    return "\n".join([*lines, ""])


def _time(name: str, limit: int, seconds: float) -> Goal:
    return Goal(name=name, wanted=f"< {limit} s", measured=f"{seconds:.1f} s", is_met=seconds < limit)


def _said(*, is_met: bool) -> str:
    return "yes" if is_met else "**no**"


def _per_job(stretch: Stretch, size: Size) -> float:
    return _asked_of_jobs(stretch) / size.jobs


def _asked_of_jobs(stretch: Stretch) -> int:
    """Requests that belong to a job: no Lease, no list or watch of everything."""
    return sum(number for what, number in stretch.requests.items() if not _is_common(what))


def _is_common(what: str) -> bool:
    verb, _, kind = what.partition(" ")
    return kind == "leases" or verb in ("list", "watch") or kind.startswith("/")


def _row(stretch: Stretch) -> str:
    passes = f"{1000 * stretch.p50_seconds:.1f}, {1000 * stretch.p99_seconds:.0f}"
    answers = f"{1000 * stretch.p99_answer_seconds:.0f}, {1000 * stretch.slowest_answer_seconds:.0f}"
    return (
        f"| {stretch.name} | {stretch.seconds:.0f} | {stretch.passes} | {passes} | "
        f"{_wait(stretch.p99_wait_seconds)} | {stretch.resident_bytes / MIB:.0f} | {stretch.processors:.2f} | "
        f"{answers} |"
    )


def _wait(seconds: float) -> str:
    """In milliseconds; of what is longer than the histogram reaches nobody knows by how much."""
    return f"≥ {1000 * seconds:.0f}" if seconds >= RECONCILE_SECONDS[-1] else f"{1000 * seconds:.0f}"


def _requests_row(stretch: Stretch, size: Size) -> str:
    changes = len(stretch.changes) / size.jobs / (stretch.seconds / 60)
    return f"| {stretch.name} | {sum(stretch.requests.values())} | {changes:.2f} | {_list(stretch.requests)} |"


def _list(numbers: Mapping[str, int]) -> str:
    order: Sequence[tuple[str, int]] = sorted(numbers.items(), key=lambda one: (-one[1], one[0]))
    return ", ".join(f"{number} {what}" for what, number in order)
