"""`make bench-anatomy`: estimates beside the allocator's own peak, on five models; writes docs/bench-anatomy.md.

Real steps are run on this machine's CPU, each in a process of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from benchmarks.anatomy.cpumemory import allocator_peak_bytes
from benchmarks.anatomy.estimators import ESTIMATORS
from benchmarks.anatomy.models import SUBJECTS, Subject

from stepfast.torch.anatomy import predict

_MIB = 1 << 20
_BATCH_SIZES = (1, 8)
_OURS = "stepfast anatomy predict"


def main() -> None:
    """Runs all, or measures one model: what the parent asks a child for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", nargs=2, metavar=("MODEL", "BATCH_SIZE"))
    parser.add_argument("--out", type=Path, default=Path("docs/bench-anatomy.md"))
    options = parser.parse_args()
    if options.measure:
        name, batch_size = options.measure
        subject = next(each for each in SUBJECTS if each.name == name)
        print(allocator_peak_bytes(subject.step(int(batch_size))))
        return
    rows = [row_of(subject, batch_size) for subject in SUBJECTS for batch_size in _BATCH_SIZES]
    options.out.write_text(page(rows), encoding="utf-8")
    print(options.out.read_text(encoding="utf-8"))


def row_of(subject: Subject, batch_size: int) -> dict[str, object]:
    """The measured peak and all estimates of one model at one batch size, in bytes."""
    command = [sys.executable, "-m", "benchmarks.anatomy", "--measure", subject.name, str(batch_size)]
    measured = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    source = subject.source()
    assert source.batch is not None
    with torch.device("meta"):
        model = source.model()
    ours = predict(source.model, torch.optim.AdamW, source.batch, batch_size=batch_size, device="cpu")
    estimates = {_OURS: ours.memory.peak_bytes, **{name: ask(model) for name, ask in ESTIMATORS.items()}}
    print(subject.name, batch_size, measured, estimates, file=sys.stderr, flush=True)
    return {"name": subject.name, "batch_size": batch_size, "measured": measured, "estimates": estimates}


def page(rows: list[dict[str, object]]) -> str:
    """The page in Markdown."""
    names = (_OURS, *ESTIMATORS)
    lines = [
        "# Estimates of a training step's memory",
        "",
        "What each says before a step is run, beside the most that the CPU's allocator held in two real steps: fp32,",
        "AdamW, models of Transformers with their configurations' defaults, sequences of 128 tokens, pictures of 224",
        "by 224. MiB, and the error. The others' estimates are of the model's states alone, whatever the batch.",
        "",
        f"{', '.join(f'{name} {version(name)}' for name in ('torch', 'transformers', 'accelerate', 'deepspeed'))}.",
        "Made by `make bench-anatomy`.",
        "",
        f"| model | batch | measured | {' | '.join(names)} |",
        f"|---|---:|---:|{'---:|' * len(names)}",
    ]
    for row in rows:
        measured, estimates = row["measured"], row["estimates"]
        assert isinstance(measured, int)
        assert isinstance(estimates, dict)
        cells = (f"{estimates[name] / _MIB:,.1f} ({estimates[name] / measured - 1:+.1%})" for name in names)
        lines.append(f"| {row['name']} | {row['batch_size']} | {measured / _MIB:,.1f} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
