"""What every backend promises, on the fake one and on real processes; tests/cluster plays it on a real API server."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from pathlib import Path

import pytest

from backendcontract import DEADLINE_SECONDS, JOB, SCENARIOS, DictStore, Harness, Scenario
from stepfast_operator.backends import processes
from stepfast_operator.backends.base import Backend
from stepfast_operator.backends.fake import FakeBackend
from stepfast_operator.backends.gangprocess import RUN
from stepfast_operator.backends.process import ProcessBackend, ProcessSettings
from stepfast_operator.backends.statefolder import StateFolder
from stepfast_operator.record import Status
from stepfast_operator.spec import TrainingJob, TrainingSpec, parse_manifest

# A rank that ends with the exit code that is written into its pipe.
RANK = "import os, sys; sys.exit(int(open(os.path.join(sys.argv[1], os.environ['STEPFAST_RUN'])).read()))"


class FakeHarness:
    outlives_operator = False

    def __init__(self, spec: TrainingSpec) -> None:
        self.fake = FakeBackend(spec)
        self.backend: Backend = self.fake
        self.uid, self.job = self.fake.uid, self.fake.job

    def prepare(self, run: str) -> None:
        pass

    async def exit_with(self, run: str, code: int) -> None:
        assert self.fake.gang.run == run
        if code:
            self.fake.fail(exit_code=code)
        else:
            self.fake.succeed()

    def node(self) -> str:
        return "node-0"

    def commit(self, step: int) -> None:
        self.fake.steps[step] = self.fake.now

    async def saved(self) -> Status | None:
        return self.fake.saved

    async def restart(self) -> Backend:
        self.fake.lose_supervisor()
        return self.fake

    async def close(self) -> None:
        pass


class ProcessHarness:
    outlives_operator = False

    def __init__(self, job: TrainingJob, folder: Path) -> None:
        self.folder, self.manifest, self.job = folder, job, job.job
        self.uid = uuid.uuid4().hex
        self.store = DictStore()
        self.made: list[ProcessBackend] = []
        self.backend: Backend = self._make()

    def _make(self) -> ProcessBackend:
        settings = ProcessSettings(
            storage_uri="memory://contract",
            open_store=lambda uri: self.store,  # type: ignore[arg-type,return-value] # as much as is needed of one
            memory_limit=1,
            on_line=lambda line: None,
            say=lambda text: None,
            on_change=lambda: None,
        )
        state = StateFolder(self.folder, self.job)
        state.path.mkdir(parents=True, exist_ok=True)
        self.made.append(ProcessBackend(self.manifest, self.uid, state, None, settings))
        return self.made[-1]

    def prepare(self, run: str) -> None:
        os.mkfifo(self.folder / run)

    async def exit_with(self, run: str, code: int) -> None:
        (self.folder / run).write_text(str(code))

    def node(self) -> str:
        return "node-0"

    def commit(self, step: int) -> None:
        self.store.commit(self.job, step)

    async def saved(self) -> Status | None:
        saved = StateFolder(self.folder, self.job).read()
        return saved.status if saved is not None else None

    async def restart(self) -> Backend:
        return self._make()

    async def close(self) -> None:
        processes.kill_marked(RUN, lambda run: run.startswith(self.uid), timeout_seconds=10)
        for backend in reversed(self.made):
            await backend.close()


@pytest.mark.parametrize("backend", ["fake", "process"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=[scenario.__name__ for scenario in SCENARIOS])
def test_backend(scenario: Scenario, backend: str, tmp_path: Path) -> None:
    """Plays a scenario on one event loop, and ends everything that it started."""
    manifest = {
        "apiVersion": "stepfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": JOB, "namespace": "test"},
        "spec": {"trainer": {"command": [sys.executable, "-c", RANK, str(tmp_path)], "numProcPerNode": 1}},
    }
    job = parse_manifest(manifest, default_namespace="test")

    async def play() -> None:
        harness: Harness = FakeHarness(job.spec) if backend == "fake" else ProcessHarness(job, tmp_path)
        try:
            await asyncio.wait_for(scenario(harness), DEADLINE_SECONDS)
        finally:
            await harness.close()

    asyncio.run(play())
