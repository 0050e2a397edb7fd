"""One agent with the ranks of several jobs, and a storage that hangs for one of them: do the others feel it?

`python -m benchmarks.gangs.load [--quick]`. All jobs store in one Azurite, each in a container of its own, through one
link; for phases of equal length the link takes what the first job sends and never answers, and serves it in those
between.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cells import WORK, launcher_of
from benchmarks.processes.agentprocess import agent_command, is_answering, memory_limit
from benchmarks.processes.cellprocess import Event, Outcome, Workplace
from benchmarks.results import RESULTS, add_record
from benchmarks.stores.azurite import AZURITE_VERSION, running_azurite
from benchmarks.stores.slowlink import SlowLink, slow_link
from benchmarks.workload import MIB

from stepfast.storage.open import OPTIONS_VARIABLE

HEALTHY, HANGING = "healthy", "hanging"
HUNG_JOB = "job-0"
_SLOTS = 3
_START_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much of it. `phases` take turns: healthy, hanging, healthy, …"""

    jobs: int = 4
    ranks: int = 4  # of each job
    size_mib: int = 16  # of each rank
    interval_seconds: float = 5.0
    phase_seconds: float = 20.0
    phases: int = 8
    settle_seconds: float = 5.0  # at the begin of a phase, which are not measured

    @property
    def seconds(self) -> float:
        return self.phases * self.phase_seconds


QUICK = Load(ranks=1, size_mib=4, interval_seconds=1.0, phase_seconds=4.0, phases=2, settle_seconds=1.0)


@dataclass(slots=True)
class _Heard:
    """What the jobs told, and when the phases began."""

    events: list[Event] = field(default_factory=list)
    begins: list[float] = field(default_factory=list)

    def phase_of(self, moment: float, load: Load) -> str | None:
        """The phase that a save of that moment belongs to; None while the phase settles, and before the first."""
        for index, begin in enumerate(self.begins):
            if begin + load.settle_seconds <= moment < begin + load.phase_seconds:
                return HANGING if index % 2 else HEALTHY
        return None


def measure_load(load: Load, results: Path = RESULTS) -> None:
    """Adds a `load` record: for both kinds of phase the stalls and persist times of the jobs that do not hang, and the
    saves of the one that does."""
    heard = _Heard()
    with tempfile.TemporaryDirectory(prefix="bench-azurite-") as folder:
        with (
            running_azurite(Path(folder)) as azurite,
            slow_link(azurite.port) as link,
            Workplace(WORK, _START_SECONDS + 2 * load.seconds) as workplace,
        ):
            options = json.dumps({"connection_string": azurite.connection_string(link.port)})
            workplace.add_environment({OPTIONS_VARIABLE: options})
            containers = [azurite.new_container() for _ in range(load.jobs)]
            outcomes = _run_jobs(load, workplace, containers, link, heard)
    errors = [outcome.error for outcome in outcomes if outcome.status != "done"]
    record = add_record(
        "load", results=results, status="failed" if errors else "done", error=" | ".join(errors), jobs=load.jobs,
        ranks_per_job=load.ranks, rank_bytes=load.size_mib * MIB, interval_seconds=load.interval_seconds,
        phase_seconds=load.phase_seconds, azurite=f"{AZURITE_VERSION}, in memory", **_samples(heard, load),
    )  # fmt: skip
    print(json.dumps(record))


def _run_jobs(
    load: Load, workplace: Workplace, containers: Sequence[str], link: SlowLink, heard: _Heard
) -> list[Outcome]:
    socket, memory = workplace.folder / "agent.sock", Path("/dev/shm") / f"stepfast-{workplace.key}"
    limit = memory_limit(load.size_mib * MIB, slots=_SLOTS, ranks=load.jobs * load.ranks)
    workplace.start_helper(agent_command(socket, memory, limit), lambda: is_answering(socket))

    def run(job: int) -> Outcome:
        arguments = ["--job", f"job-{job}", "--run-id", f"{uuid.uuid4().hex[:12]}-1", "--socket", str(socket)]
        arguments += ["--storage-uri", f"abfs://{containers[job]}/jobs", "--size-mib", str(load.size_mib)]
        arguments += ["--interval-seconds", str(load.interval_seconds), "--seconds", str(load.seconds)]
        if f"job-{job}" != HUNG_JOB:
            arguments.append("--follow")
        return workplace.run(
            "benchmarks.gangs.loadrank", arguments, heard.events.append, launcher=_launcher(load.ranks)
        )

    phases = threading.Thread(target=_alternate, args=(load, link, containers[0], heard), daemon=True)
    phases.start()
    with ThreadPoolExecutor(load.jobs) as executor:
        return list(executor.map(run, range(load.jobs)))


def _launcher(ranks: int) -> tuple[str, ...]:
    """torchrun even for one rank: each has to know its place."""
    return launcher_of(ranks) if ranks > 1 else ("-m", "torch.distributed.run", "--standalone", "--module")


def _alternate(load: Load, link: SlowLink, container: str, heard: _Heard) -> None:
    """The phases, from when all ranks have begun."""
    deadline = time.monotonic() + _START_SECONDS
    while sum(event["event"] == "begins" for event in list(heard.events)) < load.jobs * load.ranks:
        if time.monotonic() > deadline:
            return
        time.sleep(0.1)
    for phase in range(load.phases):
        if phase % 2:
            link.hold(container)
        else:
            link.release()
        heard.begins.append(time.time())
        time.sleep(load.phase_seconds)
    link.release()


def _samples(heard: _Heard, load: Load) -> dict[str, Any]:
    """Of the jobs that do not hang; `lost_saves`: those of them that were skipped, or never committed."""
    committed = {(event["job"], event["step"]): event["seconds"] for event in heard.events
                 if event["event"] == "committed"}  # fmt: skip
    stalls: dict[str, list[float]] = {HEALTHY: [], HANGING: []}
    persists: dict[str, list[float]] = {HEALTHY: [], HANGING: []}
    hung: dict[str, list[float]] = {HEALTHY: [], HANGING: []}
    lost = {HEALTHY: 0, HANGING: 0}
    for event in heard.events:
        phase = heard.phase_of(event["time"], load) if event["event"] == "save" else None
        if phase is None:
            continue
        if event["job"] == HUNG_JOB:
            hung[phase].append(event["stall_seconds"])
            continue
        if not event["is_saved"]:
            lost[phase] += 1
            continue
        stalls[phase].append(event["stall_seconds"])
        if event.get("rank", 0) == 0:
            seconds = committed.get((event["job"], event["step"]))
            lost[phase] += seconds is None
            persists[phase] += [seconds] if seconds is not None else []
    return {"stall_seconds": stalls, "persist_seconds": persists, "lost_saves": lost, "hung_job_stall_seconds": hung}


def main() -> None:
    """Measures one load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a rank a job, 4 MiB, two short phases")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    measure_load(QUICK if arguments.quick else Load(), arguments.results)


if __name__ == "__main__":
    main()
