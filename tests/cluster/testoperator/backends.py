"""A scenario with the backends of an operator that looks after nothing by itself, on a real API server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from stepfast.nodestatus import JobStatus, SaveStatus
from stepfast_operator.actions import LaunchGang
from stepfast_operator.clusterjob import ClusterJob
from testcluster.controlplane import KubernetesClient
from testoperator.running import run_to_end
from testoperator.world import Operation, World

CHANGES = frozenset({"POST", "PUT", "PATCH", "DELETE"})


def play(api: KubernetesClient, scenario: Callable[[World, Operation], Awaitable[None]]) -> None:
    async def run() -> None:
        async with World.open(api.kubeconfig) as world:
            await asyncio.wait_for(scenario(world, await world.operate()), 120)

    run_to_end(run())


def launch_of(job: ClusterJob, attempt: int = 1) -> LaunchGang:
    return LaunchGang(attempt=attempt, run=f"{job.uid}-{attempt}", resume_step=0, nodes=job.spec.trainer.num_nodes)


def held(job: ClusterJob, run: str) -> JobStatus:
    """What an agent reports that holds a step of the run."""
    return JobStatus(job=job.job, run=run, world_size=1, ranks=(), saves=SaveStatus(), latest_memory_step=5)
