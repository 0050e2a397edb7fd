"""The launchers that wait for the next attempt: taken when it comes, missed by nobody when they are gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from eventual import wait_until
from stepfast.step import JobKey
from stepfast_operator.backends import processes
from stepfast_operator.backends.gangprocess import RUN
from stepfast_operator.backends.statefolder import StateFolder

# Trains until it is told to end; each attempt tells who its rank and its launcher are, and what it was given.
TRAIN = """
import json, os, sys, time
from pathlib import Path
import torch
from stepfast.torch import Checkpointer, every
folder, attempt = Path(sys.argv[1]), os.environ["STEPFAST_ATTEMPT"]
with Checkpointer(state={"x": torch.zeros(1)}, interval=every(steps=5)) as checkpointer:
    step = checkpointer.restore()
    told = {"rank": os.getpid(), "launcher": os.getppid(), "resumed": step, "run": os.environ["STEPFAST_RUN"],
            "mine": os.environ["MINE"], "folder": os.getcwd(), "input": os.readlink("/proc/self/fd/0")}
    (folder / f"{attempt}.tmp").write_text(json.dumps(told))
    (folder / f"{attempt}.tmp").rename(folder / attempt)
    while not (folder / "end").exists():
        step += 1
        checkpointer.step(step)
        time.sleep(0.02)
"""


@pytest.fixture
def training(owned: str, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`stepfast run` of one rank that trains, with the next attempt's launcher waiting."""
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "stepfast.cli", "run", "--name", "gang", "--nproc-per-node", "1"]
    with (tmp_path / "run.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--env", "MINE=given", "train.py", str(tmp_path)],
            cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    wait_until(lambda: process.poll() is not None or waiting(tmp_path, 2), "the next attempt's launcher")
    assert process.poll() is None, (tmp_path / "run.log").read_text()
    yield process
    process.kill()
    process.wait()


def uid_of(folder: Path) -> str | None:
    saved = StateFolder(folder / ".stepfast" / "jobs", JobKey(namespace="local", name="gang")).read()
    return saved.uid if saved is not None else None


def waiting(folder: Path, attempt: int) -> list[int]:
    """The processes that were started for the attempt."""
    uid = uid_of(folder)
    return sorted(processes.marked(RUN, lambda run: uid is not None and run == f"{uid}-{attempt}"))


def told(folder: Path, attempt: int) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / str(attempt)).read_text())
    return document


def test_next_attempt_is_launched_by_the_process_that_waited(training: subprocess.Popen[bytes], tmp_path: Path) -> None:
    (standby,) = waiting(tmp_path, 2)
    os.kill(told(tmp_path, 1)["rank"], signal.SIGKILL)
    wait_until((tmp_path / "2").exists, "the second attempt")
    wait_until(lambda: waiting(tmp_path, 3), "a launcher for the third")
    (tmp_path / "end").touch()

    assert training.wait() == 0, (tmp_path / "run.log").read_text()
    second = told(tmp_path, 2)
    assert second["launcher"] == standby
    assert (second["run"], second["mine"]) == (f"{uid_of(tmp_path)}-2", "given")
    assert (second["folder"], second["input"]) == (str(tmp_path), os.devnull)
    assert second["resumed"] > 0
    assert not processes.marked(RUN, lambda run: run.startswith(f"{uid_of(tmp_path)}-"))


def test_attempt_whose_waiting_launcher_is_gone_gets_another(training: subprocess.Popen[bytes], tmp_path: Path) -> None:
    (standby,) = waiting(tmp_path, 2)
    os.kill(standby, signal.SIGKILL)
    os.kill(told(tmp_path, 1)["rank"], signal.SIGKILL)
    wait_until((tmp_path / "2").exists, "the second attempt")
    (tmp_path / "end").touch()

    assert training.wait() == 0, (tmp_path / "run.log").read_text()
    assert told(tmp_path, 2)["launcher"] != standby


def test_waiting_launcher_is_no_gang_and_goes_with_its_supervisor(
    training: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    (standby,) = waiting(tmp_path, 2)
    rank = psutil.Process(told(tmp_path, 1)["rank"])
    training.kill()
    training.wait()

    wait_until(lambda: not psutil.pid_exists(standby) or waiting(tmp_path, 2) == [], "the waiting launcher is gone")
    wait_until(lambda: not rank.is_running(), "the rank is gone")
