"""Many chaos trials and their report: `make chaos`."""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from trial import RANKS, STEPS, Kind, Outcome, Trial

from chaospage import Part, write_part


def plan(trials: int, first_seed: int) -> list[tuple[Kind, int]]:
    """Every kind in turn, each with a seed of its own."""
    kinds = list(Kind)
    return [(kinds[i % len(kinds)], first_seed + i) for i in range(trials)]


def report(outcomes: Sequence[Outcome]) -> str:
    """The campaign as a part of the page, in Markdown."""
    by_kind: dict[Kind, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_kind[outcome.kind].append(outcome)
    failed = [outcome for outcome in outcomes if outcome.violations]
    lines = [
        "## On one machine",
        "",
        f"`make chaos`, {datetime.now(UTC):%Y-%m-%d}: {len(outcomes)} seeded trials, {len(failed)} with a violation.",
        "",
        f"Each trial is a real `stepfast run`: {RANKS} ranks, {STEPS} steps of a known training, a save at every 2nd",
        "step, one disturbance at a seeded moment or effect. Every restored and every final state is compared bit",
        "for bit with an undisturbed run's; committed steps are watched from outside and verified at the end.",
        "Steps lost and recovery (failure to first new step, process start and `import torch` included) are medians",
        "and maxima over the trials that restarted the gang; the others went on without.",
        "",
        "| disturbance | trials | violations | restarted the gang | steps lost | recovery, s |",
        "|---|---|---|---|---|---|",
    ]
    for kind in Kind:
        mine = by_kind.get(kind, [])
        lost = [o.steps_lost for o in mine if o.steps_lost is not None]
        seconds = [o.recovery_seconds for o in mine if o.recovery_seconds is not None]
        lines.append(
            f"| {kind} | {len(mine)} | {sum(bool(o.violations) for o in mine)} | {len(seconds)} "
            f"| {_spread([float(n) for n in lost], 0)} | {_spread(seconds, 1)} |"
        )
    for outcome in failed:
        lines += ["", f"Violation: {outcome.kind}, seed {outcome.seed}: " + "; ".join(outcome.violations)]
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return "–"
    return f"{statistics.median(values):.{digits}f} (at most {max(values):.{digits}f})"


def run_trial(kind: Kind, seed: int, *, keep: Path | None) -> Outcome:
    """One trial in a folder of its own, which is kept when something was violated and `keep` says where."""
    folder = Path(tempfile.mkdtemp(prefix="stepfast-chaos-"))
    outcome = Trial(kind, seed, folder).run()
    if outcome.violations and keep:
        shutil.copytree(folder, keep / f"{seed}", dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock"))
    shutil.rmtree(folder)
    return outcome


def main() -> None:
    """Runs the campaign; exit status 1 when anything was violated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="trials at once")
    parser.add_argument("--kind", help="only kinds whose name contains this")
    parser.add_argument("--report", type=Path, help="write the report into this page, as its part of it")
    parser.add_argument("--keep", type=Path, help="keep the folders of violated trials here")
    arguments = parser.parse_args()
    wanted = [(k, seed) for k, seed in plan(arguments.trials, arguments.first_seed) if (arguments.kind or "") in k]
    outcomes = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ThreadPoolExecutor(arguments.jobs) as threads:
        try:
            for outcome in threads.map(lambda trial: run_trial(*trial, keep=arguments.keep), wanted):
                outcomes.append(outcome)
                verdict = "; ".join(outcome.violations) or "held"
                print(f"{len(outcomes)}/{len(wanted)} {outcome.kind}, seed {outcome.seed}: {verdict}", flush=True)
        except KeyboardInterrupt:
            print("interrupted: the trials under way are ended in order", flush=True)
            threads.shutdown(cancel_futures=True)
            sys.exit(130)
    text = report(outcomes)
    print(text)
    if arguments.report:
        write_part(arguments.report, Part.MACHINE, text)
    sys.exit(any(outcome.violations for outcome in outcomes))


if __name__ == "__main__":
    main()
