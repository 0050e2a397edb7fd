"""From the death of a rank to the first new step, on one machine: `python -m benchmarks.gangs.recovery [--quick]`.

A rank of a `stepfast run` is killed, of one job after the other. Beside each recovery stands the limit: the same script
without any of ours, from nothing to its first step, under a bare Python and under torchrun. Once training goes on, it
is measured what memory the launcher takes that waits for the next recovery.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.cells import WORK
from benchmarks.processes.procfs import command_of, families, processor_seconds, proportional_bytes
from benchmarks.results import RESULTS, add_record

_HERE = Path(__file__).parent
_SCRIPT = _HERE / "recoveryscript.py"
_PATIENCE_SECONDS = 60.0
_SETTLED_SECONDS = 1.0
_LEDGER = ("failureTime", "detectedTime", "flushedTime", "launchedTime", "restoredTime", "resumedTime")
_OF_LAUNCHER = ("forked", "python is there", "torch: import begins", "torch: imported",
                "torch.distributed.run: imported")  # fmt: skip
_OF_RANKS = ("forked", "python is there", "the script begins", "torch: imported", "the process group is there",
             "model and optimizer are there", "stepfast.torch: imported", "the Checkpointer is there", "restored",
             "the first step is done")  # fmt: skip

Process = Mapping[str, Any]
"""What a process stamped: `role`, `attempt`, `rank`, `pid`, and `times` by name."""


class Stamps:
    """A folder in which processes leave their stamps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def environment(self) -> dict[str, str]:
        path = [str(_HERE / "recoverystamps"), str(_HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**os.environ, "BENCH_STAMPS": str(self.folder), "PYTHONPATH": os.pathsep.join(path),
                "OMP_NUM_THREADS": "1"}  # fmt: skip

    def processes(self, role: str, attempt: int) -> list[Process]:
        found = []
        for file in self.folder.iterdir():
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            if lines and (lines[0].get("role"), lines[0].get("attempt")) == (role, attempt):
                found.append({**lines[0], "times": {line["name"]: line["time"] for line in lines}})
        return sorted(found, key=lambda process: int(process["rank"]))

    def have(self, name: str, ranks: int, attempt: int) -> bool:
        return sum(name in process["times"] for process in self.processes("rank", attempt)) == ranks


class Job:
    """A `stepfast run` of the script, in a folder of its own."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.ranks, self._folder = ranks, folder
        self.stamps = Stamps(folder / "stamps")
        self._log = (folder / "output.log").open("wb")
        command = [str(Path(sys.executable).with_name("stepfast")), "run", "--name", "recovery"]
        command += ["--nproc-per-node", str(ranks), "--max-restarts", "1000", "--memory", "256Mi"]
        command += ["--summary", str(folder / "summary.json"), str(_SCRIPT)]
        self._process = subprocess.Popen(
            command, cwd=folder, env=self.stamps.environment(), stdout=self._log, stderr=self._log,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGTERM)  # the second one stops at once
            self._process.wait(30)
        self._log.close()

    def kill_rank(self, attempt: int) -> float:
        """Kills the attempt's last rank once it has trained a while; when."""
        self._wait(lambda: self.stamps.have("trained", self.ranks, attempt), f"attempt {attempt} trains")
        victim = self.stamps.processes("rank", attempt)[-1]
        killed = time.time()
        os.kill(int(victim["pid"]), signal.SIGKILL)
        self._wait(lambda: self.stamps.have("the first step is done", self.ranks, attempt + 1), "it trains again")
        return killed

    def standby_pss_bytes(self) -> int | None:
        """Memory of the launcher that waits beside the training, once it is idle; None where none waits."""
        deadline, before, idle_since = time.monotonic() + _PATIENCE_SECONDS, -1.0, time.monotonic()
        while (now := time.monotonic()) < deadline and self._process.poll() is None:
            waiting = self._waiting_launchers()
            if (taken := processor_seconds(waiting)) != before:
                before, idle_since = taken, now
            elif waiting and now - idle_since >= _SETTLED_SECONDS:
                return sum(map(proportional_bytes, waiting))
            time.sleep(0.1)
        return None

    def _waiting_launchers(self) -> list[int]:
        """One that was given its order has the gang for children."""
        mine = [pid for pid in families([self._process.pid]) if "stepfast.standby" in command_of(pid)]
        return [pid for pid in mine if families([pid]) == {pid}]

    def recoveries(self) -> list[Mapping[str, Any]]:
        """The ledger's own, once the job is over."""
        summary = json.loads((self._folder / "summary.json").read_text())
        found: list[Mapping[str, Any]] = summary.get("recoveries") or summary["status"]["recoveries"]
        return found

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not condition():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"never: {what}: {(self._folder / 'output.log').read_text()[-400:]}")
            time.sleep(0.05)


def measure_recoveries(ranks: int, repeats: int, results: Path = RESULTS) -> None:
    """Adds a `recovery` record for each kill (`way`: stepfast) and for each limit beside it (python, torchrun)."""
    try:
        _measure_in_turns(ranks, repeats, results)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        add_record("recovery", results=results, ranks=ranks, status="failed", error=str(error))
        print(f"recovery, {ranks} rank(s): {error}")


def _measure_in_turns(ranks: int, repeats: int, results: Path) -> None:
    WORK.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="recovery-", dir=WORK)).absolute()
    moments: list[dict[str, float]] = []
    standby: list[int | None] = []
    limits: list[tuple[str, dict[str, float]]] = []
    try:
        for turn in range(repeats):
            found, waiting = _recover(folder / f"job-{turn}", ranks)
            moments.append(found)
            standby.append(waiting)
            limits.append(("python", _time_bare(Stamps(folder / f"python-{turn}"), ranks)))
            limits.append(("torchrun", _time_torchrun(Stamps(folder / f"torchrun-{turn}"), ranks)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for found, waiting in zip(moments, standby, strict=True):
        _add(results, "stepfast", ranks, found, standby_pss_bytes=waiting)
    for way, found in limits:
        _add(results, way, ranks, found)
    _print(ranks, moments, limits)


def _add(results: Path, way: str, ranks: int, moments: Mapping[str, float], **more: Any) -> None:
    seconds = max(moments.values())
    add_record("recovery", results=results, way=way, ranks=ranks, seconds=seconds, moments=moments, **more)


def _recover(folder: Path, ranks: int) -> tuple[dict[str, float], int | None]:
    """Seconds after the kill: the ledger's times, the new launcher's, and of each rank's the latest; and the bytes of
    the launcher that waited for it.
    """
    folder.mkdir()
    with Job(folder, ranks) as job:
        standby_pss_bytes = job.standby_pss_bytes()  # before it waits a failure costs its start, too
        killed = job.kill_rank(1)
    ledger = next(each for each in job.recoveries() if each["attempt"] == 1)
    found = {
        f"ledger: {name}": datetime.fromisoformat(ledger[name]).timestamp() for name in _LEDGER if ledger.get(name)
    }
    found.update(_stamped(job.stamps, 2))
    moments = {name: moment - killed for name, moment in sorted(found.items(), key=lambda item: item[1])}
    return moments, standby_pss_bytes


def _stamped(stamps: Stamps, attempt: int) -> dict[str, float]:
    found = {}
    for role, names in (("launcher", _OF_LAUNCHER), ("rank", _OF_RANKS)):
        times = [process["times"] for process in stamps.processes(role, attempt)]
        found.update(
            {f"{role}: {name}": max(each[name] for each in times if name in each)
             for name in names if any(name in each for each in times)}
        )  # fmt: skip
    return found


def _time_bare(stamps: Stamps, ranks: int) -> dict[str, float]:
    """The script by itself, so many processes side by side."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    places = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
         "MASTER_PORT": port} for rank in range(ranks)
    ]  # fmt: skip
    return _time_plain(stamps, [sys.executable, str(_SCRIPT), "--plain"], places)


def _time_torchrun(stamps: Stamps, ranks: int) -> dict[str, float]:
    """The script under torch's own launcher."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return _time_plain(stamps, [sys.executable, *launcher, str(_SCRIPT), "--plain"], [{}])


def _time_plain(stamps: Stamps, command: Sequence[str], places: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Seconds after the start, by moment."""
    begin = time.time()
    started = [
        subprocess.Popen(
            command, env={**stamps.environment(), **place}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for place in places
    ]
    for process in started:
        if process.wait(_PATIENCE_SECONDS) != 0:
            raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}")
    return {name: moment - begin for name, moment in _stamped(stamps, 0).items()}


def _print(
    ranks: int, recoveries: Sequence[Mapping[str, float]], limits: Sequence[tuple[str, Mapping[str, float]]]
) -> None:
    """Where the time goes: each moment's median, and what it is after the one before it."""
    ways = {way: [found for other, found in limits if other == way] for way in ("python", "torchrun")}
    for way, found in (("stepfast", recoveries), *ways.items()):
        shared = [name for name in found[0] if all(name in each for each in found)]
        medians = sorted((statistics.median(each[name] for each in found), name) for name in shared)
        print(f"\n{way}, {ranks} rank(s), median of {len(found)}: seconds, after the one before it, moment")
        before = 0.0
        for seconds, name in medians:
            print(f"{seconds:8.3f} {seconds - before:+8.3f}  {name}")
            before = seconds


def main() -> None:
    """Measures gangs of one rank and of two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, action="append", help="repeatable (default: 1 and 2)")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--quick", action="store_true", help="one kill each")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    for ranks in arguments.ranks or (1, 2):
        measure_recoveries(ranks, arguments.repeats or (1 if arguments.quick else 7), arguments.results)


if __name__ == "__main__":
    main()
