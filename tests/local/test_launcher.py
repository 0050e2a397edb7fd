"""The launcher on real torchrun: it tells the first failure at once, and leaves with the rank's own exit
status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys
if os.environ["RANK"] == "1" and sys.argv[1] != "wait":
    if sys.argv[1] == "raise":
        raise ValueError("boom")
    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "kill" else sys.exit(int(sys.argv[1]))
if sys.argv[1] != "0":
    open(os.path.join(os.path.dirname(__file__), "waiting-" + os.environ["RANK"]), "w").close()
    signal.pause()
"""


def start(folder: Path, how: str) -> subprocess.Popen[bytes]:
    (folder / "script.py").write_text(SCRIPT)
    options = [
        "--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
        "--rdzv-id=test",
        "--local-addr=127.0.0.1", "--max-restarts=0", f"--log-dir={folder}/logs", "--redirects=3",
    ]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "stepfast.launcher", *options, "--", str(folder / "script.py"), how],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "STEPFAST_TERMINATION_LOG": str(folder / "termination.json"),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        pytest.param("3", {"exitCode": 3, "signal": None, "message": "exit code 3"}, id="exit"),
        pytest.param("raise", {"exitCode": 1, "message": "ValueError: boom (exit code 1)"}, id="exception"),
        pytest.param("kill", {"exitCode": 137, "signal": "SIGKILL", "message": "killed by SIGKILL"}, id="signal"),
    ],
)
def test_first_failure_is_told_and_its_exit_status_kept(
    owned: str, tmp_path: Path, how: str, expected: dict[str, object]
) -> None:
    process = start(tmp_path, how)
    assert process.wait(timeout=180) == expected["exitCode"]
    said = json.loads((tmp_path / "termination.json").read_text())
    assert {key: said[key] for key in expected} == expected
    assert (said["rank"], said["localRank"]) == (1, 1)


def test_success_is_told(owned: str, tmp_path: Path) -> None:
    assert start(tmp_path, "0").wait(timeout=180) == 0
    assert json.loads((tmp_path / "termination.json").read_text())["exitCode"] == 0


def test_stopped_launcher_ends_its_ranks_and_blames_none(
    owned: str, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    process = start(tmp_path, "wait")
    wait_until(lambda: len(list(tmp_path.glob("waiting-*"))) == 2, "both ranks wait")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=90) == 128 + signal.SIGTERM
    assert not (tmp_path / "termination.json").exists()
