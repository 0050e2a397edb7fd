"""A node for tests: a real agent process with its memory tier, and a training on it that saves known states.

Loaded by fixtures in conftest.py.
"""

from __future__ import annotations

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
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from eventual import wait_until
from stepfast import catalog
from stepfast.environment import Environment
from stepfast.errors import AgentUnavailable, ObjectNotFound, StorageUnavailable
from stepfast.histories import COLUMNS
from stepfast.layout import HISTORIES, job_folder, join, step_folder
from stepfast.nodeclient import NodeClient
from stepfast.nodestatus import JobStatus
from stepfast.step import JobKey, OnBusy, run_id
from stepfast.storage.base import Store
from stepfast.torch import Checkpointer, every
from stepfast.torch.checkpoint import Saved

JOB = JobKey(namespace="local", name="bad-storage")
STATE_BYTES = 1 << 20
# Short enough for tests to see many failures, long enough for a request on a busy machine.
PATIENCE = ("--storage-deadline", "1.0", "--retry-limit", "0.2")
STALL_SECONDS = 1.0  # a save may wait for a busy machine, never for the storage


class Bystander:
    """A thread that only sleeps: what holds it up is the machine, and would hold up anybody."""

    _TICK_SECONDS = 0.01

    def __init__(self) -> None:
        self._over = False
        self._state = (0.0, time.perf_counter() + self._TICK_SECONDS)  # seconds late, and when it is to wake
        self._thread = threading.Thread(target=self._tick, name="bystander", daemon=True)
        self._thread.start()

    def late_seconds(self) -> float:
        """How long it was held up, all in all."""
        late, due = self._state
        return late + max(0.0, time.perf_counter() - due)

    def end(self) -> None:
        self._over = True
        self._thread.join()

    def _tick(self) -> None:
        while not self._over:
            time.sleep(self._TICK_SECONDS)
            self._state = (self.late_seconds(), time.perf_counter() + self._TICK_SECONDS)


class Node:
    """An agent with folders of its own. `command` goes before the agent's: it takes something from it."""

    def __init__(
        self, storage_uri: str, *, memory_limit: int = 64 << 20, environment: Mapping[str, str] | None = None,
        command: Sequence[str] = (), options: Sequence[str] = PATIENCE,
    ) -> None:  # fmt: skip
        self.storage_uri = storage_uri
        self.run = run_id(uuid.uuid4().hex[:12], 1)
        self.folder = Path(tempfile.mkdtemp(prefix="stepfast-", dir="/tmp"))
        self.memory_dir = Path(tempfile.mkdtemp(prefix="stepfast-test-", dir="/dev/shm"))
        self.socket = str(self.folder / "agent.sock")
        self._memory_limit, self._command, self._options = memory_limit, command, options
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Node:
        """Starts the agent (again), and waits until it answers."""
        command = [*self._command, sys.executable, "-m", "stepfast_sidecar", "--socket", self.socket]
        command += ["--memory-dir", str(self.memory_dir), "--memory-limit", str(self._memory_limit)]
        command += ["--node", "n", *self._options]
        with (self.folder / "agent.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment)
        wait_until(self._answers, "the agent answers")
        return self

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log
        try:
            NodeClient(self.socket).status()
        except AgentUnavailable:
            return False
        return True

    @property
    def log(self) -> str:
        return (self.folder / "agent.log").read_text(errors="replace")

    def job(self) -> JobStatus:
        found = NodeClient(self.socket).status().job(JOB, self.run)
        assert found is not None
        return found

    @property
    def error(self) -> str | None:
        return self.job().persist_error

    def terminate(self, seconds: float = 90.0) -> None:
        """SIGTERM: it persists what it holds, and ends."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(seconds) == 0, self.log

    def forget_memory(self) -> None:
        """The memory tier is lost, as with the machine."""
        shutil.rmtree(self.memory_dir)
        self.memory_dir.mkdir(mode=0o700)

    def stop(self) -> None:
        """Ends every process that was started, and leaves nothing behind."""
        if self._process is not None and self._process.poll() is None:
            children = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
            self._process.wait()
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            psutil.wait_procs(children, timeout=10)
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.memory_dir, ignore_errors=True)

    def rank_environment(self) -> dict[str, str]:
        """The process environment of a rank on this node, but for its place among the others."""
        return {
            **os.environ, "STEPFAST_JOB": str(JOB), "STEPFAST_RUN": self.run, "STEPFAST_SOCKET": self.socket,
            "STEPFAST_STORAGE_URI": self.storage_uri, "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def environment_of(self, *, on_busy: OnBusy = OnBusy.WAIT, max_to_keep: int = 0) -> Environment:
        """What a launcher on this node tells the only rank of the job."""
        return Environment(
            job=JOB, run=self.run, rank=0, local_rank=0, world_size=1, local_world_size=1, node=0,
            storage_uri=self.storage_uri, socket=self.socket, resume_step=None, memory_bytes=0, interval=None,
            persist_interval_seconds=0.0, max_to_keep=max_to_keep, on_busy=on_busy, mtbf_seconds=3600.0,
        )  # fmt: skip


class Training:
    """A training of one rank in this process; what it holds at each step is known."""

    def __init__(self, node: Node, environment: Environment | None = None, *, size_bytes: int = STATE_BYTES) -> None:
        self.node = node
        self.state = {"weights": torch.zeros(size_bytes // 4), "step": 0}
        self.checkpointer = Checkpointer(
            interval=every(steps=1_000_000),
            environment=environment or node.environment_of(),
            state=self.state,
        )
        self.step = 0
        self.stalls: list[float] = []  # of the saves, in seconds, but for what held up a bystander, too
        self.bystander = Bystander()

    def save(self) -> Saved:
        """Trains a step and saves it."""
        self.step += 1
        self.state["weights"].fill_(self.step)
        self.state["step"] = self.step
        self.checkpointer.step(self.step)
        late = self.bystander.late_seconds()
        saved = self.checkpointer.save(self.step)
        self.stalls.append(saved.stall_seconds - (self.bystander.late_seconds() - late))
        return saved

    def save_until(self, condition: Callable[[], object], what: str, seconds: float = 90.0) -> None:
        """Trains and saves, step after step, until the condition holds."""

        def holds() -> bool:
            self.save()
            return bool(condition())

        wait_until(holds, what, seconds)

    def live_through(
        self, break_down: Callable[[], object], heal: Callable[[], object], says: str, store: Store
    ) -> Saved:
        """Two steps are committed, the storage fails and heals; returns the newest save before it healed.

        While it fails training goes on as before, and the job's status says why nothing is persisted.
        """
        node = self.node
        for _ in range(2):
            self.save().wait(timeout_seconds=90)
        before = verify(store, at_least=[1, 2])
        self.stalls.clear()
        break_down()
        # On a busy machine the deadline may cut the last attempt off, and that is what is said then.
        self.save_until(lambda: re.search(says, node.error or ""), f"the status says {says}")
        error = node.error or ""
        assert node.storage_uri in error
        assert re.search(r"step \d+ is ", error)
        many = 2 * len(self.stalls) + 10
        self.save_until(lambda: len(self.stalls) > many, "many more saves")
        assert max(self.stalls) < STALL_SECONDS
        assert node.error is not None
        newest = self.save()
        with pytest.raises(StorageUnavailable, match=f"step {newest.step} .*({says}|no answer in time)"):
            newest.wait(timeout_seconds=0.1)

        heal()
        verify(store, at_least=before)
        newest.wait(timeout_seconds=90)
        wait_until(lambda: node.error is None, "the status forgets the failure")
        wait_until(lambda: node.job().latest_persisted_step == newest.step, "the newest is persisted")
        self.save()
        self.checkpointer.close(timeout_seconds=90)
        assert {*before, newest.step, self.step} <= set(verify(store))
        return newest

    def check_history(self, store: Store) -> None:
        """One row for every save that was committed or dropped, and every save was one or the other."""
        saves = list(range(1, self.step + 1))
        wait_until(lambda: sorted(row_steps(store, "Committed", "Dropped")) == saves, "every save has a row")
        assert row_steps(store, "Committed") == committed(store)
        assert len(row_steps(store, "Dropped")) == self.node.job().saves.dropped

    def end(self) -> None:
        """Goes without waiting for anything."""
        self.checkpointer._end()
        self.bystander.end()


def committed(store: Store) -> list[int]:
    return [found.step for found in catalog.committed_steps(store, job_folder(JOB))]


def verify(store: Store, *, at_least: Sequence[int] = ()) -> list[int]:
    """Reads every committed step against its checksums; returns the steps."""
    steps = committed(store)
    assert set(at_least) <= set(steps)
    for step in steps:
        assert list(catalog.verify_step(store, job_folder(JOB), step))
    return steps


def history(store: Store, folder: str = job_folder(JOB)) -> list[dict[str, str]]:
    """The rows of a job's checkpointHistories.csv."""
    lines = store.read(join(folder, HISTORIES)).decode().splitlines()
    assert tuple(lines[0].split(",")) == COLUMNS
    return [dict(zip(COLUMNS, line.split(","), strict=True)) for line in lines[1:]]


def row_steps(store: Store, *outcomes: str) -> list[int]:
    """The steps of all rows with these outcomes, ascending; none while there is no file."""
    try:
        return sorted(int(row["global_step"]) for row in history(store) if row["outcome"] in outcomes)
    except ObjectNotFound:
        return []


def parts(store: Store, step: int) -> list[str]:
    """The part records of the step."""
    names = [entry.name for entry in store.list(join(job_folder(JOB), step_folder(step)))]
    return [name for name in names if name.startswith("part-")]
