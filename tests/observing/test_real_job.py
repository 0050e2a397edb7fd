"""A real job that fails once on this machine: what `explain` and `report` make of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stepfast.step import JobKey
from stepfast_operator.backends.statefolder import StateFolder

SCRIPT = """
import os, torch
from stepfast.torch import Checkpointer, every

model = torch.nn.Linear(8, 8)
ckpt = Checkpointer(model=model, interval=every(steps=2))
for step in range(ckpt.restore() + 1, 11):
    ckpt.step(step)
    if step == 5 and os.environ["STEPFAST_ATTEMPT"] == "1":
        raise RuntimeError("<the first attempt fails>")
ckpt.close()
"""


def stepfast(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "KUBECONFIG": str(folder / "none")}
    return subprocess.run(
        [sys.executable, "-m", "stepfast.cli", *words], cwd=folder, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the job has run."""
    path = tmp_path_factory.mktemp("job")
    (path / "train.py").write_text(SCRIPT)
    done = stepfast(path, "run", "--nproc-per-node", "1", "--max-restarts", "4", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    return path


def test_explain_tells_the_restart_and_what_it_cost(folder: Path) -> None:
    told = stepfast(folder, "explain", "train").stdout
    assert "attempt 1 failed: RankFailed (rank 0): RuntimeError: <the first attempt fails> (exit code 1)" in told
    assert re.search(r"in 1 restart\n  - the last recovery took .*, most of it to schedule", told)
    assert re.search(r"goodput \d+\.\d%", told)
    assert "it is never run again; a job of the same name goes on from step 10" in told


def test_what_bounds_the_job_is_noted_by_the_run(folder: Path) -> None:
    state = StateFolder(folder / ".stepfast" / "jobs", JobKey(namespace="local", name="train"))
    invocation = state.read_invocation()
    assert invocation is not None
    assert invocation.limits is not None
    assert invocation.limits.failure_policy.max_restarts == 4


def test_report_draws_both_attempts_the_recovery_and_the_saves(folder: Path) -> None:
    assert stepfast(folder, "report", "train").returncode == 0
    page = (folder / "train.html").read_text()
    found = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    life = json.loads(found[1])
    assert [each["ending"] for each in life["attempts"]] == ["RankFailed", "Complete"]
    assert all(known for each in life["attempts"] for known in each["known"])
    (recovery,) = life["recoveries"]
    assert [name for name, _, _ in recovery["phases"]] == ["detect", "flush", "schedule", "restore", "resume"]
    assert life["saves"][-1][1] == 10
    assert "&lt;the first attempt fails&gt;" in page
    assert "<the first attempt fails>" not in page
