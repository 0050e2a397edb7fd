"""Fixtures for tests of the agent: real agent processes, ranks without torch, and what they leave behind."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from eventual import files_in
from stepfast.errors import AgentUnavailable
from stepfast.messages import Hello
from stepfast.nodeclient import NodeClient
from stepfast.nodestatus import JobStatus, NodeStatus
from stepfast.step import JobKey
from stepfast.storage import open_store
from stepfast.storage.base import Store

_RANKPEER = Path(__file__).with_name("rankpeer.py")


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


_rankpeer: Any = _load(_RANKPEER)
_kubelet: Any = _load(Path(__file__).with_name("kubelet.py"))
_apiserver: Any = _load(Path(__file__).with_name("apiserver.py"))
_ring: Any = _load(Path(__file__).with_name("ring.py"))


@pytest.fixture(scope="session")
def ranks() -> Any:
    """The module `rankpeer`: RankPeer, RankFile, hello, eventually."""
    return _rankpeer


@pytest.fixture(scope="session")
def eventually() -> Callable[..., None]:
    """Waits for a condition, with a deadline."""
    return _rankpeer.eventually


@dataclass(kw_only=True)
class AgentProcess:
    """One real agent, its folders, and the storage of the jobs that a test gives it."""

    folder: Path
    memory_dir: Path
    storage: Path
    memory_limit: int
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    peers: list[Any] = field(default_factory=list)

    @property
    def socket(self) -> str:
        return str(self.folder / "a.sock")

    @property
    def log(self) -> str:
        return (self.folder / "agent.log").read_text(errors="replace")

    @property
    def storage_uri(self) -> str:
        return self.storage.as_uri()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def command(self) -> list[str]:
        command = [sys.executable, "-m", "stepfast_sidecar", "--socket", self.socket, "--node", "node-a"]
        command += ["--memory-dir", str(self.memory_dir), "--memory-limit", str(self.memory_limit)]
        return [*command, *self.options]

    def start(self, *, environment: Mapping[str, str] | None = None) -> AgentProcess:
        """Starts it (again), and waits until it answers."""
        self.launch(environment=environment)
        _rankpeer.eventually(self._answers, "the agent answers")
        return self

    def launch(self, *, environment: Mapping[str, str] | None = None) -> None:
        """Starts it (again), and does not wait."""
        with (self.folder / "agent.log").open("ab") as log:
            surroundings = {**os.environ, **self.environment, **(environment or {})}
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=surroundings)

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log
        try:
            NodeClient(self.socket).status()
        except AgentUnavailable:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL; its persisters die with it."""
        assert self.process is not None
        persisters = self._persisters().values()
        self.process.kill()
        self.process.wait()
        for persister in persisters:
            _rankpeer.eventually(lambda p=persister: not p.is_running(), "a persister dies with its agent")

    def terminate(self, seconds: float = 90.0) -> int:
        """SIGTERM; returns the exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def persisters(self) -> dict[str, int]:
        """The process ids of the jobs' persisters, by the job's folder."""
        return {job: process.pid for job, process in self._persisters().items()}

    def _persisters(self) -> dict[str, psutil.Process]:
        found = {}
        for child in psutil.Process(self.pid).children():
            try:
                words = child.cmdline()
            except psutil.NoSuchProcess:  # it has just ended
                continue
            if "stepfast_sidecar.persister" in words:
                found[words[words.index("--folder") + 1]] = child
        return found

    def persister(self, job: str = _rankpeer.JOB) -> psutil.Process:
        """That job's, once it is tied to the agent: one that is stopped before that outlives it."""
        _rankpeer.eventually(lambda: job in self.persisters(), "the job's persister is there")
        persister, agent = self._persisters()[job], psutil.Process(self.pid)
        _rankpeer.eventually(lambda: persister.nice() > agent.nice(), "it gives way, which it does next")
        return persister

    def status(self) -> NodeStatus:
        return NodeClient(self.socket).status()

    def job(self, run: str = _rankpeer.RUN, job: str = _rankpeer.JOB) -> JobStatus:
        found = self.status().job(JobKey.parse(job), run)
        assert found is not None
        return found

    def hello(self, **values: object) -> Hello:
        return _rankpeer.hello(**{"storage_uri": self.storage_uri, **values})

    def join(self, *, socket: str | None = None, **values: object) -> Any:
        """A rank that has greeted the agent, in this process."""
        peer = _rankpeer.RankPeer(socket or self.socket, self.hello(**{"storage_uri": self.storage_uri, **values}))
        self.peers.append(peer)
        return peer

    def gang(self, world_size: int, **values: object) -> list[Any]:
        """All ranks of a run, on this node."""
        return [
            self.join(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size, **values)
            for rank in range(world_size)
        ]

    def store(self) -> Store:
        return open_store(self.storage_uri, deadline_seconds=5)

    def slot_files(self) -> list[Path]:
        return files_in(self.memory_dir, "*/*/[0-9]*/*slot-*")

    def slots(self) -> list[os.stat_result]:
        """What the file system says of the slots; one may be let go while it is asked."""
        found = []
        for path in self.slot_files():
            with suppress(FileNotFoundError):
                found.append(path.stat())
        return found

    def used_bytes(self) -> int:
        """What the memory folder takes, as the file system counts it."""
        return sum(slot.st_blocks for slot in self.slots()) * 512

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def stop(self) -> None:
        """Ends what this agent started and what was connected, whatever became of it."""
        for peer in self.peers:
            peer.die()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.memory_dir, ignore_errors=True)

    def check_log(self) -> None:
        """An agent that survives by the loop's own handler has not handled it."""
        for sign in ("Traceback", "never retrieved", "Unhandled"):
            assert sign not in self.log, self.log


def _new_agent(storage: Path, memory_limit: int, options: tuple[str, ...]) -> AgentProcess:
    return AgentProcess(
        folder=Path(tempfile.mkdtemp(prefix="sf-", dir="/tmp")),
        memory_dir=Path(tempfile.mkdtemp(prefix="stepfast-test-", dir="/dev/shm")),
        storage=storage,
        memory_limit=memory_limit,
        options=options,
    )


@pytest.fixture
def new_agent(tmp_path: Path) -> Iterator[Callable[..., AgentProcess]]:
    """Starts agents on one storage; at the test's end they are ended, and their logs hold no traceback."""
    agents: list[AgentProcess] = []

    def start(*options: str, memory_limit: int = 1 << 30, environment: Mapping[str, str] | None = None) -> AgentProcess:
        agents.append(_new_agent(tmp_path / "storage", memory_limit, ("--adopt-timeout", "0.5", *options)))
        agents[-1].environment = environment or {}
        return agents[-1].start()

    logs = []
    try:
        yield start
        logs = list(agents)
        for agent in logs:
            agent.check_log()
    finally:
        for agent in agents:
            agent.stop()


@pytest.fixture
def agent(new_agent: Callable[..., AgentProcess]) -> AgentProcess:
    """One agent, with a gigabyte at most."""
    return new_agent()


@pytest.fixture
def kubelet() -> Iterator[Any]:
    """A kubelet with a folder of its own."""
    made = _kubelet.Kubelet()
    yield made
    made.close()


@pytest.fixture
def api() -> Iterator[Any]:
    """An API server that knows a node and its CheckpointNode."""
    server = _apiserver.ApiServer()
    yield server
    server.close()


@pytest.fixture
def new_api() -> Iterator[Callable[[str], Any]]:
    """Makes an API server that knows a node of that name and its CheckpointNode."""
    servers: list[Any] = []

    def make(node: str) -> Any:
        servers.append(_apiserver.ApiServer(node))
        return servers[-1]

    try:
        yield make
    finally:
        for server in servers:
            server.close()


@pytest.fixture
def ring(new_agent: Callable[..., AgentProcess], tmp_path: Path, new_api: Callable[[str], Any]) -> Any:
    """A `ring.Ring` without agents."""
    authority = tmp_path / "authority"
    authority.mkdir()
    return _ring.Ring(start=new_agent, new_api=new_api, folder=tmp_path, authority=_ring.Authority(authority))


@pytest.fixture(scope="session")
def new_pod() -> Callable[..., Any]:
    """Makes a `kubelet.Pod`."""
    made: Callable[..., Any] = _kubelet.Pod
    return made


@pytest.fixture
def node_agent(new_agent: Callable[..., AgentProcess], kubelet: Any, tmp_path: Path) -> Callable[..., AgentProcess]:
    """Starts an agent that serves that kubelet, and registers it."""

    def start(*options: str, **settings: Any) -> AgentProcess:
        root = (tmp_path / "storage").as_uri()
        agent = new_agent("--kubelet-dir", str(kubelet.folder), "--storage-root", root, *options, **settings)
        assert kubelet.register() == "node-a"
        return agent

    return start


@pytest.fixture(scope="module")
def shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[AgentProcess, Any]]:
    """One agent and its kubelet for all tests of a file."""
    kubelet = _kubelet.Kubelet()
    storage = tmp_path_factory.mktemp("shared") / "storage"
    options = ("--kubelet-dir", str(kubelet.folder), "--storage-root", storage.as_uri())
    agent = _new_agent(storage, 1 << 30, options)
    try:
        agent.start()
        kubelet.register()
        yield agent, kubelet
        agent.check_log()
    finally:
        agent.stop()
        kubelet.close()


@pytest.fixture
def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def shared_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    """One agent for all tests of a file."""
    agent = _new_agent(tmp_path_factory.mktemp("shared") / "storage", 1 << 30, ())
    try:
        yield agent.start()
        agent.check_log()
    finally:
        agent.stop()


@dataclass(kw_only=True)
class RankProcess:
    """A rank in a process of its own, which has done its script and waits to be killed."""

    process: subprocess.Popen[str]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start_rank() -> Iterator[Callable[..., RankProcess]]:
    """Starts a rank process and waits until it has done what it was told."""
    started: list[RankProcess] = []

    def start(
        agent: AgentProcess,
        *,
        steps: list[int],
        half_written: int | None = None,
        due: bool = True,
        borrow: str | None = None,
        **values: object,
    ) -> RankProcess:
        script = _rankpeer.Script(
            socket=agent.socket,
            hello=asdict(agent.hello(**values)),
            steps=steps,
            half_written=half_written,
            due=due,
            borrow=borrow,
        )
        process = subprocess.Popen(
            [sys.executable, str(_RANKPEER), script.text()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(RankProcess(process=process))
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return started[-1]

    try:
        yield start
    finally:
        for rank in started:
            rank.kill()
            for stream in (rank.process.stdin, rank.process.stdout):
                assert stream is not None
                stream.close()
