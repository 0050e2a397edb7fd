"""What every backend promises, as scenarios that are played on each of them: on the fake one and on processes beside
this module, on pods of a real API server in tests/cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from stepfast.errors import ObjectNotFound
from stepfast.layout import Part, job_folder, manifest_of, manifest_path
from stepfast.step import JobKey
from stepfast.storage.base import ObjectInfo
from stepfast_operator.actions import LaunchGang, StopMode
from stepfast_operator.backends.base import Backend
from stepfast_operator.observed import Gang, WorkerPhase
from stepfast_operator.record import Attempt, State, Status

JOB = "job"
DEADLINE_SECONDS = 60
_POLL_SECONDS = 0.01


class Harness(Protocol):
    """A backend and the strings that move its world."""

    backend: Backend
    uid: str
    job: JobKey
    outlives_operator: bool  # whether a gang goes on when its operator is lost

    def prepare(self, run: str) -> None:
        """Before the run is launched."""

    async def exit_with(self, run: str, code: int) -> None:
        """Its rank ends with that code."""

    def node(self) -> str:
        """Where the rank runs."""

    def commit(self, step: int) -> None:
        """The step becomes committed."""

    async def saved(self) -> Status | None:
        """The status that a new operator would find."""

    async def restart(self) -> Backend:
        """A new operator's backend, of the same job."""

    async def close(self) -> None: ...


Scenario = Callable[[Harness], Awaitable[None]]


class DictStore:
    """As much of a store as rolling back and listing need."""

    uri = "memory://contract"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def commit(self, job: JobKey, step: int) -> None:
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
        self.objects[f"{job_folder(job)}/{manifest_path(step)}"] = manifest.to_bytes()

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


def planned(uid: str, attempt: int) -> tuple[Status, LaunchGang]:
    run = f"{uid}-{attempt}"
    current = Attempt(attempt=attempt, run=run, resume_step=0, planned_time=1.0)
    return Status(attempt=attempt, current=current), LaunchGang(attempt=attempt, run=run, resume_step=0, nodes=1)


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
        await asyncio.sleep(_POLL_SECONDS)


async def gang_that_was_never_launched_is_none(harness: Harness) -> None:
    status, _ = planned(harness.uid, 1)
    observed = await harness.backend.observe(status)
    assert observed.gang is None
    assert observed.live_runs == frozenset()
    assert (observed.job, observed.uid) == (harness.job, harness.uid)


async def launched_gang_is_seen_and_launching_it_again_changes_nothing(harness: Harness) -> None:
    status, run = await started(harness, 1)
    gang = await observed_gang(harness.backend, status, WorkerPhase.RUNNING)
    await harness.backend.launch(LaunchGang(attempt=1, run=run, resume_step=0, nodes=1))
    assert gang.run == run
    assert gang.workers[0].running_since is not None
    assert await observed_gang(harness.backend, status, WorkerPhase.RUNNING) == gang
    assert (await harness.backend.observe(status)).live_runs == {run}


async def nothing_lives_when_a_kill_returns(harness: Harness) -> None:
    status, run = await started(harness, 1)
    await harness.backend.stop([run], StopMode.KILL)
    assert (await harness.backend.observe(ended(status))).live_runs == frozenset()
    await harness.backend.stop([run], StopMode.KILL)


async def asked_to_end_a_gang_ends(harness: Harness) -> None:
    status, run = await started(harness, 1)
    await harness.backend.stop([run], StopMode.TERMINATE)
    await observed_gang(harness.backend, status, WorkerPhase.FAILED)


async def launch_leaves_nothing_of_an_earlier_run(harness: Harness) -> None:
    await started(harness, 1)
    status, run = await started(harness, 2)
    assert (await harness.backend.observe(ended(status))).live_runs == {run}


async def failure_is_seen_with_its_exit_code(harness: Harness) -> None:
    status, run = await started(harness, 1)
    await harness.exit_with(run, 7)
    gang = await observed_gang(harness.backend, status, WorkerPhase.FAILED)
    failure = gang.workers[0].failure
    assert failure is not None
    assert (failure.exit_code, failure.node) == (7, harness.node())


async def success_is_seen(harness: Harness) -> None:
    status, run = await started(harness, 1)
    await harness.exit_with(run, 0)
    gang = await observed_gang(harness.backend, status, WorkerPhase.SUCCEEDED)
    assert gang.workers[0].failure is None


async def gang_of_a_lost_operator_is_seen_by_the_next_one(harness: Harness) -> None:
    """In a cluster it goes on; a process has nobody left who would tell how it ended, so it has failed."""
    status, run = await started(harness, 1)
    await observed_gang(harness.backend, status, WorkerPhase.RUNNING)
    backend = await harness.restart()
    observed = await backend.observe(status)
    assert observed.gang is not None
    assert observed.live_runs == {run}
    if harness.outlives_operator:
        assert observed.gang.workers[0].phase is WorkerPhase.RUNNING
        await backend.launch(LaunchGang(attempt=1, run=run, resume_step=0, nodes=1))
        await harness.exit_with(run, 0)
        await observed_gang(backend, status, WorkerPhase.SUCCEEDED)
    else:
        assert observed.gang.workers[0].phase is WorkerPhase.FAILED
    await backend.stop([run], StopMode.KILL)
    assert (await backend.observe(ended(status))).live_runs == frozenset()


async def steps_are_read_newest_last_and_rolled_back(harness: Harness) -> None:
    assert [step.step for step in await harness.backend.read_steps()] == []
    for step in (30, 10, 20):
        harness.commit(step)
    assert [step.step for step in await harness.backend.read_steps()] == [10, 20, 30]
    for _ in range(2):
        await harness.backend.supersede_after(10)
        assert [step.step for step in await harness.backend.read_steps()] == [10]
    await harness.backend.supersede_after(-1)
    assert [step.step for step in await harness.backend.read_steps()] == []


async def written_status_is_what_the_next_operator_finds(harness: Harness) -> None:
    status = replace(planned(harness.uid, 3)[0], state=State.RUNNING, restarts=2)
    await harness.backend.write_status(status)
    assert await harness.saved() == status


SCENARIOS: Sequence[Scenario] = (
    gang_that_was_never_launched_is_none,
    launched_gang_is_seen_and_launching_it_again_changes_nothing,
    nothing_lives_when_a_kill_returns,
    asked_to_end_a_gang_ends,
    launch_leaves_nothing_of_an_earlier_run,
    failure_is_seen_with_its_exit_code,
    success_is_seen,
    gang_of_a_lost_operator_is_seen_by_the_next_one,
    steps_are_read_newest_last_and_rolled_back,
    written_status_is_what_the_next_operator_finds,
)
