"""Gangs that Volcano or coscheduling schedule, against the CRDs of their PodGroups: what is made when, and what goes.
Their schedulers are played, as the kubelets are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stepfast.kube import Forbidden, Kube
from stepfast_operator.clusterjob import ClusterJob
from stepfast_operator.record import State, Status
from testcluster.binaries import Binaries
from testcluster.claim import Claim
from testcluster.controlplane import ApiServer, KubernetesClient
from testcluster.fixtures import loudly
from testoperator.connection import connect
from testoperator.crds import install_crds
from testoperator.playing import play
from testoperator.polling import until
from testoperator.running import run_to_end
from testoperator.world import Operation, World

VOLCANO, COSCHEDULING = {"volcano": {"queue": "research"}}, {"coscheduling": {"scheduleTimeoutSeconds": 30}}
PATHS = {"volcano": "scheduling.volcano.sh/v1beta1", "coscheduling": "scheduling.x-k8s.io/v1alpha1"}
CPU = {"numNodes": 2, "resourcesPerNode": {"requests": {"cpu": "500m"}, "limits": {"memory": "1Gi"}}}
SPECS: dict[str, dict[str, Any]] = {
    "volcano": {"minMember": 2, "queue": "research", "minResources": {"cpu": "1", "memory": str(2 * 2**30)}},
    "coscheduling": {"minMember": 2, "scheduleTimeoutSeconds": 30},
}


@pytest.fixture(scope="module")
def scheduling_api() -> Iterator[ApiServer]:
    """An API server with our CRDs and theirs."""
    with loudly():
        server = ApiServer(Claim.take(), Binaries.find_for_api_server())
        try:
            crds = Binaries.find_pod_group_crds()
            server.start()
            install_crds(server)
            for kind, path in PATHS.items():
                group = path.partition("/")[0]
                server.kubectl("apply", "--server-side", "-f", str(crds.path(f"{kind}.yaml")))
                server.kubectl("wait", "--for=condition=Established", f"crd/podgroups.{group}")
            yield server
        finally:
            server.claim.release()


async def status_when(world: World, job: ClusterJob, what: str, is_so: Callable[[Status], bool]) -> Status:
    async def holds() -> bool:
        return is_so(await world.status(job))

    await until(what, holds)
    return await world.status(job)


def why_not_ready(status: Status) -> tuple[str, str]:
    ready = next((one for one in status.conditions if one.type == "PodsReady"), None)
    return (ready.reason, ready.message) if ready is not None else ("", "")


async def pod_groups(world: World, kind: str) -> dict[str, Any]:
    """By the attempt that their names tell."""
    listed = await world.kube.get(f"/apis/{PATHS[kind]}/namespaces/{world.namespace}/podgroups")
    return {item["metadata"]["name"].split("-")[1]: item for item in listed["items"]}


@pytest.mark.parametrize(
    ("policy", "who"),
    [
        ({"kueue": {"queueName": "q"}}, "is Kueue installed?"),
        (VOLCANO, "is Volcano installed?"),
        (COSCHEDULING, "is the scheduler plugin coscheduling installed?"),
    ],
    ids=["kueue", "volcano", "coscheduling"],
)
def test_without_those_who_schedule_it_no_pod_is_made_and_the_job_says_so(
    operator_api: KubernetesClient, policy: dict[str, Any], who: str
) -> None:
    async def scene(world: World, operation: Operation) -> None:
        job = await world.make_job(podGroupPolicy=policy)
        refused = await status_when(
            world, job, "the job says so", lambda status: why_not_ready(status)[0] == "QueueRefused"
        )
        assert who in why_not_ready(refused)[1]
        assert refused.state is State.STARTING
        assert await world.pods() == []
        await world.kube.delete(job.path)
        await until("the job is gone", lambda: operation.jobs.statuses() == {})

    play(operator_api, scene)


class Unwanted(Kube):
    """May not have to do with PodGroups."""

    async def _request(self, method: str, path: str, *args: Any, **options: Any) -> Any:
        if "/podgroups" in path:
            raise Forbidden(f"{method} {path}")
        return await super()._request(method, path, *args, **options)


def test_job_of_an_operator_that_may_not_make_pod_groups_can_be_deleted(operator_api: KubernetesClient) -> None:
    async def run() -> None:
        async with World.open(operator_api.kubeconfig) as world:
            unwanted = await connect(operator_api.kubeconfig, Unwanted)
            try:
                operation = await world.operate(unwanted, namespaces=[world.namespace])
                await operation.look_after()
                job = await world.make_job(podGroupPolicy=COSCHEDULING)
                await status_when(
                    world, job, "the job says so", lambda status: why_not_ready(status)[0] == "QueueRefused"
                )
                await world.kube.delete(job.path)
                await until("the job is gone", lambda: operation.jobs.statuses() == {})
                await operation.close()
            finally:
                await unwanted.close()

    run_to_end(asyncio.wait_for(run(), 90))


@pytest.mark.parametrize(
    ("kind", "policy"), [("volcano", VOLCANO), ("coscheduling", COSCHEDULING)], ids=["volcano", "coscheduling"]
)
def test_each_attempt_has_a_pod_group_of_its_own_and_a_job_at_rest_has_none(
    scheduling_api: ApiServer, kind: str, policy: dict[str, Any]
) -> None:
    async def scene(world: World, operation: Operation) -> None:
        job = await world.make_job(trainer=CPU, podGroupPolicy=policy)
        for index in range(2):
            await world.kubelets.started(f"job-1-{index}")
        first = await pod_groups(world, kind)
        assert list(first) == ["1"]
        assert first["1"]["spec"] == SPECS[kind]
        assert first["1"]["metadata"]["ownerReferences"][0]["uid"] == job.uid
        name, metadata = first["1"]["metadata"]["name"], world.kubelets.pods["job-1-0"]["metadata"]
        assert name in [*metadata["labels"].values(), *metadata["annotations"].values()]
        await world.kubelets.end("job-1-1", 1)
        await world.kubelets.started("job-2-0")
        await until("the first attempt's is gone", lambda: has_only(world, kind, "2"))
        await world.kube.patch(job.path, {"spec": {"suspend": True}})
        await status_when(world, job, "the job is suspended", lambda status: status.state is State.SUSPENDED)
        await until("no PodGroup is left", lambda: has_only(world, kind))
        await world.kube.patch(job.path, {"spec": {"suspend": False}})
        for index in range(2):
            await world.kubelets.end(f"job-3-{index}", 0)
        await status_when(world, job, "the job is complete", lambda status: status.state is State.COMPLETE)
        await until("no PodGroup is left", lambda: has_only(world, kind))

    play(scheduling_api, scene)


async def has_only(world: World, kind: str, *attempts: str) -> bool:
    return list(await pod_groups(world, kind)) == list(attempts)


def test_gang_that_volcano_does_not_let_in_waits_in_its_words_and_is_not_late(scheduling_api: ApiServer) -> None:
    async def scene(world: World, operation: Operation) -> None:
        # Its pods have a gate, so that the scheduler that is played here leaves them alone.
        gate = "example.com/wait"
        template = {"spec": {"schedulingGates": [{"name": gate}]}}
        job = await world.make_job(trainer=CPU, podGroupPolicy=VOLCANO, template=template, startupDeadlineSeconds=1)
        await until("the PodGroup is there", lambda: has_only(world, "volcano", "1"))
        made = (await pod_groups(world, "volcano"))["1"]
        word = {"type": "Unschedulable", "status": "True", "message": "queue research is full"}
        path = f"/apis/{PATHS['volcano']}/namespaces/{world.namespace}/podgroups/{made['metadata']['name']}"
        await world.kube.patch(path, {"status": {"phase": "Pending", "conditions": [word]}})
        waiting = await status_when(
            world, job, "the job waits", lambda status: "queue research is full" in why_not_ready(status)[1]
        )
        assert why_not_ready(waiting) == ("Queued", "waits in queue research: queue research is full")
        for index in range(2):
            await world.kube.patch(
                f"/api/v1/namespaces/{world.namespace}/pods/job-1-{index}", {"spec": {"schedulingGates": []}}
            )
            await world.kubelets.started(f"job-1-{index}")
        admitted = await status_when(
            world, job, "the job is admitted", lambda status: bool(status.current and status.current.dequeued_time)
        )
        assert not admitted.is_terminal

    play(scheduling_api, scene)
