"""The failure matrix as a table: what each row's last run found, kept line by line in a file. A row is a test.

Seconds and steps are the job's own, from its status.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

BIT_EXACT = "bit-exact"
_NONE = "–"
_LONGEST_WORDS = 160
_INTRODUCTION = """\
Each row is one test of `tests/cluster/matrix`: a real Kubernetes with two or three nodes, a job of two pods, one
disturbance in the middle of its training. *Bit-exact*: the weights, the optimizer and the random numbers that every
rank ends with are those of a run that was left alone, no committed step was lost, and never were there two gangs.
*Restarts* of the gang; *lost* (RPO): steps that were made again, and the seconds of training that they had taken;
*recovery* (RTO): from the failure to the first new step, the longest of the row's one run; *restored from*: the nodes'
memory, or the storage if a single rank had to read there; *run*: when. All nodes share one small machine, on which most
of a recovery is the start of Python.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a row found. `agreement`: how the job's end compares with that of an undisturbed one."""

    agreement: str
    restarts: int
    steps_lost: int
    seconds_lost: float
    recovery_seconds: float | None
    tiers: tuple[str, ...]

    @classmethod
    def of(cls, status: Mapping[str, Any], *, agreement: str = BIT_EXACT) -> Findings:
        """From the status of a job that is over."""
        recoveries = status.get("recoveries", ())
        return cls(
            agreement=agreement,
            restarts=status["restarts"],
            steps_lost=status.get("stepsLost", 0),
            seconds_lost=status.get("trainedSeconds", 0.0) - status.get("productiveSeconds", 0.0),
            recovery_seconds=max(_recovery_seconds(recoveries), default=None),
            tiers=tuple(dict.fromkeys(one["restoredTier"] for one in recoveries if "restoredTier" in one)),
        )


def _recovery_seconds(recoveries: Iterable[Mapping[str, Any]]) -> Iterator[float]:
    """From each failure to the next new step: an attempt that ended before it made one was a part of the recovery."""
    failed = None
    for recovery in recoveries:
        failed = failed or datetime.fromisoformat(recovery["failureTime"])
        if "resumedTime" in recovery:
            yield (datetime.fromisoformat(recovery["resumedTime"]) - failed).total_seconds()
            failed = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run of one row, which is named as `test_pods.py::test_rank_killed` is. `violation`: why its test failed;
    without one there are findings.
    """

    row: str
    time: str
    findings: Findings | None = None
    violation: str = ""

    @classmethod
    def now(cls, row: str, findings: Findings | None, violation: str) -> Result:
        if not violation and findings is None:
            violation = "its test recorded nothing"
        time = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(row=row, time=time, findings=None if violation else findings, violation=violation)


def append_result(file: Path, result: Result) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        lines.write(json.dumps(asdict(result)) + "\n")


def read_results(file: Path) -> dict[str, Result]:
    """The last of each row."""
    found = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        fields = json.loads(line)
        findings = fields.pop("findings")
        if findings is not None:
            findings = Findings(**{**findings, "tiers": tuple(findings["tiers"])})
        found[fields["row"]] = Result(**fields, findings=findings)
    return found


def describe(rows: Sequence[str], results: Mapping[str, Result]) -> str:
    """The cluster's part of the page: every row of the matrix, also those that were not run or failed."""
    ran = [results[row] for row in rows if row in results]
    failed = sum(bool(result.violation) for result in ran)
    lines = [
        "## On a cluster",
        "",
        f"`make chaos-cluster`: {len(rows)} rows, {failed} with a violation, {len(rows) - len(ran)} not run.",
        "",
        *_INTRODUCTION.splitlines(),
        "",
        "| what | disturbance | outcome | restarts | lost | recovery, s | restored from | run |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join([*titles_of(row), *_cells(results.get(row))])} |" for row in rows]
    return "\n".join(lines) + "\n"


def titles_of(row: str) -> tuple[str, str]:
    """What is disturbed, and how: the words of the test's file and name."""
    file, _, name = row.partition("::")
    name, _, case = name.removesuffix("]").partition("[")
    how = name.removeprefix("test_").replace("_", " ")
    return (
        file.removeprefix("test_").removesuffix(".py").replace("_", " "),
        f"{how}: {case.replace('-', ' ')}" if case else how,
    )


def _cells(result: Result | None) -> Iterable[str]:
    if result is None:
        return ("**not run**", *[_NONE] * 5)
    day = result.time.partition("T")[0]
    found = result.findings
    if found is None:
        return (f"**violated**: {_words(result.violation)}", *[_NONE] * 4, day)
    lost = f"{found.steps_lost} steps, {max(0.0, found.seconds_lost):.1f} s" if found.restarts else _NONE
    took = _NONE if found.recovery_seconds is None else f"{found.recovery_seconds:.1f}"
    return (found.agreement, str(found.restarts), lost, took, ", ".join(found.tiers) or _NONE, day)


def _words(text: str) -> str:
    """The beginning of a message, as a cell of a table."""
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= _LONGEST_WORDS else f"{line[:_LONGEST_WORDS]}…"
