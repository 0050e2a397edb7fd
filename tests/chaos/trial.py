"""One chaos trial: a real `stepfast run` on a known training, one disturbance at a seeded moment, then the account.

What must hold, whatever was killed and when:
 - the job completes, and every rank's final state is bit for bit that of an undisturbed run;
 - every restored state is bit for bit the state of that step (never torn, never mixed);
 - no step that was seen committed is gone or damaged, nor is an attempt started from an older one;
 - no step that all ranks had staged is lost, where the memory tier lived on (I4);
 - never two gangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

import psutil

from stepfast import catalog
from stepfast.errors import CheckpointDamaged
from stepfast.storage import open_store

HERE = Path(__file__).parent
RANKS = 2
STEPS = 60
DEADLINE_SECONDS = 300.0
_JOB = "local/chaos"


class Kind(StrEnum):
    """What is disturbed."""

    RANK = "SIGKILL of a rank"
    TORCHRUN = "SIGKILL of torchrun"
    AGENT = "SIGKILL of the agent"
    PERSISTER = "SIGKILL of the persister"
    AGENT_AND_RANKS = "SIGKILL of agent and ranks together"
    SUPERVISOR = "SIGKILL of stepfast run, started again"
    HANG = "SIGSTOP of a rank"
    IN_WRITE = "persister killed in the middle of a write"
    BEFORE_PART = "persister killed before the part"
    BEFORE_MANIFEST = "persister killed between part and manifest"
    AFTER_MANIFEST = "persister killed after the manifest"
    AGENT_IN_WRITE = "persister and agent killed in the middle of a write"
    AGENT_BEFORE_PART = "persister and agent killed before the part"
    AGENT_BEFORE_MANIFEST = "persister and agent killed between part and manifest"


# operation, part of the path, victims
_EFFECTS = {
    Kind.IN_WRITE: ("upload.put:after", "state-", "persister"),
    Kind.BEFORE_PART: ("create:before", "/part-", "persister"),
    Kind.BEFORE_MANIFEST: ("create:before", "/manifest.json", "persister"),
    Kind.AFTER_MANIFEST: ("create:after", "/manifest.json", "persister"),
    Kind.AGENT_IN_WRITE: ("upload.put:after", "state-", "agent"),
    Kind.AGENT_BEFORE_PART: ("create:before", "/part-", "agent"),
    Kind.AGENT_BEFORE_MANIFEST: ("create:before", "/manifest.json", "agent"),
}


@dataclass(slots=True)
class Outcome:
    """What a trial showed. `violations` is empty when everything held."""

    kind: Kind
    seed: int
    violations: list[str] = field(default_factory=list)
    attempts: int = 0
    steps_lost: int | None = None
    recovery_seconds: float | None = None
    committed: int = 0
    disturbed: bool = False


@lru_cache(maxsize=4)
def reference(seed: int) -> tuple[dict[tuple[int, int], str], dict[int, str]]:
    """The digests of an undisturbed run: after each (rank, step), and at the end of each rank."""
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1]); from trainer import Work\n"
        "seed, ranks, steps = map(int, sys.argv[2:])\n"
        "found = {}\n"
        "for rank in range(ranks):\n"
        "    work = Work(seed, rank); found[f'{rank}.0'] = work.digest()\n"
        "    for step in range(1, steps + 1):\n"
        "        work.apply(step); found[f'{rank}.{step}'] = work.digest()\n"
        "print(json.dumps(found))"
    )
    command = [sys.executable, "-c", code, str(HERE), str(seed), str(RANKS), str(STEPS)]
    # One thread, as the trainer has: sums must not depend on the machine's cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = json.loads(subprocess.run(command, check=True, capture_output=True, env=environment, timeout=300).stdout)
    digests = {(int(key.split(".")[0]), int(key.split(".")[1])): value for key, value in found.items()}
    return digests, {rank: digests[rank, STEPS] for rank in range(RANKS)}


class Trial:
    """Runs in a folder of its own; `run` leaves no process behind."""

    def __init__(self, kind: Kind, seed: int, folder: Path) -> None:
        self._kind, self._seed, self._folder = kind, seed, folder
        self._random = random.Random(f"{seed}-{kind}")
        self._outcome = Outcome(kind=kind, seed=seed)
        self._committed: dict[int, float] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended = threading.Event()
        self._disturbed_time: float | None = None

    def run(self) -> Outcome:
        """The whole trial."""
        self._write_manifest()
        watcher = threading.Thread(target=self._watch_commits, name="watch commits")
        process = self._start()
        watcher.start()
        try:
            deadline = time.monotonic() + DEADLINE_SECONDS
            process = self._disturb(process, deadline)
            try:
                status = process.wait(timeout=max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._fail(f"not complete within {DEADLINE_SECONDS} s")
            else:
                if status != 0:
                    self._fail(f"stepfast run ended with status {status}")
        finally:
            self._end_all()
            self._ended.set()
            watcher.join()
        self._account()
        return self._outcome

    # ------------------------------------------------------------ the run

    def _write_manifest(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        manifest = {
            "apiVersion": "stepfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "chaos", "namespace": "local"},
            "spec": {
                "trainer": {
                    "command": ["torchrun"],
                    "args": [str(HERE / "trainer.py"), str(self._folder), str(self._reference_seed), str(STEPS)],
                    "numNodes": 1,
                    "numProcPerNode": RANKS,
                },
                "failurePolicy": {
                    "maxRestarts": 5, "maxRestartsWithoutProgress": 4, "backoff": {"baseSeconds": 0.1, "maxSeconds": 1},
                },
                "progressPolicy": {"progressDeadlineSeconds": 12 if self._kind is Kind.HANG else 60},
                "checkpoint": {
                    "storageUri": (self._folder / "storage").as_uri(),
                    "persistent": {"intervalSeconds": 0, "maxToKeep": 100000},
                    "memory": {"sizeLimit": "256Mi"},
                },
            },
        }  # fmt: skip
        (self._folder / "job.yaml").write_text(json.dumps(manifest))

    @property
    def _reference_seed(self) -> int:
        return self._seed % 3  # three references serve all trials

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if effect := _EFFECTS.get(self._kind):
            token = self._folder / "kill-once"
            if not self._processes:
                token.touch()
            operation, part, victims = effect
            step = self._random.randrange(4, STEPS - 10)
            environment["STEPFAST_CHAOS_KILL"] = "|".join((operation, part, str(step), victims, str(token)))
            environment["PYTHONPATH"] = os.pathsep.join(
                [str(HERE / "inject"), *filter(None, [environment.get("PYTHONPATH")])]
            )
        log = open(self._folder / "run.log", "ab")  # noqa: SIM115  # the child's
        process = subprocess.Popen(
            [sys.executable, "-m", "stepfast.cli", "run", "-f", "job.yaml", "--summary", "summary.json"],
            cwd=self._folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        log.close()
        self._processes.append(process)
        return process

    def _disturb(self, process: subprocess.Popen[bytes], deadline: float) -> subprocess.Popen[bytes]:
        self._wait_for_step(process, self._random.randrange(3, STEPS - 15), deadline)
        if self._kind in _EFFECTS:
            while (self._folder / "kill-once").exists() and process.poll() is None and time.monotonic() < deadline:
                self._ended.wait(0.01)
            self._outcome.disturbed = not (self._folder / "kill-once").exists()
            return process
        self._ended.wait(self._random.random() * 0.05)
        self._disturbed_time = time.time()
        self._outcome.disturbed = True
        number = signal.SIGSTOP if self._kind is Kind.HANG else signal.SIGKILL
        for pid in self._victims(process):
            self._kill(pid, number)
        if self._kind is Kind.SUPERVISOR:
            process.wait()
            return self._start()
        return process

    def _victims(self, process: subprocess.Popen[bytes]) -> list[int]:
        ranks = [pid for pid, line in self._descendants() if line.endswith("/trainer.py")]
        agents = [pid for pid, line in self._descendants() if line == "stepfast_sidecar"]
        match self._kind:
            case Kind.RANK | Kind.HANG:
                return [self._random.choice(sorted(ranks))] if ranks else []
            case Kind.TORCHRUN:
                return [pid for pid, line in self._descendants() if line == "stepfast.launcher"]
            case Kind.AGENT:
                return agents
            case Kind.PERSISTER:
                return [pid for pid, line in self._descendants() if line == "stepfast_sidecar.persister"]
            case Kind.AGENT_AND_RANKS:
                return agents + ranks
            case _:
                return [process.pid]

    def _descendants(self) -> list[tuple[int, str]]:
        """The trial's processes (by the folder in their environment or command), and what each of them is."""
        found = []
        for process in psutil.process_iter(["pid", "cmdline"]):
            line = process.info["cmdline"] or []
            name = next((line[i + 1] for i, word in enumerate(line[:-1]) if word == "-m"), "")
            if any(word.endswith("/trainer.py") for word in line) and name != "stepfast.launcher":
                name = "/trainer.py"
            if name and self._is_ours(process, line):
                found.append((process.info["pid"], name))
        return found

    def _is_ours(self, process: psutil.Process, line: list[str]) -> bool:
        if any(str(self._folder) in word for word in line):
            return True
        try:
            return process.cwd() == str(self._folder) or process.environ().get("PWD") == str(self._folder)
        except psutil.Error:
            return False

    def _wait_for_step(self, process: subprocess.Popen[bytes], step: int, deadline: float) -> None:
        while process.poll() is None and time.monotonic() < deadline:
            staged = [self._newest_staged(rank, before=time.time()) for rank in range(RANKS)]
            if min(staged) >= step:
                return
            self._ended.wait(0.01)

    def _kill(self, pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def _end_all(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        deadline = time.monotonic() + 20
        while (left := [pid for pid, _ in self._descendants()]) and time.monotonic() < deadline:
            for pid in left:
                self._kill(pid, signal.SIGKILL)
            self._ended.wait(0.02)

    # ------------------------------------------------------------ the account

    def _watch_commits(self) -> None:
        store = open_store((self._folder / "storage").as_uri())
        while not self._ended.is_set():
            now = time.time()
            for found in catalog.committed_steps(store, _JOB):
                self._committed.setdefault(found.step, now)
            self._ended.wait(0.05)
        for found in catalog.committed_steps(store, _JOB):
            self._committed.setdefault(found.step, time.time())
        store.close()

    def _journal(self, rank: int) -> list[dict[str, object]]:
        path = self._folder / f"rank-{rank}.journal"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def _newest_staged(self, rank: int, *, before: float) -> int:
        steps = [e["step"] for e in self._journal(rank) if e["event"] == "staged" and float(str(e["time"])) <= before]
        return max((int(str(step)) for step in steps), default=0)

    def _account(self) -> None:
        digests, final = reference(self._reference_seed)
        for rank in range(RANKS):
            journal = self._journal(rank)
            if any(event["event"] == "two gangs" for event in journal):
                self._fail(f"two gangs: rank {rank} was there twice")
            starts = [event for event in journal if event["event"] == "restored"]
            self._outcome.attempts = max(self._outcome.attempts, len(starts))
            for start in starts:
                step = int(str(start["step"]))
                if start["digest"] != digests[rank, step]:
                    self._fail(f"rank {rank} restored something else than step {step}")
                self._check_start(rank, step, float(str(start["time"])))
            ends = [event for event in journal if event["event"] == "done"]
            if not ends or ends[-1]["digest"] != final[rank]:
                self._fail(f"rank {rank} ended in another state than an undisturbed run")
        self._check_storage()
        self._read_summary()
        if not self._outcome.disturbed:
            self._fail("nothing was disturbed: the run ended before")

    def _check_start(self, rank: int, step: int, start_time: float) -> None:
        """An attempt starts from nothing older than what was committed, or staged by all, before the gang died."""
        deaths = [self._last_sign_of_life(r, start_time) for r in range(RANKS)]
        if not any(deaths):
            return
        died = max(deaths)
        committed = max((s for s, seen in self._committed.items() if seen <= died), default=0)
        if step < committed:
            self._fail(f"rank {rank} started from step {step}; step {committed} was committed")
        staged = min(self._newest_staged(r, before=start_time) for r in range(RANKS))
        if step < staged:
            self._fail(f"rank {rank} started from step {step}; step {staged} was staged by all ranks")

    def _last_sign_of_life(self, rank: int, before: float) -> float:
        times = [float(str(event["time"])) for event in self._journal(rank)]
        return max((t for t in times if t < before - 0.5), default=0.0)

    def _check_storage(self) -> None:
        store = open_store((self._folder / "storage").as_uri())
        there = {found.step for found in catalog.committed_steps(store, _JOB)}
        if lost := sorted(set(self._committed) - there):
            self._fail(f"committed steps are gone: {lost}")
        for step in sorted(there):
            try:
                list(catalog.verify_step(store, _JOB, step))
            except CheckpointDamaged as error:
                self._fail(str(error))
        if STEPS not in there:
            self._fail("the last step was not committed")
        self._outcome.committed = len(there)
        store.close()

    def _read_summary(self) -> None:
        path = self._folder / "summary.json"
        if not path.exists():
            self._fail("no summary was written")
            return
        recoveries = json.loads(path.read_text()).get("recoveries", [])
        if recoveries:
            self._outcome.steps_lost = sum(int(r.get("stepsLost", 0)) for r in recoveries)
            self._outcome.recovery_seconds = max(float(r.get("durationSeconds", 0.0)) for r in recoveries)

    def _fail(self, what: str) -> None:
        self._outcome.violations.append(what)
