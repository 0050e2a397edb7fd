"""Fixtures that several folders of tests use: a real Azurite, faults of storage, nodes with an agent."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmarks.stores.azurite import Azurite, running_azurite
from hypothesis import settings

from interpreters import INTERPRETERS

# CI judges a change by the same examples each time; elsewhere new ones are looked for.
settings.register_profile("stepfast", derandomize=bool(os.environ.get("CI")), deadline=None)
settings.load_profile("stepfast")


CLUSTER_TESTS = Path(__file__).parent / "cluster"
COST = "processor_seconds"
THOROUGH_TESTS = Path(__file__).with_name("thorough.txt")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help=f"run what {THOROUGH_TESTS.name} lists, and nothing else")
    parser.addoption("--everything", action="store_true", help=f"run what {THOROUGH_TESTS.name} lists, too")
    parser.addoption("--costs", type=int, default=0, help="tell so many files whose tests took the most processor time")
    parser.addoption("--chaos-page", type=Path, help="write what rows of tests/cluster/matrix find into this page")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """tests/cluster needs root and minutes: it runs when it is asked for."""
    return True if collection_path == CLUSTER_TESTS and not _is_cluster_asked_for(config) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is thorough, or all else; a test that is asked for by its own name runs."""
    if config.option.everything or any("::" in argument for argument in config.args):
        return
    names = {line for line in THOROUGH_TESTS.read_text().splitlines() if not line.startswith("#")}
    seen = {item.nodeid for item in items}
    files = {name.partition("::")[0] for name in seen}
    unknown = sorted(name for name in names - seen if name.partition("::")[0] in files)
    if unknown and not (config.option.keyword or config.option.markexpr):
        raise pytest.UsageError(f"{THOROUGH_TESTS.name} names what is no test: {', '.join(unknown)}")
    is_asked_for = {name: (name in names) == config.option.thorough for name in seen}
    config.hook.pytest_deselected(items=[item for item in items if not is_asked_for[item.nodeid]])
    items[:] = [item for item in items if is_asked_for[item.nodeid]]


def pytest_collection_finish() -> None:
    _keep_for_good()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        _keep_for_good()
    if nextitem is None or nextitem.path.parent != item.path.parent:
        _end_interpreters()  # all their frameworks together take gigabytes, and few folders want the same ones


def _keep_for_good() -> None:
    """All tests and what they import stay until the end: to look through them for garbage, again and again, took up to
    nine tenths of a test's time.
    """
    gc.collect()
    gc.freeze()


def _end_interpreters() -> None:
    for interpreter in INTERPRETERS:
        interpreter.end()


def _processor_seconds() -> float:
    """Of this process and of those that it has waited for."""
    return sum(os.times()[:4]) + sum(interpreter.processor_seconds for interpreter in INTERPRETERS)


_told_seconds = _processor_seconds()


def _machine_ticks() -> tuple[int, int]:
    """How long this machine's processors have had nothing to do, and all of their time."""
    with open("/proc/stat") as stat:
        ticks = [int(field) for field in stat.readline().split()[1:9]]
    idle, waiting = ticks[3:5]
    return idle + waiting, sum(ticks)


_first_ticks = _machine_ticks()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What was used since the last report is that one's: on processors that are shared, time alone says little."""
    global _told_seconds
    report = yield
    before, _told_seconds = _told_seconds, _processor_seconds()
    report.user_properties.append((COST, _told_seconds - before))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.option.costs:
        return
    costs: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            costs[report.nodeid.partition("::")[0]] += dict(getattr(report, "user_properties", ())).get(COST, 0.0)
    idle, whole = (now - first for now, first in zip(_machine_ticks(), _first_ticks, strict=True))
    seconds, busy = sum(costs.values()), 1 - idle / max(whole, 1)
    terminalreporter.section(f"{seconds:.0f} s of processors (this machine's were {busy:.0%} busy), most of it by")
    for file, seconds in costs.most_common(config.option.costs):
        terminalreporter.line(f"{seconds:8.1f} s {file}")


def pytest_report_header(config: pytest.Config) -> list[str]:
    if _is_cluster_asked_for(config):
        return ["tests/cluster: on a Kubernetes that is started for it"]
    return [
        "tests/cluster IS LEFT OUT: `make test-cluster` runs it",
        f"tests/{THOROUGH_TESTS.name} "
        + ("alone RUNS" if config.option.thorough else "IS LEFT OUT: `make test-thorough` runs it"),
    ]


def _is_cluster_asked_for(config: pytest.Config) -> bool:
    asked = [Path(config.invocation_params.dir, argument.partition("::")[0]).resolve() for argument in config.args]
    return any(path.is_relative_to(CLUSTER_TESTS) for path in asked)


@pytest.fixture(scope="session", autouse=True)
def ended_interpreters() -> Iterator[None]:
    """However the tests end, these do, too."""
    yield
    _end_interpreters()


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
    return lambda host: running_azurite(tmp_path_factory.mktemp("azurite"), host)


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
def inject(tmp_path: Path) -> Callable[[Path | str], dict[str, str]]:
    """The environment in which Python processes begin with the sitecustomize.py of a folder, or with this text."""

    def inject(source: Path | str) -> dict[str, str]:
        folder = source if isinstance(source, Path) else tmp_path / "inject"
        if isinstance(source, str):
            folder.mkdir()
            (folder / "sitecustomize.py").write_text(source)
        return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}

    return inject


@pytest.fixture
def held_storage(tmp_path: Path, inject: Callable[[Path], dict[str, str]], load_module: Callable[[str], Any]) -> Any:
    """`faults.HeldStorage`: a storage that stands still for the agents that are started in its environment."""
    return load_module("faults").HeldStorage(tmp_path / "gate", inject(Path(__file__).with_name("heldstorage")))


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
def runs(tmp_path: Path, load_module: Callable[[str], Any], request: pytest.FixtureRequest) -> Iterator[Any]:
    """`runs.Runs`: `stepfast run` in the test's folder. Where the test's module says of what, its launchers and ranks
    are forks.
    """
    made = load_module("runs").Runs(tmp_path, forks_of=getattr(request.module, "RUNS_ARE_FORKS_OF", None))
    yield made
    made.end()
    print(made.log[-6000:])  # shown where the test fails


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
