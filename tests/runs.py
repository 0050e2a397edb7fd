"""`stepfast run` as a user runs it, in a folder of its own; whatever it starts ends with the test.

Loaded by fixtures in conftest.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from interpreters import Interpreter
from stepfast import catalog
from stepfast.storage import open_store

SECONDS = 600


class Runs:
    """Jobs in one folder."""

    def __init__(self, folder: Path, *, forks_of: Interpreter | None = None) -> None:
        """`forks_of`: has what launchers and ranks import; by default each of them is a python of its own."""
        self.folder = folder
        self._forks_of = forks_of
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str, out: IO[bytes] | int | None = None, **environment: str) -> subprocess.Popen[bytes]:
        """Begins `stepfast run` with these arguments. `out`: its standard output; by default that goes to the log."""
        stepfast = ["-m", "stepfast.cli"]
        if self._forks_of is not None:
            python = self._forks_of.program
            environment = {"PYTHON_EXEC": python, **environment}  # by which torchrun asks for the ranks'
            lines = f"import sys; sys.executable = {python!r}; from stepfast.cli import main; raise SystemExit(main())"
            stepfast = ["-c", lines]
        with open(self.folder / "run.log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, *stepfast, "run", "--summary", "summary.json", *arguments],
                cwd=self.folder, stdin=subprocess.DEVNULL, stderr=log, start_new_session=True,
                stdout=log if out is None else out,
                env={**os.environ, **environment},
            )  # fmt: skip
        self._started.append(process)
        return process

    def finish(self, process: subprocess.Popen[bytes]) -> int:
        """Its exit status."""
        try:
            return process.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(self.log[-6000:])

    def run(self, *arguments: str, **environment: str) -> dict[str, Any]:
        """Runs a job that succeeds; its summary."""
        assert self.finish(self.start(*arguments, **environment)) == 0, self.log[-6000:]
        return self.summary

    @property
    def log(self) -> str:
        """What all of them have said so far."""
        path = self.folder / "run.log"
        return path.read_text() if path.exists() else ""

    @property
    def summary(self) -> dict[str, Any]:
        """Of the one that ended last."""
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return summary

    def committed(self, job: str = "train") -> list[int]:
        """The steps in the default storage."""
        store = open_store(str(self.folder / ".stepfast" / "checkpoints"))
        try:
            return [step.step for step in catalog.committed_steps(store, f"local/{job}")]
        finally:
            store.close()

    def wait_for(self, what: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        """Until it is so, while the job runs."""
        deadline = time.monotonic() + SECONDS
        while not what():
            assert process.poll() is None, self.log[-4000:]
            assert time.monotonic() < deadline, self.log[-4000:]
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.05)

    def processes(self) -> list[psutil.Process]:
        """Those whose working folder this is: ranks, launchers, agents and persisters."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.cwd() == str(self.folder) and process.pid != os.getpid():
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def end(self) -> None:
        """Ends every process that was started, and what these started."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()
        for left in self.processes():
            with suppress(psutil.NoSuchProcess):
                left.kill()
