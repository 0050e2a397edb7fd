"""The processes of one cell: what is told of one that fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.processes.cellprocess import Workplace

_FAILS = """
import sys
print("begun", file=sys.stderr)
{error}
print("a child goes on", "and on", "and on", sep="\\n", file=sys.stderr)
sys.exit(3)
"""
_ERROR = 'print("[rank0]: OSError: [Errno 24] Too many open files", file=sys.stderr)'


@pytest.mark.parametrize(
    ("error", "told"),
    [
        pytest.param(_ERROR, "[rank0]: OSError: [Errno 24] Too many open files", id="an-error-before-other-lines"),
        pytest.param("", "a child goes on | and on | and on", id="no-line-names-an-error"),
    ],
)
def test_a_failure_is_told_by_the_lines_that_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, told: str
) -> None:
    (tmp_path / "fails.py").write_text(_FAILS.format(error=error))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Workplace(tmp_path / "cells", time_limit_seconds=60) as place:
        outcome = place.run("fails", [])
    assert (outcome.status, outcome.error) == ("failed", told)
