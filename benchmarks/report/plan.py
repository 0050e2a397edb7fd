"""What the suite would have measured: so that what is missing shows as missing."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.cells import Cell
from benchmarks.peers.roster import PEERS, peer_class
from benchmarks.report.layouts import Layouts
from benchmarks.suite import FULL, QUICK, measurements


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Cells by kind, peer and layout; the layouts in their order; what the peers are called."""

    cells: Set[tuple[str, str, str]]
    layouts: Layouts
    titles: Mapping[str, str]

    def peers(self, kind: str, layout: str) -> list[str]:
        """Those that have such a cell."""
        return sorted({peer for one, peer, at in self.cells if (one, at) == (kind, layout)})

    def layouts_of(self, kind: str) -> list[str]:
        """Where the kind is measured, in the order of the layouts."""
        known = [*self.layouts.large, *self.layouts.small]
        found = {layout for one, _, layout in self.cells if one == kind}
        return sorted(found, key=lambda layout: (known.index(layout) if layout in known else len(known), layout))


def expected(*, is_quick: bool) -> Expected:
    """Of the plan that a run follows."""
    plan = QUICK if is_quick else FULL
    cells = set()
    for kind, peer, measure in measurements(plan, Path()):
        if isinstance(measure, partial):
            first = measure.args[0]
            cells.add((kind, peer, first.layout if isinstance(first, Cell) else plan.gang_layout))
    layouts = sorted({asked.cell.layout for asked in plan.saves}, key=_amount)
    return Expected(
        cells=cells,
        titles={peer: peer_class(peer).title for peer in PEERS},
        layouts=Layouts(
            large=[layout for layout in layouts if layout.startswith("gpt:")],
            small=[layout for layout in layouts if not layout.startswith("gpt:")],
        ),
    )


def _amount(layout: str) -> float:
    return float(layout.partition(":")[2])
