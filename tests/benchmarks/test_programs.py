"""The programs that `make` runs by themselves find what they import: pytest's paths do not reach them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("target", ["bench-scale", "chaos"])
def test_program_of_a_target_starts(target: str) -> None:
    here = ["--dry-run", "--no-print-directory", f"BIN={Path(sys.executable).parent}", target]
    command = subprocess.run(["make", *here], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    started = subprocess.run(
        ["env", *shlex.split(command.splitlines()[-1]), "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert started.returncode == 0, started.stderr
    assert "usage:" in started.stdout
