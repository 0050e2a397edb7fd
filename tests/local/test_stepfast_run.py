"""`stepfast run` from end to end: real torchrun, SDK, agent and storage, as a user runs it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

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


def test_killed_and_resumed_training_ends_bit_for_bit_like_an_undisturbed_one(runs: Any, tmp_path: Path) -> None:
    common = ["--nproc-per-node", "2", str(EXAMPLE), *SMALL, "--steps", "24", "--final-state"]
    undisturbed = runs.start("--name", "undisturbed", *common, str(tmp_path / "one.pt"))
    assert runs.finish(undisturbed) == 0, runs.log[-6000:]
    crash = ["--crash-at-step", "13", "--crash-rank", "1"]
    disturbed = runs.start("--name", "disturbed", *common, str(tmp_path / "other.pt"), *crash)
    assert runs.finish(disturbed) == 0, runs.log[-6000:]

    summary = runs.summary
    assert (summary["attempt"], summary["restarts"]) == (2, 1)
    assert summary["recoveries"][0]["stepsLost"] == 3
    for rank in range(2):
        one, other = (torch.load(tmp_path / f"{name}.pt.rank{rank}") for name in ("one", "other"))
        assert _differences(one, other) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_interrupt_saves_and_the_same_command_goes_on_from_there(
    runs: Any, tmp_path: Path, number: signal.Signals
) -> None:
    arguments = ["--nproc-per-node", "2", str(EXAMPLE), *SMALL, "--steps", "4000"]
    process = runs.start(*arguments)
    runs.wait_for(lambda: len(runs.committed()) >= 1, process)
    process.send_signal(number)
    assert runs.finish(process) == 130
    suspended = runs.summary
    assert suspended["state"] == "Suspended"
    last = suspended["checkpoint"]["latestPersistedStep"]
    assert last == suspended["trainerStatus"]["globalStep"], "steps that were trained were not saved"
    assert runs.committed()[-1] == last
    assert runs.processes() == []

    again = runs.start(*arguments[:-1], str(last + 10))
    assert runs.finish(again) == 0, runs.log[-6000:]
    complete = runs.summary
    assert complete["state"] == "Complete"
    assert complete["checkpoint"]["restoredStep"] == last
    assert runs.committed()[-1] == last + 10


# A terminal with `stepfast run` in it; it closes when this program is killed.
TERMINAL = """
import os, pty, sys
pid, terminal = pty.fork()
if pid == 0:
    os.execv(sys.executable, [sys.executable, "-m", "stepfast.cli", "run", "--summary", "summary.json", *sys.argv[1:]])
while os.read(terminal, 4096):
    pass
"""


def test_terminal_that_closes_costs_no_step(runs: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-c", TERMINAL, str(EXAMPLE), *SMALL, "--steps", "4000"]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.DEVNULL) as terminal:
        try:
            runs.wait_for(runs.committed, terminal)
        finally:
            terminal.kill()
    deadline = time.monotonic() + 600
    while runs.processes():
        assert time.monotonic() < deadline, runs.processes()
        time.sleep(0.05)
    suspended = runs.summary
    assert suspended["state"] == "Suspended"
    last = suspended["checkpoint"]["latestPersistedStep"]
    assert last == suspended["trainerStatus"]["globalStep"] == runs.committed()[-1]


def test_job_that_is_to_outlive_its_terminal_does(runs: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import pathlib, time\nwhile not pathlib.Path('enough').exists(): time.sleep(0.05)\n")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        process = runs.start(str(script))
    finally:
        signal.signal(signal.SIGHUP, before)
    runs.wait_for(lambda: "attempt 1 launched" in runs.log, process)
    process.send_signal(signal.SIGHUP)
    (tmp_path / "enough").touch()
    assert runs.finish(process) == 0, runs.log[-6000:]


def test_script_that_fails_for_good_gives_its_own_exit_status(runs: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint('no data here')\nsys.exit(7)\n")
    process = runs.start("--max-restarts", "1", str(script))
    assert runs.finish(process) == 7
    summary = runs.summary
    assert (summary["state"], summary["restarts"]) == ("Failed", 1)
    assert summary["lastFailure"]["exitCode"] == 7
    assert "no data here" in runs.log
    assert runs.processes() == []


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
    runs: Any, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(LOST_STORAGE)
    storage = tmp_path / ".stepfast" / "checkpoints"
    job = tmp_path / "job.yaml"
    job.write_text(LOST_STORAGE_JOB % (storage, 3))
    assert runs.finish(runs.start("-f", "job.yaml")) == 1
    failed, log = runs.summary, runs.log
    assert failed["state"] == "Failed"
    assert "step 5 is in memory only" in log
    assert "stays in memory (/" in log

    assert runs.finish(runs.start("-f", "job.yaml")) == 1, "the storage is still away"
    storage.unlink()
    job.write_text(LOST_STORAGE_JOB % (storage, 120))
    assert runs.finish(runs.start("-f", "job.yaml")) == 0, runs.log[-6000:]
    assert runs.committed() == [5]
    assert runs.summary["checkpoint"]["restoredStep"] == 5
    assert not memory_folder(failed["metadata"]["uid"], tmp_path).exists()


READS_AN_OLDER_STEP = """
from stepfast.torch.tagged import Sharing, TaggedCheckpoints

checkpoints = TaggedCheckpoints(sharing=Sharing.EVERY_RANK, persist_all=True)
latest = checkpoints.latest()
if latest is not None:
    checkpoints.load(latest.step, "weight")
for step in range(latest.step + 1 if latest else 1, 5):
    opened = checkpoints.open(f"step{step}", step=step)
    opened.put("weight", step)
    if step > 2:
        checkpoints.load(step - 2, "weight")  # as the best model is, at the end of a training
    opened.commit()
    if step == 3:
        checkpoints.close()
        raise SystemExit("once more")
checkpoints.close()
"""


READS_AN_OLDER_STEP_AND_SAVES_NO_MORE = """
import os
from stepfast.torch.tagged import Sharing, TaggedCheckpoints

checkpoints = TaggedCheckpoints(sharing=Sharing.EVERY_RANK, persist_all=True)
if os.environ["STEPFAST_ATTEMPT"] == "1":
    for step in (1, 2):
        opened = checkpoints.open(f"step{step}", step=step)
        opened.put("weight", step)
        opened.commit()
    checkpoints.close()
    raise SystemExit("once more")
assert checkpoints.load(checkpoints.latest().step, "weight") == 2
checkpoints.progress(3)
assert checkpoints.load(1, "weight") == 1  # as when the best model is exported
checkpoints.close()
"""


def test_step_that_is_read_once_training_has_gone_on_is_not_the_one_that_was_restored(
    runs: Any, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(READS_AN_OLDER_STEP_AND_SAVES_NO_MORE)
    assert runs.run("train.py")["checkpoint"]["restoredStep"] == 2


def test_step_that_is_read_in_the_midst_of_training_is_not_the_one_that_was_restored(runs: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(READS_AN_OLDER_STEP)
    summary = runs.run("train.py")
    checkpoint = summary["checkpoint"]
    assert (checkpoint["latestPersistedStep"], checkpoint["restoredStep"]) == (4, 3)
    assert summary["recoveries"][0]["stepsLost"] == 0
