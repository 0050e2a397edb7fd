"""`python -m benchmarks.frameworks`: runs each framework's training in each way, and writes the table."""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from stepfast.layout import HISTORIES

ROOT = Path(__file__).parents[2]
ROWS = Path(__file__).parent / "rows"
PARAMETERS_A_LAYER = 2 * 1024 * 2048 + 3 * 1024
SECONDS = 300
SLOTS = 2  # the agent's: saves that go into memory for the first time


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A framework's training. `other`: its asynchronous way; empty where it has none."""

    name: str
    package: str
    script: str
    default: str
    other: str = ""
    stepfast: str = "stepfast"
    arguments: tuple[str, ...] = ()
    ranks: int = 1

    @property
    def ways(self) -> list[str]:
        return [way for way in (self.default, self.other, self.stepfast) if way]


TABLE = [
    Row(name="a loop: `Checkpointer` for torch.save, or DCP's `async_save`", package="torch", script="plain",
        default="default", other="async"),
    Row(name="a loop: Nebula's API for these", package="torch", script="plain", default="default", other="async",
        stepfast="nebula"),
    Row(name="DeepSpeed, ZeRO 1", package="deepspeed", script="deepspeedrow", default="default", other="async",
        arguments=("python",)),
    Row(name="Lightning", package="lightning", script="lightningrow", default="default", other="async"),
    Row(name="Transformers' Trainer", package="transformers", script="transformersrow", default="default"),
    Row(name="Accelerate", package="accelerate", script="acceleraterow", default="default"),
    Row(name="torch.distributed.checkpoint, FSDP2 on 2 ranks: `save`", package="torch", script="dcprow", ranks=2,
        default="default", other="async"),
    Row(name="the same, `async_save` with our writer", package="torch", script="dcprow", ranks=2, default="default",
        other="async", stepfast="stepfast-async"),
]  # fmt: skip


PAGE = """# Stall per save, beside the frameworks' own ways

`make bench-frameworks` writes this page: {size} MiB of model and Adam state, {saves} saves a process, {every}
iterations apart, so that the disk keeps up (saves that are made faster than they are persisted wait for it, Stepfast's
too, unless `onBusy` is `Skip`); {rounds} rounds.

A cell says by how much the iteration that saves, and the next one, take longer than two without a save (those before
the first, or between them, whichever are quicker): the median of all saves but each process's first two, whose own is
in brackets: they go into new memory. What is less than the spread of iterations without a save is said as that
("< 9 ms"). All ways train the same, in one run, on one machine and its disk, under `stepfast run`, whose agent has
nothing to do when it is not its turn. All saves of all ways are on the disk in the end; those of Stepfast, checked and
committed, are counted.

| | release | its default | its asynchronous way | Stepfast | the better of its own, in Stepfast's stalls |
|---|---|---|---|---|---|
"""


@dataclass(slots=True)
class Cost:
    """What saves cost in one way, in seconds: each process's first two, and all others."""

    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    spread: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def stall(self) -> float:
        """Of a save, but for the first; no less than can be told from an iteration without one."""
        return max(median(self.spread), median(self.later))

    def __str__(self) -> str:
        if not self.later:
            return self.failure
        sign = "" if self.stall == median(self.later) else "< "
        return f"{sign}{self.stall * 1000:.0f} ms ({median(self.first) * 1000:.0f})"


class Bench:
    """All rows, `rounds` times over, each way of a row after the other."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.costs: dict[tuple[str, str], Cost] = {}

    def run(self) -> None:
        """Runs them all."""
        asked = {(row.script, way, row.arguments, row.ranks) for row in TABLE for way in row.ways}
        for _ in range(self._options.rounds):
            for script, way, arguments, ranks in sorted(asked):
                if self._options.only and self._options.only not in script:
                    continue
                cost = self.costs.setdefault((script, way), Cost())
                self._one(cost, script, way, arguments, ranks)
                print(f"{script} {way}: {cost}", flush=True)

    def _one(self, cost: Cost, script: str, way: str, arguments: tuple[str, ...], ranks: int) -> None:
        folder = Path(tempfile.mkdtemp(prefix=f"{script}-", dir=self._options.folder))
        options = self._options
        task = {"way": way, "saves": options.saves, "every": options.every, "layers": options.layers,
                "out": str(folder / "told.json")}  # fmt: skip
        job = folder / "job.yaml"
        job.write_text(json.dumps(_manifest([str(ROWS / f"{script}.py"), *arguments], ranks)), encoding="utf-8")
        command = [sys.executable, "-m", "stepfast.cli", "run", "-f", str(job)]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "BENCH_TASK": json.dumps(task), "PYTHONPATH": path}
        try:
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False,
                                  timeout=SECONDS)  # fmt: skip
            told = folder / "told.json"
            if done.returncode or not told.exists():
                cost.failure = next(_errors(done.stdout + done.stderr), "it failed without a word")
                return
            found = json.loads(told.read_text())
            if is_ours(way) and (kept := _committed(folder)) != options.saves:
                cost.failure = f"{kept} of {options.saves} saves were committed"
                return
            cost.first += found["stalls"][:SLOTS]
            cost.later += found["stalls"][SLOTS:]
            cost.spread.append(found["spread"])
        except subprocess.TimeoutExpired:
            cost.failure = f"not done in {SECONDS} s"
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.sync()

    def page(self) -> str:
        """The table, as Markdown."""
        options = self._options
        size = options.layers * PARAMETERS_A_LAYER * 12 / 2**20
        lines = [self._line(row) for row in TABLE if (row.script, row.default) in self.costs]
        head = PAGE.format(size=round(size), saves=options.saves, every=options.every, rounds=options.rounds)
        return "\n".join([head.rstrip(), *lines, ""])

    def _line(self, row: Row) -> str:
        costs = [self.costs.get((row.script, way)) for way in (row.default, row.other, row.stepfast)]
        ours = costs[2]
        theirs = [cost.stall for cost in costs[:2] if cost is not None and cost.later]
        ratio = f"{min(theirs) / ours.stall:.1f}×" if ours is not None and ours.later and theirs else "–"
        return f"| {row.name} | {version(row.package)} | {' | '.join(map(_cell, costs))} | {ratio} |"


def is_ours(way: str) -> bool:
    """Whether that way saves through Stepfast."""
    return way.startswith("stepfast") or way == "nebula"


def _manifest(script: list[str], ranks: int) -> dict[str, Any]:
    """A job like any, whose every save is persisted, as the frameworks' own are."""
    return {
        "apiVersion": "stepfast.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "row"},
        "spec": {
            "trainer": {"image": "none", "command": ["torchrun"], "args": script, "numProcPerNode": ranks},
            "failurePolicy": {"maxRestarts": 0},
            "checkpoint": {"persistent": {"intervalSeconds": 0}},
        },
    }  # fmt: skip


def _committed(folder: Path) -> int:
    """The saves of the job in that folder that were committed."""
    return sum(
        row["outcome"] == "Committed"
        for histories in folder.rglob(HISTORIES)
        for row in csv.DictReader(histories.read_text(encoding="utf-8").splitlines())
    )


def _cell(cost: Cost | None) -> str:
    return "has none" if cost is None else str(cost)


def _errors(text: str) -> Iterator[str]:
    """What was raised, the last first."""
    for found in reversed(re.findall(r"\b\w+Error: [^\n│]+", text)):
        yield f"fails: {found.strip()[:100]}".replace("|", "/")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8, help="4.2 million parameters each")
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--every", type=int, default=24, help="iterations")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", help="rows whose script's name has this in it")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "bench-frameworks.md")
    parser.add_argument("--folder", type=Path, default=ROOT / ".stepfast" / "bench" / "frameworks")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    bench.run()
    options.out.write_text(bench.page(), encoding="utf-8")
    print(bench.page())


if __name__ == "__main__":
    main()
