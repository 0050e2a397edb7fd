"""What the operator watches: how long a watch may be silent, and what an outage says of nodes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kopf
import pytest

from stepfast.kube import ALL_FIELDS, Fields, Kube
from stepfast_operator import cache, clusterview, handlers
from stepfast_operator.document import time_text
from stepfast_operator.jobs import Jobs
from stepfast_operator.jobwatch import JobWatch
from stepfast_operator.metrics import Metrics
from testcluster.controlplane import KubernetesClient
from testoperator.behindwire import kubeconfig_through, play_behind_a_wire
from testoperator.connection import connect
from testoperator.kubelet import READY, SILENT
from testoperator.polling import until
from testoperator.running import run_to_end
from testoperator.wire import Wire
from testoperator.world import API, World


class Patient(Kube):
    """Notes how long each watch is believed in that says nothing."""

    idle_seconds: dict[str, float]

    def watch(self, path: str, fields: Fields = ALL_FIELDS, /, *, idle_seconds: float, **query: str) -> Any:
        self.idle_seconds[path] = idle_seconds
        return super().watch(path, fields, idle_seconds=idle_seconds, **query)


@pytest.mark.parametrize("is_namespaced", [False, True], ids=["all namespaces", "one namespace"])
def test_every_watch_of_pods_nodes_and_reports_is_dropped_when_it_is_silent(
    operator_api: KubernetesClient, is_namespaced: bool
) -> None:
    """Not before a bookmark is due, which the server sends about once a minute; and before it would end the watch."""

    async def scenario() -> None:
        patient = await connect(operator_api.kubeconfig, Patient)
        assert isinstance(patient, Patient)
        patient.idle_seconds = {}
        async with World.open(operator_api.kubeconfig) as world:
            where = world.namespace
            operation = await world.operate(patient, namespaces=[where] if is_namespaced else [])
            pods = f"/api/v1/namespaces/{where}/pods" if is_namespaced else "/api/v1/pods"
            paths = {pods, f"/api/v1/namespaces/{where}/pods", "/api/v1/nodes", f"{API}/checkpointnodes"}
            await until("it watches", lambda: patient.idle_seconds.keys() == paths)
            assert all(60 < seconds < 300 for seconds in patient.idle_seconds.values())
            await operation.close()
            await patient.close()

    run_to_end(asyncio.wait_for(scenario(), 100))


class Told(JobWatch):
    """The jobs that kopf told of."""

    def __init__(self) -> None:
        super().__init__()
        self.uids: set[str] = set()

    def note(self, uid: str, version: int) -> None:
        super().note(uid, version)
        self.uids.add(uid)


def test_silent_watch_of_jobs_is_dropped_by_kopf_and_begun_again(
    operator_api: KubernetesClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With our settings for it, and a second in place of minutes: left to itself, kopf waits for ever, or for 70 s."""
    monkeypatch.setattr(handlers, "_CLIENT_TIMEOUT_SECONDS", 1)
    monkeypatch.setattr(handlers, "_REQUEST_TIMEOUT_SECONDS", 1)

    async def scenario(world: World, wire: Wire) -> None:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig_through(wire, operator_api, tmp_path)))
        told, stop, where = Told(), asyncio.Event(), world.namespace
        jobs = Jobs(Metrics())
        kopf_task = asyncio.create_task(
            kopf.operator(
                registry=handlers.registry_of(jobs, told), settings=handlers.settings_of(), namespaces=[where],
                stop_flag=stop,
            )
        )  # fmt: skip
        try:
            first = await world.make_job("first")
            await until("the watch works", lambda: first.uid in told.uids)
            wire.stall()
            second = await world.make_job("second")
            await until("the second is told on another connection", lambda: second.uid in told.uids, seconds=30)
        finally:
            stop.set()
            await asyncio.wait_for(kopf_task, 30)

    play_behind_a_wire(operator_api, scenario)


def test_node_that_was_never_heard_of_is_not_gone_and_one_that_was_removed_is(operator_api: KubernetesClient) -> None:
    async def scenario() -> None:
        async with World.open(operator_api.kubeconfig) as world, world.looking() as view:
            seen = world.kubelets.node(0)
            await world.kubelets.make_node(0)
            await until("it is known", lambda: view.node(seen))
            now = time.time()

            def pod(node: str, placed_seconds_ago: float) -> Any:
                return SimpleNamespace(node=node, placed_time=now - placed_seconds_ago, created_time=now - 1000)

            assert not view.is_gone(pod(seen, 1000))
            assert not view.is_gone(pod("never-heard-of", 5))
            assert view.is_gone(pod("never-heard-of", 1000)), "every watch was begun anew meanwhile"
            await world.kube.delete(f"/api/v1/nodes/{seen}")
            await until("it is gone", lambda: view.node(seen) is None)
            assert view.is_gone(pod(seen, 5))

    run_to_end(asyncio.wait_for(scenario(), 60))


def test_node_that_is_called_silent_after_an_outage_has_time_to_speak(
    operator_api: KubernetesClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: World, wire: Wire) -> None:
        kube = await connect(operator_api.kubeconfig, server=wire.url)
        node = world.kubelets.node(0)
        try:
            await world.kubelets.make_node(0)
            async with world.looking(kube) as view:

                async def says(condition: dict[str, str]) -> None:
                    await world.kubelets.say(0, condition)

                    def is_told() -> bool:
                        told = view.nodes.get(node)
                        return told is not None and (told.not_ready_time is None) is (condition is READY)

                    await until("it is told", is_told)

                await says(SILENT)
                assert not view.is_ready(node), "the API server was there all the time: nobody waits"
                await says(READY)
                wire.cut()
                wire.mend()
                await says(SILENT)
                assert not view.is_ready(node), "it was away for a moment, which no controller takes for silence"
                await says(READY)
                monkeypatch.setattr(cache, "_OUTAGE_SECONDS", 0.0)
                wire.cut()
                await until("the API server is missed", lambda: view.nodes.failed_seconds() < 60)
                wire.mend()
                await says({**SILENT, "status": "False"})
                assert not view.is_ready(node), "its kubelet has spoken"
                await says(READY)
                await says(SILENT)
                assert view.is_ready(node)
                await says(READY)
                assert view.is_ready(node)
                monkeypatch.setattr(clusterview, "_DOUBT_SECONDS", 0.1)
                await says(SILENT)
                await until("it is believed", lambda: not view.is_ready(node))
        finally:
            await kube.close()

    play_behind_a_wire(operator_api, scenario)


@pytest.mark.parametrize(("ago", "is_believed"), [(0.0, False), (100.0, True)], ids=["just now", "before that"])
def test_operator_that_begins_gives_a_node_that_was_just_called_silent_time_to_speak(
    operator_api: KubernetesClient, ago: float, is_believed: bool
) -> None:
    async def scenario(world: World, wire: Wire) -> None:
        node = world.kubelets.node(0)
        await world.kubelets.make_node(0)
        since = time_text(time.time() - ago).partition(".")[0] + "Z"
        condition = {**SILENT, "lastTransitionTime": since, "lastHeartbeatTime": since}
        await world.kube.patch(f"/api/v1/nodes/{node}/status", {"status": {"conditions": [condition]}})
        async with world.looking() as view:
            told = view.nodes.get(node)
            assert told is not None
            assert told.not_ready_time is not None
            assert view.is_ready(node) is not is_believed

    play_behind_a_wire(operator_api, scenario)
