"""What many jobs cost the API server: how much is asked at a time, and what is asked when nothing has changed."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from backendcontract import DictStore
from stepfast.kube import AlreadyExists, Kube
from stepfast.nodestatus import JobStatus, RankStatus, SaveStatus
from stepfast.step import JobKey
from stepfast_operator.record import State
from stepfast_operator.turns import AGENT_REQUESTS, POD_REQUESTS, TURNS
from testcluster.controlplane import KubernetesClient
from testoperator.connection import connect
from testoperator.polling import until
from testoperator.running import run_to_end
from testoperator.world import Operation, World

CONNECTIONS = 100  # of the client, by its default


class Busy(Kube):
    """Counts requests that are under way together, and changes by what they change."""

    under_way = most = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.changes: Counter[str] = Counter()

    async def _request(self, method: str, path: str, *args: Any, **options: Any) -> Any:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        if method != "GET" and "/leases/" not in path:
            self.changes[f"{method} {path}"] += 1
        try:
            return await super()._request(method, path, *args, **options)
        finally:
            self.under_way -= 1


def play(api: KubernetesClient, scenario: Callable[[World, Operation, Busy], Awaitable[None]]) -> None:
    async def run() -> None:
        async with World.open(api.kubeconfig) as world:
            busy = await connect(api.kubeconfig, Busy)
            assert isinstance(busy, Busy)
            try:
                operation = await world.operate(busy, namespaces=[world.namespace])
                await operation.look_after()
                await asyncio.wait_for(scenario(world, operation, busy), 90)
                await operation.close()
            finally:
                await busy.close()

    run_to_end(run())


def reported(job: JobKey, uid: str, **rank: Any) -> JobStatus:
    known = RankStatus(
        rank=0, pid=1, alive=True, clean=False, joined_time=1.0, global_step=5, step_time=7.0, restored_step=0,
        restored_time=1.5,
    )  # fmt: skip
    return JobStatus(
        job=job, run=f"{uid}-1", world_size=1, ranks=[replace(known, **rank)], saves=SaveStatus(), latest_memory_step=5
    )


def test_many_jobs_at_once_never_need_more_connections_than_there_are(operator_api: KubernetesClient) -> None:
    async def scenario(world: World, operation: Operation, busy: Busy) -> None:
        number, pods = 30, 10
        for index in range(number):
            await world.make_job(f"job-{index}", trainer={"numNodes": pods})

        async def are_made() -> bool:
            return len(await world.pods()) == number * pods

        await until("all pods are made", are_made)
        assert busy.most <= TURNS + POD_REQUESTS + AGENT_REQUESTS < CONNECTIONS - 10

    play(operator_api, scenario)


class Hanging(DictStore):
    """Tells nothing of the steps of some jobs until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def list(self, folder: str) -> Any:
        if "/hung-" in f"/{folder}":
            self.released.wait()
        return super().list(folder)


def test_storage_that_does_not_answer_keeps_no_other_job_from_being_looked_at(operator_api: KubernetesClient) -> None:
    async def scenario(world: World, operation: Operation, busy: Busy) -> None:
        hanging = world.store = Hanging()
        job = await world.make_job("failing", failurePolicy={"maxRestarts": 0, "flushTimeoutSeconds": 0})
        try:
            await world.kubelets.started("failing-1-0")
            for index in range(TURNS + 4):
                await world.make_job(f"hung-{index}")
            await until("they hang", lambda: len(operation.opened) > TURNS)
            await world.kubelets.end("failing-1-0", 7)

            async def is_told() -> bool:
                return (await world.status(job)).last_failure is not None

            await until("the failure is seen", is_told)
        finally:
            hanging.released.set()

    play(operator_api, scenario)


def test_nothing_is_written_while_nothing_changes(operator_api: KubernetesClient) -> None:
    async def scenario(world: World, operation: Operation, busy: Busy) -> None:
        job = await world.make_job()
        await world.kubelets.started("job-1-0")
        await world.report(0, reported(job.job, job.uid))

        async def is_running() -> bool:
            return (await world.status(job)).state is State.RUNNING

        await until("it runs", is_running)
        await until("its progress is written", lambda: steps_written(world, job.path))
        busy.changes.clear()
        for _ in range(3):
            await world.report(0, reported(job.job, job.uid))  # word for word what it said before
            await looked_at(operation, job.uid)
        assert busy.changes == Counter()

    play(operator_api, scenario)


def test_operator_that_begins_sees_first_what_happened_while_there_was_none(operator_api: KubernetesClient) -> None:
    async def scenario(world: World, operation: Operation, busy: Busy) -> None:
        jobs = [await world.make_job(f"job-{index}") for index in range(2 * TURNS)]
        for job in jobs:
            await world.kubelets.started(f"{job.job.name}-1-0")
        await world.report(0, *(reported(job.job, job.uid) for job in jobs))
        for job in jobs:
            await until(f"progress of {job.job} is written", lambda job=job: steps_written(world, job.path))
        await operation.close()
        await world.report(0, *(reported(job.job, job.uid, global_step=6, step_time=8.0) for job in jobs))
        failed = jobs[TURNS + 5]
        await world.kubelets.end(f"{failed.job.name}-1-0", 7)

        busy.changes.clear()
        following = await world.operate(busy, namespaces=[world.namespace])
        await following.look_after()
        await until("something is decided", lambda: busy.changes)
        assert next(iter(busy.changes)) == f"PATCH {failed.path}/status"

    play(operator_api, scenario)


def test_progress_may_wait_and_news_may_not(operator_api: KubernetesClient) -> None:
    async def run() -> None:
        async with World.open(operator_api.kubeconfig) as world:
            at_once, later = list[JobKey](), list[JobKey]()
            async with world.looking(wake_job=at_once.append, wake_later=later.append):
                job = await world.make_job()
                for change, heard in (
                    ({"global_step": None, "step_time": None}, at_once),  # the first word of it
                    ({}, at_once),  # the first step
                    ({"global_step": 6, "step_time": 8.0, "metrics": {"loss": 1.0}}, later),
                    ({"global_step": 6, "step_time": 8.0, "alive": False, "ended_time": 9.0}, at_once),
                ):
                    at_once.clear()
                    later.clear()
                    await world.report(0, reported(job.job, job.uid, **change))
                    await until(f"{change} is told", lambda: at_once or later)
                    assert heard == [job.job]

    run_to_end(run())


async def steps_written(world: World, path: str) -> bool:
    status = (await world.kube.get(path))["status"]
    return bool(status.get("trainerStatus", {}).get("globalStep") == 5)


async def looked_at(operation: Operation, uid: str) -> None:
    before = looks(operation)
    operation.jobs.wake(uid)
    await until("it is looked at", lambda: looks(operation) > before)


def looks(operation: Operation) -> float:
    """How often jobs were looked at."""
    lines = operation.metrics.text().decode().splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("stepfast_reconcile_duration_seconds_count")
    )


class Slow(Kube):
    """An API server that takes its time."""

    async def _send(self, method: str, *args: Any, **options: Any) -> Any:
        await asyncio.sleep(0.1)
        return await super()._send(method, *args, **options)


def test_how_long_changes_take_is_known_and_what_is_read_does_not_count(operator_api: KubernetesClient) -> None:
    async def run() -> None:
        async with World.open(operator_api.kubeconfig) as world:
            slow = await connect(operator_api.kubeconfig, Slow)
            path = f"/api/v1/namespaces/{world.namespace}/configmaps"
            try:
                await slow.get(path)
                assert slow.change_seconds == 0
                names = [f"n{number}" for number in range(64)]
                await asyncio.gather(*(slow.create(path, {"metadata": {"name": name}}) for name in names))
                assert 0.05 < slow.change_seconds < 10
                before = slow.change_seconds
                with pytest.raises(AlreadyExists):
                    await slow.create(path, {"metadata": {"name": "n0"}})
                assert slow.change_seconds != before, "a refusal is an answer, too"
            finally:
                await slow.close()

    run_to_end(run())
