"""The processes of one cell: started in sessions of their own, heard, and ended with all that they started."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.processes.procfs import command_of, families, marked

Event = dict[str, Any]

_MARK = "STEPFAST_BENCH_CELL"
_HELPER_START_SECONDS = 60.0
_TRACKER_SECONDS = 5.0
_ERROR_CHARACTERS = 400
_ERROR = re.compile(r"\w(Error|Exception): ")


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How a child ended (`done`, `failed`, `killed` by SIGKILL, `hung`: past its time), and what it said."""

    status: str
    error: str
    events: list[Event] = field(default_factory=list)

    def told(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]


class Teller:
    """The child's side: events as JSON lines on what was its standard output; whatever else prints goes to its log.

    Where torchrun has started it with others, each event tells its rank.
    """

    def __init__(self) -> None:
        self._rank = {"rank": int(os.environ["RANK"])} if int(os.environ.get("WORLD_SIZE", "1")) > 1 else {}
        self._file = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def tell(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": kind, **self._rank, **values}) + "\n")
        self._file.flush()


class Workplace:
    """A folder on disk and the processes that work in it; both are gone when it is left."""

    def __init__(self, parent: Path, time_limit_seconds: float) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="cell-", dir=parent)).absolute()
        self.key = f"bench{uuid.uuid4().hex[:8]}"
        self.sessions: set[int] = set()
        self._environment = {**os.environ, _MARK: self.key, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        root = str(Path(__file__).parents[2])
        self._environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._deadline = time.monotonic() + time_limit_seconds
        self._helper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Workplace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._end_all()
        for leftover in Path("/dev/shm").glob(f"*{self.key}*"):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def add_environment(self, values: Mapping[str, str]) -> None:
        self._environment.update(values)

    def start_helper(self, command: Sequence[str], is_ready: Callable[[], bool]) -> None:
        """Raises RuntimeError when it ends or does not become ready."""
        log = self.folder / "helper.log"
        with log.open("ab") as file:
            self._helper = subprocess.Popen(
                command, env=self._environment, stdout=file, stderr=file, start_new_session=True
            )
        self.sessions.add(self._helper.pid)
        deadline = time.monotonic() + _HELPER_START_SECONDS
        while not is_ready():
            if self._helper.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the helper did not start: {_last_words(log)}")
            time.sleep(0.05)

    def kill_helper(self) -> None:
        """SIGKILL, to it alone."""
        if self._helper is not None:
            self._helper.kill()
            self._helper.wait()
            self._helper = None

    def run(
        self,
        module: str,
        arguments: Sequence[str],
        on_event: Callable[[Event], None] = lambda _: None,
        *,
        launcher: Sequence[str] = ("-m",),
    ) -> Outcome:
        """Runs a child to its end, or to the end of the cell's time; the launcher is Python's own options."""
        log = self.folder / f"{module.rpartition('.')[2]}.log"
        with log.open("wb") as file:
            child = subprocess.Popen(
                [sys.executable, *launcher, module, *arguments],
                env=self._environment, stdout=subprocess.PIPE, stderr=file, start_new_session=True,
            )  # fmt: skip
        self.sessions.add(child.pid)
        outcome = Outcome(status="done", error="")

        def listen() -> None:
            assert child.stdout is not None
            with child.stdout as told:
                for line in told:
                    event: Event = json.loads(line)
                    outcome.events.append(event)
                    on_event({**event, "pid": child.pid})

        # What a killed child leaves behind may hold the pipe open for ever: the child's own end is what counts.
        listener = threading.Thread(target=listen, name="listen", daemon=True)
        listener.start()
        try:
            status = child.wait(timeout=max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            outcome.status, outcome.error = "hung", f"not done in the cell's time: {_last_words(log)}"
        else:
            listener.join(timeout=3)
            if status == -signal.SIGKILL:
                outcome.status = "killed"
            elif status != 0:
                outcome.status, outcome.error = "failed", _last_words(log)
        return outcome

    def left_processes(self) -> list[str]:
        """The commands of the cell's processes that live now, beside the helper and what it started."""
        helpers = families([self._helper.pid] if self._helper is not None else [])
        return [command_of(pid) for pid in marked(_MARK, self.key) if pid not in helpers]

    def _end_all(self) -> None:
        """Trackers come last: once nobody is left they remove the semaphores that the others leave in /dev/shm."""
        self.kill_helper()
        begin = time.monotonic()
        while living := marked(_MARK, self.key):
            patience = time.monotonic() - begin < _TRACKER_SECONDS
            for pid in living:
                if patience and "resource_tracker" in command_of(pid):
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def _last_words(log: Path) -> str:
    """The last lines that name an error, else the last lines: what a peer started may go on talking."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)]
    return " | ".join((errors or lines)[-3:])[-_ERROR_CHARACTERS:]
