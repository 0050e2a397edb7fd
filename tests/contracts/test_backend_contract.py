"""What every backend promises, on the fake one and on real processes."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest

from stepfast.errors import ObjectNotFound
from stepfast.layout import Part, job_folder, manifest_of, manifest_path
from stepfast.step import JobKey
from stepfast.storage.base import ObjectInfo
from stepfast_operator.actions import LaunchGang, StopMode
from stepfast_operator.backends import processes
from stepfast_operator.backends.base import Backend
from stepfast_operator.backends.fake import FakeBackend
from stepfast_operator.backends.gangprocess import RUN
from stepfast_operator.backends.process import ProcessBackend, ProcessSettings
from stepfast_operator.backends.statefolder import StateFolder
from stepfast_operator.observed import Gang, WorkerPhase
from stepfast_operator.record import Attempt, State, Status
from stepfast_operator.spec import TrainingJob, TrainingSpec, parse_manifest

# A rank that ends with the exit code that is written into its pipe.
RANK = "import os, sys; sys.exit(int(open(os.path.join(sys.argv[1], os.environ['STEPFAST_RUN'])).read()))"
DEADLINE_SECONDS = 60


class Harness(Protocol):
    """A backend and the strings that move its world."""

    backend: Backend
    uid: str

    def prepare(self, run: str) -> None:
        """Before the run is launched."""

    def exit_with(self, run: str, code: int) -> None:
        """Its rank ends with that code."""

    def commit(self, step: int) -> None:
        """The step becomes committed."""

    def saved(self) -> Status | None:
        """The status that a new operator would find."""

    def restart(self) -> Backend:
        """A new operator's backend, of the same job."""

    async def close(self) -> None: ...


class FakeHarness:
    def __init__(self, spec: TrainingSpec) -> None:
        self.fake = FakeBackend(spec)
        self.backend: Backend = self.fake
        self.uid = self.fake.uid

    def prepare(self, run: str) -> None:
        pass

    def exit_with(self, run: str, code: int) -> None:
        assert self.fake.gang.run == run
        if code:
            self.fake.fail(exit_code=code)
        else:
            self.fake.succeed()

    def commit(self, step: int) -> None:
        self.fake.steps[step] = self.fake.now

    def saved(self) -> Status | None:
        return self.fake.saved

    def restart(self) -> Backend:
        self.fake.lose_supervisor()
        return self.fake

    async def close(self) -> None:
        pass


class DictStore:
    """As much of a store as rolling back and listing need."""

    uri = "memory://contract"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def read(self, path: str) -> bytes:
        try:
            return self.objects[path]
        except KeyError:
            raise ObjectNotFound(path) from None

    def create(self, path: str, data: bytes) -> bool:
        return self.objects.setdefault(path, data) is data

    def delete(self, path: str) -> None:
        self.objects.pop(path, None)

    def list(self, folder: str) -> Sequence[ObjectInfo]:
        inside = {path[len(folder) + 1 :] for path in self.objects if path.startswith(f"{folder}/")}
        names = {(name.partition("/")[0], "/" in name) for name in inside}
        return [ObjectInfo(name=name, size_bytes=0, is_folder=is_folder) for name, is_folder in sorted(names)]

    def close(self) -> None:
        pass


class ProcessHarness:
    def __init__(self, job: TrainingJob, folder: Path) -> None:
        self.folder, self.job = folder, job
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
            on_change=lambda: None,
        )
        state = StateFolder(self.folder, self.job.job)
        state.path.mkdir(parents=True, exist_ok=True)
        self.made.append(ProcessBackend(self.job, self.uid, state, None, settings))
        return self.made[-1]

    def prepare(self, run: str) -> None:
        os.mkfifo(self.folder / run)

    def exit_with(self, run: str, code: int) -> None:
        (self.folder / run).write_text(str(code))

    def commit(self, step: int) -> None:
        part = Part(
            step=step,
            run="r-1",
            node=0,
            world_size=1,
            ranks=(0,),
            files=(),
            saved_time=1.0,
            persisted_time=2.0,
        )
        manifest = manifest_of([part])
        assert manifest is not None
        self.store.objects[f"{job_folder(self.job.job)}/{manifest_path(step)}"] = manifest.to_bytes()

    def saved(self) -> Status | None:
        saved = StateFolder(self.folder, self.job.job).read()
        return saved.status if saved is not None else None

    def restart(self) -> Backend:
        return self._make()

    async def close(self) -> None:
        processes.kill_marked(RUN, lambda run: run.startswith(self.uid), timeout_seconds=10)
        for backend in reversed(self.made):
            await backend.close()


Scenario = Callable[[Harness], Awaitable[None]]


@pytest.fixture(params=["fake", "process"])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Scenario], None]:
    """Plays a scenario on one event loop, and ends everything that it started."""
    manifest = {
        "apiVersion": "stepfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "job", "namespace": "test"},
        "spec": {"trainer": {"command": [sys.executable, "-c", RANK, str(tmp_path)], "numProcPerNode": 1}},
    }
    job = parse_manifest(manifest, default_namespace="test")

    async def run(scenario: Scenario) -> None:
        harness: Harness = FakeHarness(job.spec) if request.param == "fake" else ProcessHarness(job, tmp_path)
        try:
            await asyncio.wait_for(scenario(harness), DEADLINE_SECONDS)
        finally:
            await harness.close()

    return lambda scenario: asyncio.run(run(scenario))


def planned(uid: str, attempt: int) -> tuple[Status, LaunchGang]:
    run = f"{uid}-{attempt}"
    current = Attempt(attempt=attempt, run=run, resume_step=0, planned_time=1.0)
    return Status(attempt=attempt, current=current), LaunchGang(attempt=attempt, run=run, resume_step=0)


def ended(status: Status) -> Status:
    assert status.current is not None
    return replace(status, current=replace(status.current, ended_time=2.0))


async def started(harness: Harness, attempt: int) -> tuple[Status, str]:
    status, launch = planned(harness.uid, attempt)
    harness.prepare(launch.run)
    await harness.backend.launch(launch)
    return status, launch.run


async def observed_gang(backend: Backend, status: Status, phase: WorkerPhase) -> Gang:
    """The gang, once its worker is in that phase."""
    while True:
        gang = (await backend.observe(status)).gang
        if gang is not None and gang.workers[0].phase is phase:
            return gang
        await asyncio.sleep(0.01)


def test_gang_that_was_never_launched_is_none(play: Callable[[Scenario], None]) -> None:
    async def scenario(harness: Harness) -> None:
        status, _ = planned(harness.uid, 1)
        observed = await harness.backend.observe(status)
        assert observed.gang is None
        assert observed.live_runs == frozenset()
        assert (observed.job, observed.uid) == (JobKey(namespace="test", name="job"), harness.uid)

    play(scenario)


def test_launched_gang_is_seen_and_launching_it_again_changes_nothing(
    play: Callable[[Scenario], None],
) -> None:
    async def scenario(harness: Harness) -> None:
        status, run = await started(harness, 1)
        gang = await observed_gang(harness.backend, status, WorkerPhase.RUNNING)
        await harness.backend.launch(LaunchGang(attempt=1, run=run, resume_step=0))
        assert gang.run == run
        assert await observed_gang(harness.backend, status, WorkerPhase.RUNNING) == gang
        assert (await harness.backend.observe(status)).live_runs == {run}

    play(scenario)


def test_nothing_lives_when_a_kill_returns(play: Callable[[Scenario], None]) -> None:
    async def scenario(harness: Harness) -> None:
        status, run = await started(harness, 1)
        await harness.backend.stop([run], StopMode.KILL)
        assert (await harness.backend.observe(ended(status))).live_runs == frozenset()
        await harness.backend.stop([run], StopMode.KILL)

    play(scenario)


def test_asked_to_end_a_gang_ends(play: Callable[[Scenario], None]) -> None:
    async def scenario(harness: Harness) -> None:
        status, run = await started(harness, 1)
        await harness.backend.stop([run], StopMode.TERMINATE)
        await observed_gang(harness.backend, status, WorkerPhase.FAILED)

    play(scenario)


def test_launch_leaves_nothing_of_an_earlier_run(play: Callable[[Scenario], None]) -> None:
    async def scenario(harness: Harness) -> None:
        await started(harness, 1)
        status, run = await started(harness, 2)
        assert (await harness.backend.observe(ended(status))).live_runs == {run}

    play(scenario)


def test_failure_is_seen_with_its_exit_code(play: Callable[[Scenario], None]) -> None:
    async def scenario(harness: Harness) -> None:
        status, run = await started(harness, 1)
        harness.exit_with(run, 7)
        gang = await observed_gang(harness.backend, status, WorkerPhase.FAILED)
        failure = gang.workers[0].failure
        assert failure is not None
        assert (failure.exit_code, failure.node) == (7, "node-0")

    play(scenario)


def test_success_is_seen(play: Callable[[Scenario], None]) -> None:
    async def scenario(harness: Harness) -> None:
        status, run = await started(harness, 1)
        harness.exit_with(run, 0)
        gang = await observed_gang(harness.backend, status, WorkerPhase.SUCCEEDED)
        assert gang.workers[0].failure is None

    play(scenario)


def test_gang_of_a_lost_operator_still_lives_and_has_failed(play: Callable[[Scenario], None]) -> None:
    async def scenario(harness: Harness) -> None:
        status, run = await started(harness, 1)
        backend = harness.restart()
        observed = await backend.observe(status)
        assert observed.gang is not None
        assert observed.gang.workers[0].phase is WorkerPhase.FAILED
        assert observed.live_runs == {run}
        await backend.stop([run], StopMode.KILL)
        assert (await backend.observe(ended(status))).live_runs == frozenset()

    play(scenario)


def test_steps_are_read_newest_last_and_rolled_back(play: Callable[[Scenario], None]) -> None:
    async def scenario(harness: Harness) -> None:
        assert [step.step for step in await harness.backend.read_steps()] == []
        for step in (30, 10, 20):
            harness.commit(step)
        assert [step.step for step in await harness.backend.read_steps()] == [10, 20, 30]
        for _ in range(2):
            await harness.backend.supersede_after(10)
            assert [step.step for step in await harness.backend.read_steps()] == [10]
        await harness.backend.supersede_after(-1)
        assert [step.step for step in await harness.backend.read_steps()] == []

    play(scenario)


def test_written_status_is_what_the_next_operator_finds(play: Callable[[Scenario], None]) -> None:
    async def scenario(harness: Harness) -> None:
        status = replace(planned(harness.uid, 3)[0], state=State.RUNNING, restarts=2)
        await harness.backend.write_status(status)
        assert harness.saved() == status

    play(scenario)
