"""`stepfast run` where nothing more can be written: on the disk of a job's own folder, and to where it tells what it
does. Neither ends a gang that trains.
"""

from __future__ import annotations

import json
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from faults import Mounts

# Saves each step until it is told that it is enough, and says nothing itself.
TRAINING = """
import time, torch
from pathlib import Path
from stepfast.torch import Checkpointer, every
checkpointer = Checkpointer(state={"weights": torch.zeros(4)}, interval=every(steps=1))
step = checkpointer.restore() or 0
while not Path("enough").exists():
    step += 1
    checkpointer.save(step)
    time.sleep(0.05)
checkpointer.close()
Path("last").write_text(str(step))
"""

# Leaves a file for each launch. The first one fails when it is told to.
FAILING = """
import os, time
from pathlib import Path
attempt = os.environ["STEPFAST_ATTEMPT"]
Path(f"launched-{attempt}").touch()
while attempt == "1":
    time.sleep(0.02)
    if Path("fail").exists():
        raise SystemExit(3)
"""
FAILING_JOB = {
    "apiVersion": "stepfast.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "train"},
    "spec": {
        "trainer": {"command": ["python", "train.py"], "numProcPerNode": 1},
        "failurePolicy": {"backoff": {"baseSeconds": 0}},
    },
}


class Disk:
    """A small file system of its own for the folders of a folder's jobs."""

    def __init__(self, tmpfs: Mounts, folder: Path) -> None:
        self.place = tmpfs("size=1m")
        (folder / ".stepfast").mkdir()
        (folder / ".stepfast" / "jobs").symlink_to(self.place)
        self._filler = self.place / "filler"

    def fill(self) -> None:
        with suppress(OSError), self._filler.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def clear(self) -> None:
        self._filler.unlink()

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.place / "local.train" / "status.json").read_text())["status"]
        return found


@pytest.fixture
def disk(tmpfs: Mounts, tmp_path: Path) -> Disk:
    return Disk(tmpfs, tmp_path)


def test_gang_trains_to_its_end_while_its_jobs_folder_is_full(runs: Any, disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    process = runs.start("train.py")
    runs.wait_for(runs.committed, process)

    def is_told() -> bool:
        disk.fill()  # what a write in between had freed, too
        return "status.json cannot be written (No space left on device)" in runs.log

    runs.wait_for(is_told, process)
    before = runs.committed()[-1]
    runs.wait_for(lambda: runs.committed()[-1] > before + 5, process)
    (tmp_path / "enough").touch()
    assert runs.finish(process) == 0, runs.log[-6000:]
    assert (runs.summary["state"], runs.summary["attempt"]) == ("Complete", 1)
    assert runs.committed()[-1] == int((tmp_path / "last").read_text())
    assert runs.log.count("cannot be written") == 1
    assert runs.processes() == []


def test_status_is_written_again_once_there_is_room(runs: Any, disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    process = runs.start("train.py")
    runs.wait_for(runs.committed, process)

    def is_told() -> bool:
        disk.fill()
        return "cannot be written" in runs.log

    runs.wait_for(is_told, process)
    disk.clear()
    runs.wait_for(lambda: "status.json is written again" in runs.log, process)
    (tmp_path / "enough").touch()
    assert runs.finish(process) == 0, runs.log[-6000:]
    assert disk.status["state"] == "Complete"


def test_attempt_that_cannot_be_noted_is_launched_once_it_can(runs: Any, disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILING)
    (tmp_path / "job.json").write_text(json.dumps(FAILING_JOB))
    process = runs.start("-f", "job.json")
    runs.wait_for((tmp_path / "launched-1").exists, process)
    runs.wait_for(lambda: disk.status["attempt"] == 1, process)
    disk.fill()
    (tmp_path / "fail").touch()

    def is_told() -> bool:
        disk.fill()
        return "attempt 2 is not launched yet" in runs.log

    runs.wait_for(is_told, process)
    assert not (tmp_path / "launched-2").exists(), "a launch that nobody would know of"
    disk.clear()
    assert runs.finish(process) == 0, runs.log[-6000:]
    assert (tmp_path / "launched-2").exists()
    assert runs.log.count("attempt 2 is not launched yet") == 1
    summary = runs.summary
    assert (summary["state"], summary["attempt"], summary["restarts"]) == ("Complete", 2, 1)
    assert summary["lastFailure"]["exitCode"] == 3
    assert disk.status["state"] == "Complete"


def test_launch_that_fails_is_made_again(runs: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILING)
    (tmp_path / "job.json").write_text(json.dumps(FAILING_JOB))
    process = runs.start("-f", "job.json")
    runs.wait_for((tmp_path / "launched-1").exists, process)
    obstacle = tmp_path / ".stepfast" / "jobs" / "local.train" / "attempt-0002"
    obstacle.touch()
    (tmp_path / "fail").touch()
    runs.wait_for(lambda: "attempt 2 is not launched yet: [Errno 20] Not a directory" in runs.log, process)
    obstacle.unlink()
    assert runs.finish(process) == 0, runs.log[-6000:]
    assert (runs.summary["state"], runs.summary["attempt"]) == ("Complete", 2)


def test_folder_that_is_full_before_the_first_launch_is_an_error(runs: Any, disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    disk.fill()
    assert runs.finish(runs.start("train.py")) == 1
    assert "No space left on device" in runs.log
    assert runs.processes() == []


@pytest.mark.parametrize("end", ["closed pipe", "full disk"])
def test_output_that_nobody_takes_ends_no_training(runs: Any, tmp_path: Path, end: str) -> None:
    (tmp_path / "train.py").write_text(TRAINING + "print('done', flush=True)\n")
    if end == "closed pipe":
        process = runs.start("train.py", out=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline()
    else:
        with open("/dev/full", "wb") as full:
            process = runs.start("train.py", out=full)
    runs.wait_for(lambda: len(runs.committed()) > 3, process)
    (tmp_path / "enough").touch()
    assert runs.finish(process) == 0, runs.log[-6000:]
    assert runs.summary["state"] == "Complete"
    assert runs.committed()[-1] == int((tmp_path / "last").read_text())
    assert runs.log == "", "nothing of it goes to standard error"
    assert runs.processes() == []
