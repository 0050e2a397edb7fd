"""`python -m benchmarks.report [--results F] [--out docs/performance.md]`: writes the page, and its plots beside it.

What stands in the page's `.notes.md` is written by hand, and taken in as it is.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.report.charts import charts_of
from benchmarks.report.page import page_of
from benchmarks.report.plan import expected
from benchmarks.report.plots import write_plots
from benchmarks.report.selection import select
from benchmarks.results import RESULTS, read_records

OUT = Path("docs/performance.md")


def write_report(results: Path, out: Path) -> None:
    """Reads the results; writes `out`, and `<out without its ending>/*.svg`."""
    found = select(read_records(results))
    plan = expected(is_quick=found.is_quick)
    charts = charts_of(found, plan)
    folder = out.with_suffix("")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_plots(charts, folder)
    notes = out.with_suffix(".notes.md")
    text = notes.read_text(encoding="utf-8") if notes.exists() else ""
    out.write_text(page_of(found, plan, charts, text, folder.name), encoding="utf-8")


def main() -> None:
    """Writes what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    write_report(arguments.results, arguments.out)
    print(f"written: {arguments.out}, {arguments.out.with_suffix('')}/")


if __name__ == "__main__":
    main()
