"""Fixtures of the SDK's tests: checkpointers on a storage of their own, a real agent, scripts under torchrun."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from eventual import wait_until
from interpreters import TORCH
from stepfast.admission import Interval
from stepfast.environment import Environment
from stepfast.step import JobKey, OnBusy
from stepfast.torch import Checkpointer

DEADLINE_SECONDS = 180.0
JOB = JobKey(namespace="local", name="training")


@pytest.fixture(scope="session")
def until() -> Callable[..., Any]:
    """`until(condition, what)`: waits for it, with a deadline."""

    def wait(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> Any:
        return wait_until(condition, what, seconds)

    return wait


@pytest.fixture
def await_memory() -> Iterator[Callable[[int], None]]:
    """`await_memory(size_bytes)`: the test goes on once the machine has that much to spare, and alone among those that
    ask so: each of two that look at once would count on what the other takes.
    """
    with open(__file__) as lock:  # let go when it is closed

        def wait(size_bytes: int) -> None:
            fcntl.flock(lock, fcntl.LOCK_EX)
            wait_until(
                lambda: psutil.virtual_memory().available > size_bytes, f"{size_bytes:,} bytes of free memory", 600.0
            )

        yield wait


# ---------------------------------------------------------------- one process


@dataclass(slots=True)
class Bench:
    """One job on one storage, and every checkpointer that was made on it."""

    storage: Path
    job: JobKey = JOB
    socket: str | None = None
    checkpointers: list[Checkpointer] = field(default_factory=list)
    launches: int = 0

    @property
    def folder(self) -> Path:
        """Where the job's steps are."""
        return self.storage / self.job.namespace / self.job.name

    def step_folder(self, step: int) -> Path:
        return self.folder / f"global_step{step}"

    def environment(self, **changes: Any) -> Environment:
        """What a launcher would tell a single rank, of a run of its own."""
        self.launches += 1
        plain = Environment(
            job=self.job, run=f"{uuid.uuid4().hex[:8]}-{self.launches}", rank=0, local_rank=0, world_size=1,
            local_world_size=1, node=0, storage_uri=self.storage.as_uri(), socket=self.socket, resume_step=None,
            memory_bytes=0, interval=Interval(steps=1), persist_interval_seconds=0.0, max_to_keep=100,
            on_busy=OnBusy.WAIT, mtbf_seconds=3600.0,
        )  # fmt: skip
        return replace(plain, **changes)

    def make(self, environment: Environment | None = None, **arguments: Any) -> Checkpointer:
        """A checkpointer, ended with the test."""
        made = Checkpointer(environment=environment or self.environment(), **arguments)
        self.checkpointers.append(made)
        return made

    def leave(self, checkpointer: Checkpointer) -> None:
        """Ends it as a `with` block does that an exception leaves: nothing is waited for."""
        checkpointer.__exit__(RuntimeError, RuntimeError(), None)

    def end(self) -> None:
        for checkpointer in self.checkpointers:
            self.leave(checkpointer)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Checkpointers without agent, on a folder of the test's own."""
    made = Bench(tmp_path / "storage")
    try:
        yield made
    finally:
        made.end()


@pytest.fixture(scope="session")
def make_bench() -> Callable[[Path], Bench]:
    """`make_bench(folder)`: checkpointers on a storage in that folder; whoever makes them ends them."""
    return lambda folder: Bench(folder / "storage")


@pytest.fixture(scope="session")
def round_trip(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[Any, Any]]:
    """`round_trip(state, weights_only=True)`: the dict as another process would restore it from the storage."""

    def travel(state: dict[Any, Any], *, weights_only: bool = True) -> dict[Any, Any]:
        made = Bench(tmp_path_factory.mktemp("trip"))
        back: dict[Any, Any] = {}
        try:
            saved = made.make(state=state).save(1)
            assert saved.saved
            assert made.make(state=back, weights_only=weights_only).restore() == 1
        finally:
            made.end()
            shutil.rmtree(made.storage)
        return back

    return travel


# ---------------------------------------------------------------- comparing


def bits_of(tensor: torch.Tensor) -> bytes:
    """A tensor's elements in row-major order."""
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    if not plain.numel():
        return b""
    raw = torch.empty(0, dtype=torch.uint8).set_(plain.untyped_storage())
    first, width = plain.storage_offset() * plain.element_size(), plain.element_size()
    places = torch.full(plain.shape, first, dtype=torch.int64)
    for dimension, (size, stride) in enumerate(zip(plain.shape, plain.stride(), strict=True)):
        reach = torch.arange(size) * stride * width
        places = places + reach.reshape([-1 if d == dimension else 1 for d in range(plain.dim())])
    index = places.reshape(-1, 1) + torch.arange(width)
    return raw[index.reshape(-1)].numpy().tobytes()


def same(a: Any, b: Any, where: str = "state") -> None:
    """Fails unless both are of one type and equal to the last bit, containers in the same order."""
    assert type(a) is type(b), f"{where}: {type(a)} became {type(b)}"
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad), where
        assert bits_of(a) == bits_of(b), where
    elif isinstance(a, np.ndarray | np.generic):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        assert a.tobytes() == b.tobytes(), where
    elif isinstance(a, dict):
        assert getattr(a, "default_factory", None) is getattr(b, "default_factory", None), where
        assert len(a) == len(b), f"{where}: {list(a)} became {list(b)}"
        for (key, child), (other, twin) in zip(a.items(), b.items(), strict=True):
            name = key if isinstance(key, str) else type(key).__name__
            same(key, other, f"{where}: key {name!r}")
            same(child, twin, f"{where}.{name!r}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for index, (child, twin) in enumerate(zip(a, b, strict=True)):
            same(child, twin, f"{where}[{index}]")
    elif isinstance(a, set | frozenset):
        for child, twin in zip(sorted(a, key=repr), sorted(b, key=repr), strict=True):
            same(child, twin, where)
    elif isinstance(a, float | complex):
        parts = (a, b) if isinstance(a, float) else (a.real, b.real, a.imag, b.imag)
        packed = [struct.pack("<d", part) for part in parts]
        assert packed[0::2] == packed[1::2], f"{where}: {a!r} became {b!r}"
    else:
        assert a == b, where


@pytest.fixture(scope="session")
def assert_same() -> Callable[..., None]:
    """`assert_same(a, b)`: equal in type and to the last bit."""
    assert math.isnan(math.nan)
    return same


# ---------------------------------------------------------------- the agent


@dataclass(slots=True)
class RunningAgent:
    """A node's agent, as a process of its own."""

    folder: Path
    memory: Path
    limit_bytes: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> str:
        return str(self.folder / "agent.sock")

    @property
    def log(self) -> str:
        return (self.folder / "agent.log").read_text()

    def start(self) -> RunningAgent:
        Path(self.socket).unlink(missing_ok=True)
        command = [sys.executable, "-m", "stepfast_sidecar", "--socket", self.socket]
        command += ["--memory-dir", str(self.memory), "--memory-limit", str(self.limit_bytes), "--node", "n"]
        with (self.folder / "agent.log").open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)
        wait_until(self._is_up, "the agent's socket")
        return self

    def _is_up(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log
        return Path(self.socket).exists()

    def processes(self) -> list[psutil.Process]:
        """The supervisor and its persisters."""
        assert self.process is not None
        try:
            supervisor = psutil.Process(self.process.pid)
            return [supervisor, *supervisor.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """SIGKILL for the supervisor alone, by its pid."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE_SECONDS)

    def end(self) -> None:
        """Ends it and what it started, on every path."""
        if self.process is None:
            return
        children = self.processes()[1:]
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(DEADLINE_SECONDS)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.process = None


@contextlib.contextmanager
def agents_in(parent: Path) -> Iterator[Callable[..., RunningAgent]]:
    """Starts agents, each with a memory folder of its own; ends them all."""
    agents: list[RunningAgent] = []

    def start(limit_bytes: int = 256 << 20) -> RunningAgent:
        folder = parent / f"agent-{len(agents)}"
        folder.mkdir()
        memory = Path(tempfile.mkdtemp(prefix="stepfast-test-", dir="/dev/shm"))
        agents.append(RunningAgent(folder, memory, limit_bytes))
        return agents[-1].start()

    try:
        yield start
    finally:
        for agent in agents:
            agent.end()
            shutil.rmtree(agent.memory, ignore_errors=True)


@pytest.fixture
def start_agent(tmp_path: Path) -> Iterator[Callable[..., RunningAgent]]:
    """`start_agent(limit_bytes=…)`: an agent of the test's own."""
    with agents_in(tmp_path) as start:
        yield start


@pytest.fixture(scope="session")
def shared_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent for tests that leave it as it was; each brings a job of its own."""
    with agents_in(tmp_path_factory.mktemp("shared-agent")) as start:
        yield start()


@pytest.fixture(params=["no agent", "agent"])
def any_bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """Checkpointers of a new job, without and with an agent."""
    socket = request.getfixturevalue("shared_agent").socket if request.param == "agent" else None
    made = Bench(tmp_path / "storage", job=JobKey(namespace="local", name=f"job-{uuid.uuid4().hex[:8]}"), socket=socket)
    try:
        yield made
    finally:
        made.end()


# ---------------------------------------------------------------- several ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A launch that has ended."""

    code: int
    output: str


# A Python that ends right behind one of gloo's collective operations aborts now and then: a thread of gloo's lets go of
# the operation's tensor when there is no interpreter any more (torch 2.15).
DESTROY_GROUP = """
import torch.distributed
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


@dataclass(slots=True)
class Launcher:
    """Runs scripts as torchrun does, with gloo, on this machine, for one job on one storage."""

    bench: Bench
    folder: Path

    def write(self, text: str) -> Path:
        """The script as a file; it destroys its process group at its end, if it has not done so."""
        path = self.folder / f"script_{uuid.uuid4().hex[:8]}.py"
        path.write_text(text + DESTROY_GROUP)
        return path

    def variables(self, agent: RunningAgent | None, attempt: int, given: Mapping[str, str]) -> dict[str, str]:
        variables = {key: value for key, value in os.environ.items() if not key.startswith("STEPFAST_")}
        variables |= {
            "STEPFAST_JOB": str(self.bench.job), "STEPFAST_RUN": f"{uuid.uuid4().hex[:8]}-{attempt}",
            "STEPFAST_ATTEMPT": str(attempt), "STEPFAST_STORAGE_URI": self.bench.storage.as_uri(),
            "OMP_NUM_THREADS": "1", "STEPFAST_SETTINGS": '{"maxToKeep": 100, "persistIntervalSeconds": 0}',
        }  # fmt: skip
        if agent is not None:
            variables["STEPFAST_SOCKET"] = agent.socket
        return variables | dict(given)

    def start(
        self, script: str | Path, *arguments: str, ranks: int, agent: RunningAgent | None = None, attempt: int = 1,
        **variables: str,
    ) -> subprocess.Popen[str]:  # fmt: skip
        """Begins it under torchrun, whose ranks are forks."""
        path = script if isinstance(script, Path) else self.write(script)
        variables = {"PYTHON_EXEC": TORCH.program, **variables}
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
        return subprocess.Popen(
            [*command, str(path), *arguments], env=self.variables(agent, attempt, variables), cwd=self.folder,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def run(
        self, script: str | Path, *arguments: str, ranks: int, agent: RunningAgent | None = None, attempt: int = 1,
        timeout_seconds: float = 300.0, **variables: str,
    ) -> Finished:  # fmt: skip
        """Runs it to its end."""
        path = script if isinstance(script, Path) else self.write(script)
        environment = self.variables(agent, attempt, variables)
        done = TORCH.run_gang(ranks, [str(path), *arguments], cwd=self.folder, env=environment, timeout=timeout_seconds)
        return Finished(code=done.returncode, output=done.stdout + done.stderr)

    def end(self, process: subprocess.Popen[str]) -> None:
        """Ends what `start` started, with its descendants."""
        kill_tree(process)


def kill_tree(process: subprocess.Popen[str]) -> None:
    """Ends the process and its descendants, each by its pid."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        for child in [*parent.children(recursive=True), parent]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


@pytest.fixture
def launcher(bench: Bench, tmp_path: Path) -> Launcher:
    """Scripts as under torchrun on the same storage as `bench`."""
    return Launcher(bench, tmp_path)


@pytest.fixture(scope="session")
def make_launcher() -> Callable[[Path], Launcher]:
    """`make_launcher(folder)`: scripts under torchrun on a storage in that folder, for fixtures that live longer."""
    return lambda folder: Launcher(Bench(folder / "storage"), folder)
