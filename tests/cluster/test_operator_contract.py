"""The Kubernetes backend keeps what every backend promises, on pods of a real API server."""

from __future__ import annotations

import asyncio

import pytest

from backendcontract import DEADLINE_SECONDS, SCENARIOS, Scenario
from stepfast_operator import labels
from stepfast_operator.backends.base import Backend
from stepfast_operator.clusterjob import ClusterJob
from stepfast_operator.record import Status
from testcluster.controlplane import KubernetesClient
from testoperator.running import run_to_end
from testoperator.world import Operation, World


class ClusterHarness:
    """A job in a namespace of its own."""

    outlives_operator = True

    def __init__(self, world: World, operation: Operation, job: ClusterJob) -> None:
        self._world, self._operation, self._job = world, operation, job
        self.backend: Backend = operation.backend(job)
        self.uid, self.job = job.uid, job.job

    def prepare(self, run: str) -> None:
        pass

    async def exit_with(self, run: str, code: int) -> None:
        await self._world.kubelets.end(labels.pod_name(self.job.name, int(run.rpartition("-")[2]), 0), code)

    def node(self) -> str:
        return self._world.kubelets.node(0)

    def commit(self, step: int) -> None:
        self._world.store.commit(self.job, step)

    async def saved(self) -> Status | None:
        return await self._world.status(self._job)

    async def restart(self) -> Backend:
        await self._operation.close()
        operation = await self._world.operate()
        return operation.backend(await self._world.job(self._job))

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[scenario.__name__ for scenario in SCENARIOS])
def test_kubernetes_backend(operator_api: KubernetesClient, scenario: Scenario) -> None:
    async def play() -> None:
        async with World.open(operator_api.kubeconfig) as world:
            harness = ClusterHarness(world, await world.operate(), await world.make_job())
            await asyncio.wait_for(scenario(harness), DEADLINE_SECONDS)

    run_to_end(play())
