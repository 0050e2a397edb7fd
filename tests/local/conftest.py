"""Real processes for tests, all of which are ended with the test, however it ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepfast_operator.backends import processes
from stepfast_operator.backends.memoryfolder import memory_folder

OWNER = "TEST_OWNER"

# `stepfast run` without its command line: the same session, with an agent that holds nothing.
DRIVER = """
import asyncio, json, sys
from pathlib import Path
from stepfast.nodestatus import NodeStatus
from stepfast_operator.local.session import Surroundings, run_session
from stepfast_operator.local.view import PlainView
from stepfast_operator.spec import parse_manifest

class Client:
    def __init__(self, path): self.path = path
    def status(self): return NodeStatus(node="n", memory_limit_bytes=1, memory_used_bytes=0, jobs=())
    def watch(self, on_status):
        import threading, time
        def follow():
            while True:
                on_status(self.status()); time.sleep(0.05)
        threading.Thread(target=follow, daemon=True).start()
    def request_save(self, job, run): pass
    def flush(self, job, run): pass
    def close(self): pass

class Store:
    uri = "memory://"
    def list(self, folder): return []
    def close(self): pass

folder = Path(sys.argv[1])
job = parse_manifest(json.loads(sys.argv[2]), default_namespace="local")
surroundings = Surroundings(
    state_root=folder / "jobs", storage_uri="memory://", open_store=lambda uri: Store(), connect=Client,
    agent_command=(sys.executable, str(folder / "agent.py")),
)
outcome = asyncio.run(run_session(job, surroundings, PlainView(sys.stdout)))
sys.exit(outcome.exit_code)
"""

AGENT = """
import signal, socket, sys, threading
path = sys.argv[sys.argv.index("--socket") + 1]
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(path)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        signal.pause()
"""


@pytest.fixture
def owned(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Marks every process that the test starts; what is left of them is killed at its end."""
    owner = uuid.uuid4().hex
    monkeypatch.setenv(OWNER, owner)
    yield owner
    assert processes.kill_marked(OWNER, lambda value: value == owner, timeout_seconds=10)


class Supervisor:
    """A `stepfast run` of its own process."""

    def __init__(self, folder: Path, manifest: str) -> None:
        (folder / "agent.py").write_text(AGENT)
        (folder / "driver.py").write_text(DRIVER)
        self.log = folder / "driver.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(folder / "driver.py"), str(folder), manifest],
                stdout=log,
                stderr=log,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )

    def wait(self, seconds: float = 90.0) -> int:
        return self.process.wait(timeout=seconds)

    def said(self) -> str:
        return self.log.read_text()


@pytest.fixture
def supervise(owned: str, tmp_path: Path) -> Iterator[Callable[[str], Supervisor]]:
    started: list[Supervisor] = []

    def start(manifest: str) -> Supervisor:
        started.append(Supervisor(tmp_path, manifest))
        return started[-1]

    yield start
    for supervisor in started:
        if supervisor.process.poll() is None:
            supervisor.process.kill()
        supervisor.process.wait()
    assert processes.kill_marked(OWNER, lambda value: value == owned, timeout_seconds=10)
    # A killed supervisor leaves its memory tier for the next one, which will not come.
    for status in tmp_path.glob("jobs/*/status.json"):
        uid = json.loads(status.read_text())["metadata"]["uid"]
        shutil.rmtree(memory_folder(uid, status.parent), ignore_errors=True)
