"""What docs/chaos.md says of the failure matrix's rows, whatever came of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testjobs.matrix import Findings, Result, append_result, describe, read_results, titles_of

KILLED, LOST, RETIRED = "test_pods.py::test_rank_killed", "test_nodes.py::test_node_lost", "test_pods.py::test_gone"
RECOVERY = {
    "restoredTier": "Memory", "failureTime": "2026-01-01T00:00:00Z", "resumedTime": "2026-01-01T00:00:12.340Z",
}  # fmt: skip
LONGER = {
    "restoredTier": "Persistent", "failureTime": "2026-01-01T00:01:00Z", "resumedTime": "2026-01-01T00:01:20Z",
}  # fmt: skip
IN_VAIN = {"failureTime": "2026-01-01T00:00:50Z"}
STATUS: dict[str, Any] = {
    "restarts": 1, "stepsLost": 3, "trainedSeconds": 40.0, "productiveSeconds": 39.5, "recoveries": [RECOVERY],
}  # fmt: skip


def row(results: dict[str, Result], name: str = KILLED) -> list[str]:
    """The cells of the page's row for it."""
    how = titles_of(name)[1]
    (line,) = [line for line in describe([KILLED, LOST], results).splitlines() if f"| {how} |" in line]
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def result(status: dict[str, Any] | None = None, violation: str = "", **options: str) -> dict[str, Result]:
    findings = None if status is None else Findings.of(status, **options)
    made = Result.now(KILLED, findings, violation)
    return {KILLED: made}


@pytest.mark.parametrize(
    ("status", "cells"),
    [
        pytest.param(STATUS, ["1", "3 steps, 0.5 s", "12.3", "Memory"], id="restarted"),
        pytest.param({"restarts": 0}, ["0", "–", "–", "–"], id="went on"),
        pytest.param(
            {
                **STATUS,
                "restarts": 2,
                "recoveries": [RECOVERY, LONGER],
            },
            ["2", "3 steps, 0.5 s", "20.0", "Memory, Persistent"],
            id="restarted twice",
        ),
        pytest.param(
            {**STATUS, "restarts": 3, "recoveries": [RECOVERY, IN_VAIN, LONGER]},
            ["3", "3 steps, 0.5 s", "30.0", "Memory, Persistent"],
            id="an attempt in between made no step",
        ),
    ],
)
def test_row_tells_what_its_job_ended_with(status: dict[str, Any], cells: list[str]) -> None:
    assert row(result(status))[:-1] == ["pods", "rank killed", "bit-exact", *cells]


def test_row_whose_gang_changed_its_size_says_how_near_it_came() -> None:
    assert row(result(STATUS, agreement="within 1e-6"))[2] == "within 1e-6"


@pytest.mark.parametrize(
    ("results", "outcome"),
    [
        pytest.param({}, "**not run**", id="not run"),
        pytest.param(result(STATUS, "assert 1 == 2\n  a | b"), "**violated**: assert 1 == 2 a \\| b", id="failed"),
        pytest.param(result(), "**violated**: its test recorded nothing", id="recorded nothing"),
    ],
)
def test_row_that_was_not_run_or_failed_is_shown_as_such(results: dict[str, Result], outcome: str) -> None:
    cells = row(results)
    assert cells[2] == outcome
    assert set(cells[3:-1]) == {"–"}


def test_heading_counts_what_failed_and_what_was_not_run() -> None:
    assert "2 rows, 1 with a violation, 1 not run." in describe([KILLED, LOST], result(STATUS, "it failed"))


def test_last_run_of_a_row_counts_and_others_stay(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "results.jsonl"
    assert read_results(file) == {}
    first, other = result(STATUS)[KILLED], Result.now(LOST, None, "it failed")
    again = result({**STATUS, "stepsLost": 7})[KILLED]
    for one in (first, other, again):
        append_result(file, one)
    assert read_results(file) == {KILLED: again, LOST: other}


def test_row_that_is_no_test_any_more_is_left_out() -> None:
    assert "gone" not in describe([KILLED], {RETIRED: Result.now(RETIRED, None, "it failed")})


def test_cases_of_a_test_are_told_apart() -> None:
    assert titles_of("test_control_plane.py::test_api_server_stopped[5-min]") == (
        "control plane",
        "api server stopped: 5 min",
    )
