"""A thousand jobs with ten thousand pods: `make bench-scale`, written to docs/scale.md. Ends with status 1 when a goal
is missed.

Beside tests/cluster's other parts, as `bench_recovery.py` is, for it stands on their control plane; a program rather
than a test, for it takes minutes, tells how far it is, and its goals are times.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from testcluster.binaries import Binaries
from testcluster.claim import Claim
from testcluster.simulation import SimulatedCluster
from testcluster.unavailable import Unavailable
from testoperator.running import run_to_end
from testscale.report import describe, goals_of
from testscale.trial import Size, Trial

REPORT = Path(__file__).parents[2] / "docs" / "scale.md"
SIZE = Size()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("jobs", "pods", "nodes", "large", "failures"):
        parser.add_argument(f"--{name}", type=int, default=getattr(SIZE, name))
    parser.add_argument("--seconds", type=float, default=SIZE.seconds)
    parser.add_argument("--report", type=Path, default=REPORT)
    options = parser.parse_args()
    size = Size(**{name: value for name, value in vars(options).items() if name != "report"})
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:6.1f} s] {text}", flush=True)

    try:
        cluster = SimulatedCluster(Claim.take(), Binaries.find_with_kwok())
    except Unavailable as reason:
        print(f"bench-scale: CANNOT RUN HERE: {reason}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        try:
            cluster.up()
            findings = run_to_end(Trial(cluster, Path(folder), size, say).run())
        finally:
            cluster.down()
    machine, day = f"{os.cpu_count()} processors ({platform.machine()})", datetime.now(UTC).date().isoformat()
    page = describe(findings, machine, day)
    print(page)
    options.report.write_text(page)
    return 0 if all(goal.is_met for goal in goals_of(findings)) else 1


if __name__ == "__main__":
    sys.exit(main())
