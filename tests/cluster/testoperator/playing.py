"""A scenario with an operator that looks after the jobs of a namespace of its own, on a real API server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from testcluster.controlplane import KubernetesClient
from testoperator.running import run_to_end
from testoperator.world import Operation, World


def play(api: KubernetesClient, scenario: Callable[[World, Operation], Awaitable[None]]) -> None:
    """Runs it, for 90 seconds at most."""

    async def run() -> None:
        async with World.open(api.kubeconfig) as world:
            operation = await world.operate(namespaces=[world.namespace])
            await operation.look_after()
            await asyncio.wait_for(scenario(world, operation), 90)

    run_to_end(run())
