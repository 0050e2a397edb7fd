"""`python -m benchmarks.simulation [goodput] [scale]`: both, unless one is named. A minute or two; nothing is shared
with other measurements, and only seconds of the scale's own processing depend on the machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.results import RESULTS
from benchmarks.simulation import goodput, scale


def main() -> None:
    """Measures, prints, and appends the records."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=["goodput", "scale", []], help="what to measure (default: all)")
    parser.add_argument("--seeds", type=int, default=goodput.SEEDS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    parts = options.parts or ["goodput", "scale"]
    if "goodput" in parts:
        for line in goodput.lines_of(goodput.add_all(options.results, seeds=options.seeds)):
            print(line)
    if "scale" in parts:
        for line in scale.lines_of(scale.add_all(options.results)):
            print(line)


if __name__ == "__main__":
    main()
