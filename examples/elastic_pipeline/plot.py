"""Draws what an elastic training became: layers frozen, the pipeline's length, its replicas and samples a second.

python plot.py elastic.jsonl [more.jsonl …] --out elastic.svg
"""

from __future__ import annotations

import argparse
import json
from itertools import accumulate
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot

PANELS = {"frozen": "layers frozen", "length": "pipeline length K", "replicas": "replicas",
          "samples_per_second": "samples/s", "accuracy": "accuracy"}  # fmt: skip


def draw(paths: list[Path], out: Path) -> None:
    figure, panels = pyplot.subplots(len(PANELS), sharex=True, figsize=(7, 9), layout="constrained")
    for path in paths:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        ends = list(accumulate(row["seconds"] for row in rows))
        for panel, (key, title) in zip(panels, PANELS.items(), strict=True):
            values = [row[key] for row in rows]
            # What a row says was so during its epoch.
            panel.step([0.0, *ends], [values[0], *values], where="pre", label=path.stem)
            panel.set_ylabel(title)
            panel.set_ylim(bottom=0)
    panels[-1].set_xlabel("seconds")
    panels[0].legend(frameon=False)
    figure.savefig(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("elastic.svg"))
    args = parser.parse_args()
    draw(args.logs, args.out)
