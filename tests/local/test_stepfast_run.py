"""`stepfast run` from end to end: real torchrun, SDK, agent and storage, as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from stepfast import catalog
from stepfast.storage import open_store
from stepfast_operator.backends.memoryfolder import memory_folder

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt_stdlib" / "train.py"
SMALL = [
    "--layers",
    "1",
    "--width",
    "32",
    "--heads",
    "2",
    "--context",
    "16",
    "--batch-size",
    "8",
    "--save-every",
    "5",
    "--eval-every",
    "1000",
]
SECONDS = 300

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `stepfast run` in the test's folder; ends it, and whatever it started, with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*arguments: str) -> subprocess.Popen[bytes]:
        with open(tmp_path / "run.log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "stepfast.cli", "run", "--summary", "summary.json", *arguments],
                cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
    for left in _processes_in(tmp_path):
        with suppress(psutil.NoSuchProcess):
            left.kill()


def _processes_in(folder: Path) -> list[psutil.Process]:
    """Processes whose working folder this is: ranks, launchers, agents and persisters of the test."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and process.pid != os.getpid():
                found.append(process)
        except psutil.Error:
            continue
    return found


def _summary(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def _committed(folder: Path) -> list[int]:
    store = open_store(str(folder / ".stepfast" / "checkpoints"))
    try:
        return [step.step for step in catalog.committed_steps(store, "local/train")]
    finally:
        store.close()


def _wait_for(what: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not what():
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        try:
            process.wait(timeout=0.05)
        except subprocess.TimeoutExpired:
            continue


def _finish(process: subprocess.Popen[bytes], folder: Path) -> int:
    try:
        return process.wait(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        pytest.fail((folder / "run.log").read_text()[-6000:])


def _differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two states are not bit for bit the same."""
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and torch.equal(one, other)
        return [] if same else [where]
    if isinstance(one, dict):
        if list(one) != list(other):
            return [f"{where} has other keys"]
        return [found for key in one for found in _differences(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [f"{where} has another length"]
        pairs = enumerate(zip(one, other, strict=True))
        return [found for i, (a, b) in pairs for found in _differences(a, b, f"{where}.{i}")]
    return [] if one == other or repr(one) == repr(other) == "nan" else [where]


def test_killed_and_resumed_training_ends_bit_for_bit_like_an_undisturbed_one(start: Start, tmp_path: Path) -> None:
    common = ["--nproc-per-node", "2", str(EXAMPLE), *SMALL, "--steps", "24", "--final-state"]
    undisturbed = start("--name", "undisturbed", *common, str(tmp_path / "one.pt"))
    assert _finish(undisturbed, tmp_path) == 0, (tmp_path / "run.log").read_text()[-6000:]
    crash = ["--crash-at-step", "13", "--crash-rank", "1"]
    disturbed = start("--name", "disturbed", *common, str(tmp_path / "other.pt"), *crash)
    assert _finish(disturbed, tmp_path) == 0, (tmp_path / "run.log").read_text()[-6000:]

    summary = _summary(tmp_path)
    assert (summary["attempt"], summary["restarts"]) == (2, 1)
    assert summary["recoveries"][0]["stepsLost"] == 3
    for rank in range(2):
        one, other = (torch.load(tmp_path / f"{name}.pt.rank{rank}") for name in ("one", "other"))
        assert _differences(one, other) == []


def test_interrupt_saves_and_the_same_command_goes_on_from_there(start: Start, tmp_path: Path) -> None:
    arguments = ["--nproc-per-node", "2", str(EXAMPLE), *SMALL, "--steps", "4000"]
    process = start(*arguments)
    _wait_for(lambda: len(_committed(tmp_path)) >= 1, process, tmp_path / "run.log")
    process.send_signal(signal.SIGINT)
    assert _finish(process, tmp_path) == 130
    suspended = _summary(tmp_path)
    assert suspended["state"] == "Suspended"
    last = suspended["checkpoint"]["latestPersistedStep"]
    assert last == suspended["trainerStatus"]["globalStep"], "steps that were trained were not saved"
    assert _committed(tmp_path)[-1] == last
    assert _processes_in(tmp_path) == []

    again = start(*arguments[:-1], str(last + 10))
    assert _finish(again, tmp_path) == 0, (tmp_path / "run.log").read_text()[-6000:]
    complete = _summary(tmp_path)
    assert complete["state"] == "Complete"
    assert complete["checkpoint"]["restoredStep"] == last
    assert _committed(tmp_path)[-1] == last + 10


def test_script_that_fails_for_good_gives_its_own_exit_status(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint('no data here')\nsys.exit(7)\n")
    process = start("--max-restarts", "1", str(script))
    assert _finish(process, tmp_path) == 7
    summary = _summary(tmp_path)
    assert (summary["state"], summary["restarts"]) == ("Failed", 1)
    assert summary["lastFailure"]["exitCode"] == 7
    assert "no data here" in (tmp_path / "run.log").read_text()
    assert _processes_in(tmp_path) == []


# The storage is away from the moment of the first save to the end; the script itself succeeds.
LOST_STORAGE = """
import sys, torch
from pathlib import Path
from stepfast.torch import Checkpointer
checkpointer = Checkpointer(state={"weights": torch.ones(4)})
if not checkpointer.restore():
    Path(sys.argv[1]).write_text("in the place of the storage")
    checkpointer.save(5)
"""
LOST_STORAGE_JOB = """
apiVersion: stepfast.dev/v1alpha1
kind: TrainingJob
metadata: {name: train}
spec:
  trainer: {command: [torchrun, --, train.py, %s], numProcPerNode: 1}
  failurePolicy: {flushTimeoutSeconds: %d}
"""


def test_last_step_that_the_storage_did_not_take_is_no_success_and_persisted_by_the_same_command(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(LOST_STORAGE)
    storage = tmp_path / ".stepfast" / "checkpoints"
    job = tmp_path / "job.yaml"
    job.write_text(LOST_STORAGE_JOB % (storage, 3))
    assert _finish(start("-f", "job.yaml"), tmp_path) == 1
    failed, log = _summary(tmp_path), (tmp_path / "run.log").read_text()
    assert failed["state"] == "Failed"
    assert "step 5 is in memory only" in log
    assert "stays in memory (/" in log

    assert _finish(start("-f", "job.yaml"), tmp_path) == 1, "the storage is still away"
    storage.unlink()
    job.write_text(LOST_STORAGE_JOB % (storage, 120))
    assert _finish(start("-f", "job.yaml"), tmp_path) == 0, (tmp_path / "run.log").read_text()[-6000:]
    assert _committed(tmp_path) == [5]
    assert _summary(tmp_path)["checkpoint"]["restoredStep"] == 5
    assert not memory_folder(failed["metadata"]["uid"], tmp_path).exists()
