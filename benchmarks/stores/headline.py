"""What a save to Blob Storage costs training: torch.save against Stepfast, to the same Azurite.

`python -m benchmarks.stores.headline [--quick]`. Azurite runs on the same processors as the training: what it takes
of them while Stepfast persists counts as training time lost, as no real service's would.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.cells import Cell, Run, measuring, told
from benchmarks.peers.blobpeers import new_container
from benchmarks.peers.roster import ON_BLOB
from benchmarks.processes.procfs import processor_seconds
from benchmarks.results import RESULTS
from benchmarks.stores.azurite import AZURITE_VERSION, Azurite, running_azurite

_CELL = Cell(peer="stepfast_blob", layout="gpt:0.25", saves=4, slots=2, time_limit_seconds=600)
CELLS = (
    *(replace(_CELL, layout=layout) for layout in ("gpt:0.0625", "gpt:0.25", "gpt:1")),
    *(replace(_CELL, ranks=ranks) for ranks in (2, 4)),
)
_QUICK = replace(_CELL, layout="gpt:0.03", saves=3)
QUICK_CELLS = (_QUICK, replace(_QUICK, ranks=2))


def measure_headline(cell: Cell) -> None:
    """Adds a `headline` record; the cell has an Azurite of its own, in memory."""
    with tempfile.TemporaryDirectory(prefix="bench-azurite-") as folder:
        with running_azurite(Path(folder)) as azurite, new_container(azurite):
            _measure_saves(cell, azurite=azurite)


@measuring("headline")
def _measure_saves(run: Run, *, azurite: Azurite) -> None:
    before = processor_seconds([azurite.process_id])
    outcome = run.train("follow")
    run.add(
        "headline",
        **told(outcome),
        azurite=f"{AZURITE_VERSION}, in memory",
        server_processor_seconds=round(processor_seconds([azurite.process_id]) - before, 2),
    )


def cells(kinds: Sequence[Cell], rounds: int) -> Iterator[Cell]:
    """The two peers in turns."""
    for cell in kinds:
        for _ in range(rounds):
            for peer in ON_BLOB:
                yield replace(cell, peer=peer)


def main() -> None:
    """Measures all cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="32 MiB, one and two ranks, one round")
    parser.add_argument("--rounds", type=int, help="of both peers, in turns (default: 2)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    kinds = QUICK_CELLS if arguments.quick else CELLS
    for cell in cells(kinds, arguments.rounds or (1 if arguments.quick else 2)):
        measure_headline(replace(cell, results=arguments.results))


if __name__ == "__main__":
    main()
