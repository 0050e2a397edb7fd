"""`python -m benchmarks.elastic`: the elastic pipeline beside a plain pipeline and plain DDP, part by part.

Writes docs/bench-elastic.md and its plots. Every cell is a real training of examples/elastic_pipeline under torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "elastic_pipeline"
PAGE = ROOT / "docs" / "bench-elastic.md"
SECONDS = 1200


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A data set, the classes that the weights were trained on before, and those that are learned now."""

    name: str
    task: str
    known: Sequence[int]
    classes: Sequence[int]  # empty: all


CASES = [
    Case(name="digits, half of whose classes are known", task="digits", known=range(5), classes=()),
    Case(name="statements of Python that were never seen", task="text", known=range(7), classes=range(7, 15)),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to train."""

    name: str
    arguments: tuple[str, ...]


FULL = Variant(name="plain DDP", arguments=("--mode", "ddp"))
PIPELINE = Variant(name="plain pipeline", arguments=("--mode", "pipeline"))
ELASTIC = Variant(name="elastic: all parts, default settings", arguments=("--mode", "elastic"))
VARIANTS = [
    PIPELINE,
    FULL,
    Variant(name="DDP with the same freezing", arguments=("--mode", "elastic", "--length", "1", "--no-cache")),
    ELASTIC,
    Variant(
        name="elastic without AutoPipe (nor AutoDP)", arguments=("--mode", "elastic", "--no-packing", "--no-replicas")
    ),
    Variant(name="elastic without AutoDP", arguments=("--mode", "elastic", "--no-replicas")),
    Variant(name="elastic without AutoCache", arguments=("--mode", "elastic", "--no-cache")),
    Variant(name="elastic with the document's rule, α = 1/3", arguments=("--mode", "elastic", "--rule", "gradients")),
]

HEAD = """# The elastic pipeline, part by part

`make bench-elastic` writes this page: {ranks} ranks (CPU processes, gloo, one thread each), models of twelve blocks
and {width} features, {epochs} epochs, batches of {batch}, seeds 0 to {timed}. All ways see every sample once an epoch,
in one run on one machine, one after the other, seed by seed; the weights to begin with were trained on the known
classes before, but for the head's. What the default settings cost in accuracy is compared over seeds 0 to {compared}.

Seconds are medians over the seeds, start-up left out, evaluation and checkpoints included. The goals are {shares} of
the accuracy that the worst seed of full training ends with; one is reached once no later epoch falls below it again. A
seed that does not reach it within the epochs is left out of the seconds to it, and said. What an epoch takes is said by
the number of layers that are frozen: the median of all such epochs but those that begin with a change of it, for which
micro-batches and cache are tried and the cache is filled. While none is frozen all elastic ways do the same: what their
seconds differ by is the machine's noise.
"""


@dataclass(slots=True)
class Runs:
    """A variant's histories in a case, one a seed; the first `timed` of them stand beside all other variants'."""

    timed: int
    histories: list[list[dict[str, Any]]] = field(default_factory=list)

    @property
    def finals(self) -> list[float]:
        """The accuracies at the end, of all seeds."""
        return [rows[-1]["accuracy"] for rows in self.histories]

    @property
    def seconds(self) -> float:
        """Of all epochs: the median of the timed seeds."""
        return median([float(sum(row["seconds"] for row in rows)) for rows in self.histories[: self.timed]])

    def seconds_to(self, goal: float) -> list[float]:
        """Until it is reached for good, of the timed seeds that reach it."""
        found = []
        for rows in self.histories[: self.timed]:
            ends = list(accumulate(row["seconds"] for row in rows))
            short = max((epoch for epoch, row in enumerate(rows) if row["accuracy"] < goal), default=-1)
            found += ends[short + 1 : short + 2]
        return found

    def epoch_seconds(self) -> dict[int, float]:
        """Of an epoch by the number of frozen layers: the median, without the epoch that begins with a change."""
        found: dict[int, list[float]] = {}
        for rows in self.histories[: self.timed]:
            for before, row in pairwise(rows):
                if before["frozen"] == row["frozen"]:
                    found.setdefault(row["frozen"], []).append(row["seconds"])
        return {frozen: median(seconds) for frozen, seconds in found.items()}


def main() -> None:
    """Runs all cells, seed by seed, and writes the page."""
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="bench-elastic-", dir=options.folder))
    parts = [
        HEAD.format(
            ranks=options.ranks, width=options.width, epochs=options.epochs, batch=options.batch_size,
            timed=options.seeds - 1, compared=options.accuracy_seeds - 1,
            shares=" and ".join(f"{share:.0%}" for share in options.shares),
        )
    ]  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        for case in _cases(options):
            parts.append(_section(case, _measured(case, folder, options), options))
            options.out.write_text("\n".join(parts), encoding="utf-8")  # each case takes most of half an hour
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _cases(options: argparse.Namespace) -> list[Case]:
    return [case for case in CASES if not options.only or options.only in case.name]


def _measured(case: Case, folder: Path, options: argparse.Namespace) -> dict[str, Runs]:
    weights = folder / f"{CASES.index(case)}.pt"
    if not weights.exists():
        known = ["--classes", *map(str, case.known)]
        before = ["--mode", "pipeline", "--length", "1", *known, "--save-weights", str(weights)]
        _train(case, before, folder, options, seed=1000, ranks=1)
    found = {variant.name: Runs(timed=options.seeds) for variant in VARIANTS}
    for seed in range(options.accuracy_seeds):
        for variant in VARIANTS if seed < options.seeds else (PIPELINE, ELASTIC):
            classes = ["--classes", *map(str, case.classes)] if case.classes else []
            arguments = [*variant.arguments, *classes, "--pretrained", str(weights)]
            rows = _train(case, arguments, folder, options, seed=seed, ranks=options.ranks)
            found[variant.name].histories.append(rows)
            seconds = sum(row["seconds"] for row in rows)
            print(f"{case.name}: {variant.name}, seed {seed}: {seconds:.0f} s, {rows[-1]['accuracy']:.3f}", flush=True)
    return found


def _train(
    case: Case, arguments: Sequence[str], folder: Path, options: argparse.Namespace, *, seed: int, ranks: int
) -> list[dict[str, Any]]:
    history, storage = folder / "history.jsonl", folder / "storage"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
        str(EXAMPLE / "train.py"), "--task", case.task, "--seed", str(seed), "--epochs", str(options.epochs),
        "--batch-size", str(options.batch_size), "--width", str(options.width), "--history", str(history), *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "STEPFAST_STORAGE_URI": storage.as_uri(), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
        return [json.loads(line) for line in history.read_text().splitlines()]
    finally:
        history.unlink(missing_ok=True)
        shutil.rmtree(storage, ignore_errors=True)


def _section(case: Case, found: dict[str, Runs], options: argparse.Namespace) -> str:
    full = found[FULL.name].finals + found[PIPELINE.name].finals
    goals = [share * min(full) for share in options.shares]
    base = found[PIPELINE.name]
    lines = [
        f"## {case.name[0].upper()}{case.name[1:]}",
        "",
        _compared(base.finals, found[ELASTIC.name].finals),
        "",
        f"| |{''.join(f' seconds to {goal:.3f} | against the pipeline |' for goal in goals)}"
        " seconds for all epochs | against it | accuracy at the end |",
        f"|---|{'---:|---:|' * len(goals)}---:|---:|---|",
    ]
    for name, runs in found.items():
        reached = "".join(_reached(runs, base, goal) for goal in goals)
        lines.append(
            f"| {name} |{reached} {runs.seconds:.0f} | {base.seconds / runs.seconds:.2f}× "
            f"| {mean(finals := runs.finals[: runs.timed]):.3f} ({', '.join(f'{final:.3f}' for final in finals)}) |"
        )
    plot = f"![Layers frozen, length, replicas, samples/s and accuracy over time]({_plotted(case, found, options)})"
    return "\n".join([*lines, "", *_epochs(found), "", plot, ""])


def _epochs(found: dict[str, Runs]) -> list[str]:
    """A table of what an epoch takes, by the number of frozen layers."""
    counts = sorted(found[ELASTIC.name].epoch_seconds())
    base = found[PIPELINE.name].epoch_seconds()[0]
    lines = [
        f"| seconds of an epoch |{''.join(f' {frozen} frozen | against the pipeline |' for frozen in counts)}",
        f"|---|{'---:|---:|' * len(counts)}",
    ]
    for name, runs in found.items():
        seconds = runs.epoch_seconds()
        cells = [f" {seconds[n]:.2f} | {base / seconds[n]:.2f}× |" if n in seconds else " – | – |" for n in counts]
        lines.append(f"| {name} |{''.join(cells)}")
    return lines


def _compared(full: Sequence[float], elastic: Sequence[float]) -> str:
    """What full training and the default settings end with over all seeds: a paragraph."""
    costs = [after - before for before, after in zip(full, elastic, strict=True)]
    return (
        f"Over {len(full)} seeds full training (the plain pipeline) ends at {_spread(full)},\n"
        f"the default settings at {_spread(elastic)}: means, standard deviations and ranges.\n"
        f"Of the same seed that is {mean(costs):+.3f} ± {stdev(costs) / len(costs) ** 0.5:.3f}"
        " (mean and its standard error)."
    )


def _spread(finals: Sequence[float]) -> str:
    return f"{mean(finals):.3f} ± {stdev(finals):.3f} ({min(finals):.3f} to {max(finals):.3f})"


def _reached(runs: Runs, base: Runs, goal: float) -> str:
    """Two columns: seconds to the goal, and how often as fast as the pipeline that is."""
    reached, base_reached = runs.seconds_to(goal), base.seconds_to(goal)
    if not reached:
        return f" – (0 of {runs.timed} seeds) | – |"
    some = f" ({len(reached)} of {runs.timed} seeds)" if len(reached) < runs.timed else ""
    faster = f"{median(base_reached) / median(reached):.2f}×" if base_reached else "–"
    return f" {median(reached):.0f}{some} | {faster} |"


def _plotted(case: Case, found: dict[str, Runs], options: argparse.Namespace) -> str:
    """The first seed's pictures, of the plain ways and the elastic one."""
    pictures = options.out.with_suffix("")
    pictures.mkdir(exist_ok=True)
    logs = []
    for variant in (PIPELINE, FULL, ELASTIC):
        logs.append(pictures / f"{variant.name.partition(':')[0]}.jsonl")
        logs[-1].write_text("".join(json.dumps(row) + "\n" for row in found[variant.name].histories[0]))
    name = f"{case.task}-{CASES.index(case)}.svg"
    subprocess.run(
        [sys.executable, str(EXAMPLE / "plot.py"), *map(str, logs), "--out", str(pictures / name)], check=True
    )
    for log in logs:
        log.unlink()
    return f"{pictures.name}/{name}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3, help="of all variants")
    parser.add_argument("--accuracy-seeds", type=int, default=6, help="of the plain pipeline and the default settings")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[0.98, 1.0], help="of the worst full training's accuracy: the goals"
    )
    parser.add_argument("--only", help="the case whose name holds this")
    parser.add_argument("--folder", type=Path, help="for what comes and goes")
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args()
    if not 1 <= options.seeds <= options.accuracy_seeds or options.accuracy_seeds < 2:
        parser.error("1 <= --seeds <= --accuracy-seeds, and those are at least 2")
    return options


if __name__ == "__main__":
    main()
