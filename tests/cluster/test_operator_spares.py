"""Pods that keep a place for an elastic gang, on a real API server."""

from __future__ import annotations

import pytest

from stepfast_operator.record import Status
from testcluster.controlplane import ApiServer, KubernetesClient
from testoperator.admission import Rule, denied
from testoperator.backends import launch_of, play
from testoperator.polling import until
from testoperator.world import Operation, World, planned


def test_spares_are_pods_that_no_gang_consists_of_and_come_and_go_as_they_are_wanted(
    operator_api: KubernetesClient,
) -> None:
    async def names(world: World) -> list[str]:
        listed = await world.kube.get(f"/api/v1/namespaces/{world.namespace}/pods")
        return sorted(pod["metadata"]["name"] for pod in listed["items"])

    async def scenario(world: World, operation: Operation) -> None:
        job = await world.make_job()
        backend, launch = operation.backend(job), launch_of(job)
        world.kubelets.without_place.add("job-spare-0")
        await backend.launch(launch)
        for _ in range(2):
            await backend.set_spares(2, ())
        assert await names(world) == ["job-1-0", "job-spare-0", "job-spare-1"]
        await world.kubelets.started("job-spare-1")
        await until(
            "it has a place", lambda: any(one.placed_time for one in operation.view.spares_of(job.job, job.uid))
        )
        observed = await backend.observe(planned(job))
        assert sorted(spare.node or "" for spare in observed.spares) == ["", world.kubelets.node(0)]
        assert observed.gang is not None
        assert (len(observed.gang.workers), observed.live_runs) == (1, frozenset({launch.run}))
        await backend.set_spares(1, ())
        assert await names(world) == ["job-1-0", "job-spare-1"], "who has a place keeps it"
        await backend.set_spares(1, (world.kubelets.node(0),))
        [spare] = (await backend.observe(planned(job))).spares
        assert spare.node is None, "that place is none"
        await backend.set_spares(0, ())
        assert await names(world) == ["job-1-0"]

    play(operator_api, scenario)


@pytest.mark.parametrize("rule", Rule)
def test_spare_that_an_admission_rule_denies_holds_nobody_up(audited_api: ApiServer, rule: Rule) -> None:
    async def scenario(world: World, operation: Operation) -> None:
        backend = operation.backend(await world.make_job())
        async with denied(audited_api, world.kube, world.namespace, "job-spare-", rule):
            await backend.set_spares(1, ())
        assert not (await backend.observe(Status())).spares

    play(audited_api, scenario)


def test_spare_that_a_quota_refuses_holds_nobody_up(operator_api: KubernetesClient) -> None:
    async def scenario(world: World, operation: Operation) -> None:
        await world.limit_pods(0)
        backend = operation.backend(await world.make_job())

        async def is_refused() -> bool:
            await backend.set_spares(1, ())
            return not (await backend.observe(Status())).spares

        assert await is_refused()
        assert await is_refused(), "and it is not asked for again at once"

    play(operator_api, scenario)
