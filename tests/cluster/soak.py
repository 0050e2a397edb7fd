"""Ten jobs for two hours, and a random fault a minute: `make soak`. Nothing may leak, and no step may be lost.

Jobs follow one another as they end; each has to end bit for bit as one that nothing happened to. What the operator and
the agents take is looked at every half minute; what they take at rest, before the first job and after the last, tells
of leaks, and so does what is left when all jobs are gone. The report is written into docs/soak.md, whatever it says.

STEPFAST_SOAK_SECONDS, STEPFAST_SOAK_JOBS and STEPFAST_SOAK_SEED are how long, how many at a time, and which faults.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from testcluster.firewall import cut
from testcluster.waiting import CommandFailed, lasting, wait_until
from testjobs.job import STEPS, Job, Team
from testjobs.release import Release
from testsoak.leaks import (
    LEAST_SAMPLES,
    REST_SAMPLES,
    Usage,
    held_bytes,
    leaks,
    objects_of,
    peers_of_operator,
    rests,
    trends,
    usages,
)

SECONDS = float(os.environ.get("STEPFAST_SOAK_SECONDS", "7200"))
JOBS = int(os.environ.get("STEPFAST_SOAK_JOBS", "10"))
SEED = int(os.environ.get("STEPFAST_SOAK_SEED", str(random.SystemRandom().randrange(10**6))))
FAULT_SECONDS = 60.0
LOOK_SECONDS = 5.0  # at the jobs
SAMPLE_SECONDS = 30.0  # of what the operator and the agents take
PACE = "1.0"  # seconds a step: a job takes some seven minutes, so that most of the time is spent on training
END_SECONDS = 1800.0  # for the last jobs
LEFT_SECONDS = 900.0  # agents keep what is a job's for ten minutes after its last process
REPORT = Path(__file__).parents[2] / "docs" / "soak.md"
POLICY: dict[str, Any] = {
    "failurePolicy": {"maxRestarts": 1000, "maxRestartsWithoutProgress": 1000, "podDeletionGraceSeconds": 5,
                      "backoff": {"baseSeconds": 0}},
    "nodeExclusionPolicy": {"maxExcludedNodes": 0},
    "progressPolicy": {"progressDeadlineSeconds": 60},
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Soak:
    """What runs and what was seen of it."""

    team: Team
    release: Release
    azurite: Any
    undisturbed: Mapping[int, str]
    chance: random.Random
    begin: float = field(default_factory=time.monotonic)
    running: dict[str, Job] = field(default_factory=dict)
    persisted: dict[str, int] = field(default_factory=dict)  # by job: the newest step that was seen committed
    submitted: int = 0
    complete: int = 0
    restarts: int = 0
    steps_lost: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    before: list[Usage]  # the first job
    samples: list[Usage] = field(default_factory=list)
    after: list[Usage] = field(default_factory=list)  # the last job
    violations: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    @property
    def is_young(self) -> bool:
        return self.seconds < SECONDS / 2

    # ---- jobs

    def fill(self) -> None:
        """As many jobs as are to run at a time."""
        while len(self.running) < JOBS:
            name = f"soak-{self.submitted + 1}"
            self.running[name] = self.team.submit(name, "--pace", PACE, **POLICY)
            self.submitted += 1

    def look(self) -> None:
        """At every job: a committed step never goes back, and one that is over ended as it should have."""
        for name, status in self._statuses().items():
            step = status.get("checkpoint", {}).get("latestPersistedStep", 0)
            if step < self.persisted.get(name, 0):
                self.violations.append(
                    f"{name}: step {self.persisted[name]} was committed, and {step} is the newest now"
                )
            self.persisted[name] = max(step, self.persisted.get(name, 0))
            if "terminalState" in status:
                self._settle(name, status)

    def _statuses(self) -> dict[str, Mapping[str, Any]]:
        """By job."""
        found = self.team.cluster.get("trainingjobs", "-n", self.team.namespace)["items"]
        statuses = {one["metadata"]["name"]: one.get("status", {}) for one in found}
        return {name: statuses[name] for name in self.running if name in statuses}

    def _settle(self, name: str, status: Mapping[str, Any]) -> None:
        job = self.running[name]
        digests, commits = job.digests(), job.commits()
        self.team.cluster.kubectl("delete", "trainingjob", name, "-n", self.team.namespace, "--wait=false")
        del self.running[name]
        if status["terminalState"] != "Complete" or status["checkpoint"]["latestPersistedStep"] != STEPS:
            self.violations.append(f"{name} ended as {status['terminalState']}: {job.story()[-3:]}")
        elif not digests or not digests.items() <= self.undisturbed.items():  # a pod may be deleted as it ends
            self.violations.append(f"{name} did not end bit for bit as one that nothing happened to")
        else:
            self.complete += 1
        for recovery in status.get("recoveries", ()):
            newest, found = max(commits.get(recovery["attempt"], (0,))), recovery.get("resumedFromStep")
            if found is not None and found < newest:
                self.violations.append(f"{name}: went on from step {found}, and {newest} was committed")
        self.restarts += status["restarts"]
        self.steps_lost += status.get("stepsLost", 0)

    # ---- faults

    def disturb(self) -> None:
        """One fault. What it was meant for may have ended just then: then it was none. Those that end the life of the
        operator, or of an agent that is to be seen to leak, come in the first half.
        """
        what: dict[str, Callable[[], None]] = {
            "rank killed": lambda: self._to_a_gang(lambda job, attempt: job.signal_rank("KILL", attempt=attempt)),
            "pod deleted": lambda: self._to_a_gang(lambda job, attempt: job.delete_pod(attempt=attempt)),
            "pod evicted": lambda: self._to_a_gang(lambda job, attempt: job.evict_pod(attempt=attempt)),
            "agent killed": lambda: self.release.kill_container(self.release.agent_pod(self._node())),
            "operator killed": lambda: self.release.kill_container(self.release.operator_pod()),
            "node lost": self._lose_node,
            "API server away": self._stop_api_server,
            "storage away": self._stop_storage,
            "network cut to the storage": self._cut_storage,
        }
        if not self.is_young:
            del what["agent killed"], what["operator killed"]
        name = self.chance.choice(list(what))
        try:
            what[name]()
        except (CommandFailed, StopIteration, IndexError, KeyError):
            name = f"{name}: in vain"
        self.faults[name] += 1

    def _to_a_gang(self, disturb: Callable[[Job, int], None]) -> None:
        """To one that trains, in its present attempt."""
        training = {name: status for name, status in self._statuses().items() if status.get("state") == "Running"}
        name = self.chance.choice(sorted(training))
        disturb(self.running[name], training[name]["attempt"])

    def _node(self) -> str:
        """Not the first, whose agent lives through all of it; later the last alone, so that others live for long."""
        names = sorted(self.release.cluster.nodes)
        return self.chance.choice(names[1:] if self.is_young else names[-1:])

    def _lose_node(self) -> None:
        node = self.release.cluster.nodes[self._node()]
        with lasting(30):
            node.kill()
        node.start()
        wait_until(f"{node.name} is back", node.is_ready, seconds=600)

    def _stop_api_server(self) -> None:
        with self.release.cluster.control_plane.without_api_server(), lasting(10):
            pass

    def _stop_storage(self) -> None:
        with self.azurite.unanswering(), lasting(20):
            pass

    def _cut_storage(self) -> None:
        node = self.release.cluster.nodes[self._node()]
        with cut(node, self.azurite.host, port=self.azurite.port), lasting(20):
            pass

    # ---- the end

    def check_what_is_left(self, before: Mapping[str, int]) -> None:
        """When all jobs are gone, nothing of them is left, on no node and in no namespace."""

        def left() -> list[str]:
            now = objects_of(self.release, self.team.namespace)
            more = {kind: number - before.get(kind, 0) for kind, number in now.items() if kind != "Event"}
            held = {node: number for node, number in held_bytes(self.release).items() if number}
            return [
                *(f"{number} objects are left: {kind}" for kind, number in more.items() if number > 0),
                *(f"the agent on {node} holds {number} bytes for jobs that are gone" for node, number in held.items()),
            ]

        with suppress(TimeoutError):
            wait_until("nothing is left", lambda: not left(), seconds=LEFT_SECONDS, every_seconds=5)
        self.after = seen_at_rest(self.release)
        self.violations += [*left(), *leaks(rests(self.before, self.after), trends(self.samples))]


@pytest.mark.timeout(0)
@pytest.mark.usefixtures("storage_access")
def test_soak(
    team: Team, release: Release, third_node: str, cluster_azurite: Any, undisturbed: Mapping[int, str]
) -> None:
    team.cluster.kubectl("delete", "trainingjob", "undisturbed", "-n", team.namespace, "--timeout=120s")
    before = objects_of(release, team.namespace)
    soak = Soak(
        team=team, release=release, azurite=cluster_azurite, undisturbed=undisturbed, chance=random.Random(SEED),
        before=seen_at_rest(release),
    )  # fmt: skip
    try:
        _run(soak)
        soak.check_what_is_left(before)
    except BaseException as error:
        soak.violations.append(f"ended early: {error!r}")
        raise
    finally:
        REPORT.write_text(describe(soak))
    assert soak.violations == []


def seen_at_rest(release: Release) -> list[Usage]:
    """What all take, while no job is there."""
    seen: list[Usage] = []
    for _ in range(REST_SAMPLES):
        threading.Event().wait(SAMPLE_SECONDS)
        seen += usages(release)
    print("the operator's sockets at rest:", dict(peers_of_operator(release)))
    return seen


def _run(soak: Soak) -> None:
    """Until the last job has ended."""
    faults_due, samples_due = FAULT_SECONDS, 0.0
    while soak.running or soak.seconds < SECONDS:
        if soak.seconds > SECONDS + END_SECONDS:
            soak.violations.append(f"not over {END_SECONDS:.0f} s after the last fault: {', '.join(soak.running)}")
            return
        with suppress(CommandFailed):  # the API server was too busy, or a pod has just gone: at the next look
            if soak.seconds < SECONDS:
                soak.fill()
            soak.look()
            if soak.seconds >= samples_due:
                soak.samples += usages(soak.release)
                samples_due += SAMPLE_SECONDS
        if faults_due <= soak.seconds < SECONDS:
            faults_due += FAULT_SECONDS
            soak.disturb()
        threading.Event().wait(LOOK_SECONDS)


def change(one: Usage, other: Usage) -> str:
    """Cells for memory, files and sockets."""
    memory = f"{one.memory_bytes >> 20} → {other.memory_bytes >> 20}"
    return f"{memory} | {one.files} → {other.files} | {one.sockets} → {other.sockets}"


def describe(soak: Soak) -> str:
    """The page."""
    faults = [f"| {name} | {number} |" for name, number in sorted(soak.faults.items())]
    rested = [
        f"| {rest.component} | {change(rest.before, rest.after)} | {rest.before.processes} → {rest.after.processes} |"
        for rest in rests(soak.before, soak.after)
    ]
    taken = [
        f"| {trend.component} | {trend.samples} | {change(trend.first, trend.last)} |" for trend in trends(soak.samples)
    ]
    verdict = [f"- {violation}" for violation in soak.violations] or ["None."]
    minutes = min(soak.seconds, SECONDS) / 60
    return "\n".join([
        "# Soak", "",
        f"`make soak`, {datetime.now(UTC).date()}, seed {SEED}: {JOBS} jobs of two pods at a time,",
        f"{minutes:.0f} minutes, three nodes of one machine with {os.cpu_count()} processors, a fault a minute.", "",
        f"{soak.submitted} jobs were submitted, {soak.complete} ended bit for bit as one that nothing happened to.",
        f"Their gangs were restarted {soak.restarts} times; {soak.steps_lost} of {STEPS * soak.complete} steps were",
        "made twice.", "",
        "## Violations", "",
        "A committed step that is gone; another end than that of an undisturbed job; memory, files, sockets or",
        "processes of the operator or of an agent that stay; slots or objects that are left when jobs are gone.", "",
        *verdict, "",
        "## Faults", "", "| fault | times |", "|---|---|", *faults, "",
        "## At rest", "",
        "Before the first job (the most that one of a kind took) → after the last: where a leak would show.", "",
        "| container | memory, MiB | files | sockets | processes |", "|---|---|---|---|---|", *rested, "",
        "## While jobs ran", "",
        f"Of each container's longest life, once it was warm, looked at every {SAMPLE_SECONDS:.0f} s: medians of the",
        f"first third of the samples → the last third. Fewer than {LEAST_SAMPLES} samples say nothing.", "",
        "| container | samples | memory, MiB | files | sockets |", "|---|---|---|---|---|", *taken, "",
    ])  # fmt: skip
