"""What the Kubernetes backend asks of the agents, and whose answers it waits for, on a real API server."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from stepfast.kube import Kube, KubeUnavailable
from stepfast.step import JobKey
from stepfast_operator.backends.kubernetes import KubernetesBackend
from stepfast_operator.backends.requests import Ask, Request, Requests
from stepfast_operator.clusterjob import ClusterJob
from stepfast_operator.document import JSON
from stepfast_operator.observed import AgentState
from stepfast_operator.record import Status
from testcluster.controlplane import KubernetesClient
from testoperator.backends import CHANGES, held, launch_of, play
from testoperator.connection import connect
from testoperator.kubelet import SILENT
from testoperator.polling import until
from testoperator.world import API, Operation, World, planned


def request(world: World, name: str, run: str, ask: Ask = Ask.FLUSH) -> Request:
    return Request(job=JobKey(namespace=world.namespace, name=name), run=run, ask=ask)


async def asked_of(world: World, index: int) -> list[tuple[str, str, str]]:
    document = await world.kube.get(f"{API}/checkpointnodes/{world.kubelets.node(index)}")
    asked = document.get("spec", {}).get("requests") or ()
    return sorted((one["name"], one["run"], one["action"]) for one in asked)


def test_checkpointnode_that_is_made_anew_is_asked_anew(operator_api: KubernetesClient) -> None:
    async def scenario(world: World, operation: Operation) -> None:
        requests = Requests(world.kube, operation.view.reports.get, lambda job: True)
        node = world.kubelets.node(0)
        for _ in range(2):
            await world.report(0)
            await until("it is known", lambda: operation.view.reports.get(node))
            await requests.ask([node], request(world, "a", "ua-1"))
            await requests.ask([node], request(world, "b", "ub-1"))
            assert await asked_of(world, 0) == [("a", "ua-1", "Flush"), ("b", "ub-1", "Flush")]
            await world.kube.delete(f"{API}/checkpointnodes/{node}")
            await until("it is gone", lambda: operation.view.reports.get(node) is None)

    play(operator_api, scenario)


def test_requests_of_several_jobs_share_a_list_and_settled_ones_go(operator_api: KubernetesClient) -> None:
    async def scenario(world: World, operation: Operation) -> None:
        living = {"a", "b", "c"}
        requests = Requests(world.kube, operation.view.reports.get, lambda job: job.name in living)
        for index in range(2):
            await world.report(index)
        both = [world.kubelets.node(0), world.kubelets.node(1)]
        await until("both are known", lambda: all(operation.view.reports.get(node) for node in both))
        answers = await asyncio.gather(
            requests.ask(both, request(world, "a", "ua-1")),
            requests.ask(both, request(world, "b", "ub-1", Ask.SAVE)),
            requests.ask([both[0], "no-such-node"], request(world, "c", "uc-1")),
        )
        assert [set(answer) for answer in answers] == [set(both), set(both), {both[0]}]
        assert await asked_of(world, 0) == [
            ("a", "ua-1", "Flush"), ("b", "ub-1", "Save"), ("c", "uc-1", "Flush")
        ]  # fmt: skip
        before = (await world.kube.get(f"{API}/checkpointnodes/{both[0]}"))["metadata"]["generation"]
        assert await requests.ask([both[0]], request(world, "a", "ua-1")) == {both[0]: before}, "asked already"
        await requests.ask(both[:1], request(world, "b", "ub-1"))
        assert ("b", "ub-1", "Save") in await asked_of(world, 0), "beside what stands for the same run"
        living.discard("c")
        await requests.ask(both[:1], request(world, "a", "ua-2"))
        assert await asked_of(world, 0) == [("a", "ua-2", "Flush"), ("b", "ub-1", "Flush"), ("b", "ub-1", "Save")]

    play(operator_api, scenario)


def test_node_that_takes_no_more_requests_is_said_and_has_not_answered(
    operator_api: KubernetesClient, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(world: World, operation: Operation) -> None:
        job = await world.make_job()
        backend, status, run = operation.backend(job), planned(job), f"{job.uid}-1"
        await backend.launch(launch_of(job))
        await world.kubelets.started("job-1-0")
        await world.report(0)
        node = world.kubelets.node(0)
        await until("the node is known", lambda: operation.view.is_ready(node) and operation.view.reports.get(node))
        full = [request(world, f"j{number}", f"u{number}-1").to_document() for number in range(1024)]
        await world.kube.patch(f"{API}/checkpointnodes/{node}", {"spec": {"requests": full}})
        requests = Requests(world.kube, operation.view.reports.get, lambda job: True)
        backend = KubernetesBackend(replace(operation.cluster, requests=requests), job)
        await until("its list is seen to be full", lambda: len(operation.view.reports.get(node).requests) == 1024)
        for _ in range(3):
            await backend.flush(run)
            await world.report(0)
            assert (await backend.observe(status)).awaited_agents == (node,), "nobody knows what is left there"
        [said] = [record.getMessage() for record in caplog.records if node in record.getMessage()]
        assert "takes no request" in said
        assert f"kubectl edit checkpointnode {node}" in said
        await world.kube.patch(f"{API}/checkpointnodes/{node}", {"spec": {"requests": full[:5]}})
        await until("it is mended", lambda: len(operation.view.reports.get(node).requests) == 5)
        await backend.flush(run)
        assert ("job", run, "Flush") in await asked_of(world, 0)

    play(operator_api, scenario)


def test_node_that_cannot_be_asked_keeps_no_other_from_being_asked(operator_api: KubernetesClient) -> None:
    async def scenario(world: World, operation: Operation) -> None:
        nodes = [world.kubelets.node(index) for index in range(3)]
        for index in range(3):
            await world.report(index)
        await until("all are known", lambda: all(operation.view.reports.get(node) for node in nodes))
        kube = await connect(operator_api.kubeconfig, FailsOn)
        assert isinstance(kube, FailsOn)
        kube.names = tuple(nodes[:2])
        try:
            requests = Requests(kube, operation.view.reports.get, lambda job: True)
            with pytest.raises(KubeUnavailable, match=nodes[0]):
                await requests.ask(nodes, request(world, "a", "ua-1"))
        finally:
            await kube.close()
        assert await asked_of(world, 0) == []
        assert await asked_of(world, 2) == [("a", "ua-1", "Flush")]

    play(operator_api, scenario)


class FailsOn(Kube):
    """Changes of objects of these names are not answered."""

    names: tuple[str, ...] = ()

    async def _request(self, method: str, path: str, query: Any, body: JSON = None, **options: Any) -> JSON:
        if method in CHANGES and path.endswith(self.names):
            raise KubeUnavailable(f"{path} is not answered")
        return await super()._request(method, path, query, body, **options)


def test_node_that_goes_while_it_is_asked_is_not_waited_for(operator_api: KubernetesClient) -> None:
    async def scenario(world: World, operation: Operation) -> None:
        await world.report(0)
        node = world.kubelets.node(0)
        await until("it is known", lambda: operation.view.reports.get(node))
        held = operation.view.reports.get(node)
        await world.kube.delete(f"{API}/checkpointnodes/{node}")
        requests = Requests(world.kube, lambda name: held, lambda job: True)
        assert await requests.ask([node], request(world, "a", "ua-1")) == {}

    play(operator_api, scenario)


def test_agent_is_awaited_until_it_has_taken_the_request_in(operator_api: KubernetesClient) -> None:
    async def scenario(world: World, operation: Operation) -> None:
        job = await world.make_job()
        backend = operation.backend(job)
        await backend.launch(launch_of(job))
        await world.kubelets.started("job-1-0")
        node = world.kubelets.node(0)
        await world.report(0)
        await until("the node is known", lambda: operation.view.is_ready(node) and operation.view.reports.get(node))
        status = planned(job)
        assert (await backend.observe(status)).awaited_agents == ()
        await backend.flush(f"{job.uid}-1")
        assert await asked_of(world, 0) == [("job", f"{job.uid}-1", "Flush")]
        assert (await backend.observe(status)).awaited_agents == (node,)
        await world.report(0)

        async def is_taken_in() -> bool:
            return (await backend.observe(status)).awaited_agents == ()

        await until("it is taken in", is_taken_in)
        assert operation.view.pods_of(job.job, job.uid)[0].run == f"{job.uid}-1"

    play(operator_api, scenario)


def flush_asked(job: ClusterJob) -> Status:
    """What was written when the agents had been asked."""
    status = planned(job)
    assert status.current is not None
    return replace(status, current=replace(status.current, flush_asked_time=2.0))


@pytest.mark.parametrize("is_lost", [False, True], ids=["the request stands", "somebody took it away"])
def test_next_operator_awaits_the_agents_that_have_not_taken_the_request_in(
    operator_api: KubernetesClient, is_lost: bool
) -> None:
    """Or their reports, which are older than the request, would tell it that nothing is left."""

    async def scenario(world: World, operation: Operation) -> None:
        job = await world.make_job(trainer={"numNodes": 2})
        run = f"{job.uid}-1"
        await operation.backend(job).launch(launch_of(job))
        nodes = [world.kubelets.node(index) for index in range(2)]
        for index, node in enumerate(nodes):
            await world.kubelets.started(f"job-1-{index}")
            await world.report(index)
            await until(
                "the node is known",
                lambda node=node: operation.view.is_ready(node) and operation.view.reports.get(node),
            )
        await operation.backend(job).flush(run)
        await world.report(1)
        if is_lost:
            await world.kube.patch(f"{API}/checkpointnodes/{nodes[0]}", {"spec": {"requests": []}})
            await world.report(0)
        await operation.close()
        following = await world.operate()
        backend, status = following.backend(await world.job(job)), flush_asked(job)
        assert (await backend.observe(status)).awaited_agents == (nodes[0],)
        await backend.flush(run)
        assert await asked_of(world, 0) == [("job", run, "Flush")]
        assert (await backend.observe(status)).awaited_agents == (nodes[0],)
        await world.report(0)

        async def is_taken_in() -> bool:
            return (await backend.observe(status)).awaited_agents == ()

        await until("it is taken in", is_taken_in)
        last = following.backend(await world.job(job))
        assert (await last.observe(status)).awaited_agents == (), "it knows that without asking"

    play(operator_api, scenario)


def test_next_operator_awaits_no_agent_of_a_node_that_is_lost_or_never_had_one(operator_api: KubernetesClient) -> None:
    async def scenario(world: World, operation: Operation) -> None:
        job = await world.make_job(trainer={"numNodes": 2})
        await operation.backend(job).launch(launch_of(job))
        for index in range(2):
            await world.kubelets.started(f"job-1-{index}")
        node = world.kubelets.node(0)
        await world.report(0)
        await until("the node is known", lambda: operation.view.is_ready(node) and operation.view.reports.get(node))
        await operation.backend(job).flush(f"{job.uid}-1")
        await operation.close()
        following = await world.operate()
        backend, status = following.backend(await world.job(job)), flush_asked(job)
        assert (await backend.observe(status)).awaited_agents == (node,)
        await world.kubelets.say(0, SILENT)
        await until("the node is silent", lambda: not following.view.is_ready(node))
        assert (await backend.observe(status)).awaited_agents == ()

    play(operator_api, scenario)


@pytest.mark.parametrize(
    ("tail", "is_awaited"), [("-1", False), ("-2", True), ("-2.1", True)], ids=["earlier run", "run", "in place"]
)
def test_node_without_an_agent_is_waited_for_when_it_holds_the_current_run_alone(
    operator_api: KubernetesClient, tail: str, is_awaited: bool
) -> None:
    """A dead agent cannot take its report back: what it says of an earlier run would be waited for for ever."""

    async def scenario(world: World, operation: Operation) -> None:
        job = await world.make_job()
        backend, status, run = operation.backend(job), planned(job, 2), f"{job.uid}-2"
        await backend.launch(launch_of(job, 2))
        await world.kubelets.started("job-2-0")
        await world.make_agent(0)
        await world.report(0, held(job, run))
        await world.kubelets.make_node(1)
        await world.report(1, held(job, job.uid + tail))
        here, there = world.kubelets.node(0), world.kubelets.node(1)
        await until(
            "both nodes' reports are read",
            lambda: (
                len(operation.view.reports_of(job.job)) == 2
                and operation.view.is_ready(there)
                and operation.view.has_ready_agent(here)
            ),
        )
        expected = AgentState.STARTING if is_awaited else AgentState.READY
        assert (await backend.observe(status)).agent is expected
        await backend.flush(run)
        assert await asked_of(world, 0) == [("job", run, "Flush")]
        assert await asked_of(world, 1) == ([("job", run, "Flush")] if is_awaited else [])
        awaited = (await backend.observe(status)).awaited_agents
        assert awaited == ((here, there) if is_awaited else (here,))

    play(operator_api, scenario)
