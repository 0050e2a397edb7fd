"""A trimmed copy of what the API server holds stays true, whatever happens to the connection and to history."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kopf
import pytest
import yaml

from stepfast.kube import Kube
from stepfast_operator import clusterview, handlers
from stepfast_operator.cache import Reflector
from stepfast_operator.clusterview import ClusterView
from stepfast_operator.document import JSON, time_text
from stepfast_operator.jobs import Jobs
from stepfast_operator.jobwatch import JobWatch
from stepfast_operator.metrics import Metrics
from testcluster.binaries import Binaries
from testcluster.claim import Claim
from testcluster.controlplane import ApiServer, KubernetesClient
from testcluster.fixtures import loudly
from testoperator.connection import connect
from testoperator.kubelet import READY, SILENT
from testoperator.polling import until
from testoperator.running import run_to_end
from testoperator.wire import Wire
from testoperator.world import API, World, make_namespace

Mirror = Reflector[str, str]


class Counting(Kube):
    """Counts what is asked."""

    gets = watches = 0

    async def get(self, path: str, **query: str) -> JSON:
        self.gets += 1
        return await super().get(path, **query)

    def watch(self, path: str, *, idle_seconds: float, **query: str) -> Any:
        self.watches += 1
        return super().watch(path, idle_seconds=idle_seconds, **query)


class Place:
    """ConfigMaps of one namespace, behind a wire."""

    def __init__(self, admin: Kube, seen: Counting, wire: Wire, namespace: str) -> None:
        self.admin, self.seen, self.wire = admin, seen, wire
        self.path = f"/api/v1/namespaces/{namespace}/configmaps"
        self.changes: list[tuple[str | None, str | None]] = []

    def mirror(self, **options: Any) -> Mirror:
        def trim(document: JSON) -> tuple[str, str] | None:
            name = document["metadata"]["name"]
            return None if name.startswith("kube-") else (name, (document.get("data") or {}).get("value", ""))

        return Reflector(self.seen, self.path, trim, lambda old, new: self.changes.append((old, new)), **options)

    async def make(self, name: str, value: str = "1") -> JSON:
        return await self.admin.create(self.path, {"metadata": {"name": name}, "data": {"value": value}})

    async def change(self, name: str, value: str) -> None:
        await self.admin.patch(f"{self.path}/{name}", {"data": {"value": value}})

    async def remove(self, name: str) -> None:
        await self.admin.delete(f"{self.path}/{name}")


def play(api: KubernetesClient, scenario: Callable[[Place], Awaitable[None]]) -> None:
    async def run() -> None:
        admin = await connect(api.kubeconfig)
        url = urlsplit(str(admin._api.configuration.host))
        assert url.hostname is not None
        async with Wire(url.hostname, url.port or 443).laid() as wire:
            seen = await connect(api.kubeconfig, Counting, server=wire.url)
            assert isinstance(seen, Counting)
            try:
                await asyncio.wait_for(scenario(Place(admin, seen, wire, await make_namespace(admin))), 100)
            finally:
                await seen.close()
                await admin.close()

    run_to_end(run())


@asynccontextmanager
async def running(mirror: Mirror) -> Any:
    task = asyncio.create_task(mirror.run())
    try:
        await asyncio.wait_for(mirror.synced.wait(), 60)
        yield mirror
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_everything_is_read_in_pages_and_kept_up(api_server: KubernetesClient) -> None:
    async def scenario(place: Place) -> None:
        names = [f"n{number}" for number in range(510)]
        gate = asyncio.Semaphore(20)

        async def make(name: str) -> None:
            async with gate:
                await place.make(name)

        await asyncio.gather(*map(make, names))
        async with running(place.mirror()) as mirror:
            assert place.seen.gets == 2, "pages of 500"
            assert len(list(mirror.values())) == 510
            await place.make("new", "a")
            await place.change("n7", "b")
            await place.remove("n8")
            await until(
                "all is seen", lambda: (mirror.get("new"), mirror.get("n7"), mirror.get("n8")) == ("a", "b", None)
            )
            assert place.changes[-3:] == [(None, "a"), ("1", "b"), ("1", None)]

    play(api_server, scenario)


def test_silent_connection_is_dropped_and_begun_again(api_server: KubernetesClient) -> None:
    async def scenario(place: Place) -> None:
        await place.make("a")
        async with running(place.mirror(idle_seconds=1.0)) as mirror:
            await until("it watches", lambda: place.seen.watches == 1)
            await place.change("a", "2")
            await until("the watch works", lambda: mirror.get("a") == "2")
            place.wire.stall()
            await place.change("a", "3")
            await until("it grows old", lambda: mirror.age_seconds() > 0.5)
            await until("it is seen on another connection", lambda: mirror.get("a") == "3", seconds=20)
            assert mirror.age_seconds() < 0.5
            assert place.seen.watches >= 2
            assert place.seen.gets == 1, "history goes on where it stood: nothing is listed again"

    play(api_server, scenario)


def test_lost_connection_grows_old_and_is_found_again(api_server: KubernetesClient) -> None:
    async def scenario(place: Place) -> None:
        await place.make("a")
        async with running(place.mirror()) as mirror:
            await until("it watches", lambda: place.seen.watches == 1)
            place.wire.cut()
            await place.remove("a")
            await until("it grows old", lambda: mirror.age_seconds() > 1)
            assert mirror.get("a") == "1"
            place.wire.mend()
            await until("its end is seen", lambda: mirror.get("a") is None)

    play(api_server, scenario)


def test_answer_is_taken_ahead_of_the_watch(api_server: KubernetesClient) -> None:
    async def scenario(place: Place) -> None:
        async with running(place.mirror()) as mirror:
            await until("it watches", lambda: place.seen.watches == 1)
            place.wire.stall()
            mirror.take(await place.make("a"))
            assert mirror.get("a") == "1"
            made = await place.make("b")
            mirror.take(made)
            mirror.drop("b", "of another object")
            assert mirror.get("b") == "1"
            mirror.drop("b", made["metadata"]["uid"])
            assert mirror.get("b") is None

    play(api_server, scenario)


def test_answer_that_comes_after_the_objects_end_brings_nothing_back(api_server: KubernetesClient) -> None:
    async def scenario(place: Place) -> None:
        async with running(place.mirror()) as mirror:
            late = await place.make("a")
            await place.remove("a")
            await place.make("marker")
            await until("the watch is beyond both", lambda: mirror.get("marker"))
            mirror.take(late)
            assert mirror.get("a") is None

    play(api_server, scenario)


def test_answer_that_comes_after_an_end_that_no_watch_saw_brings_nothing_back(api_server: KubernetesClient) -> None:
    """It was made and went before the list was read."""

    async def scenario(place: Place) -> None:
        late = await place.make("a")
        await place.remove("a")
        async with running(place.mirror()) as mirror:
            mirror.take(late)
            assert mirror.get("a") is None

    play(api_server, scenario)


# ---- how long the operator's own watches may be silent


class Patient(Kube):
    """Notes how long each watch is believed in that says nothing."""

    idle_seconds: dict[str, float]

    def watch(self, path: str, *, idle_seconds: float, **query: str) -> Any:
        self.idle_seconds[path] = idle_seconds
        return super().watch(path, idle_seconds=idle_seconds, **query)


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


def kubeconfig_through(wire: Wire, api: KubernetesClient, folder: Path) -> Path:
    document = yaml.safe_load(api.kubeconfig.read_text())
    for cluster in document["clusters"]:
        cluster["cluster"]["server"] = wire.url
    path = folder / "kubeconfig"
    path.write_text(json.dumps(document))
    return path


# ---- with an API server that a test may stop


@pytest.fixture(scope="module")
def own_server() -> Iterator[ApiServer]:
    with loudly():
        server = ApiServer(Claim.take(), Binaries.find_for_api_server())
        try:
            server.start()
            yield server
        finally:
            server.claim.release()


def compact(server: ApiServer, version: int) -> None:
    """etcd forgets what was before, through its gateway for HTTP."""
    body = json.dumps({"revision": version, "physical": True}).encode()
    url = f"http://{server.claim.addresses.loopback}:2379/v3/kv/compaction"
    with urllib.request.urlopen(urllib.request.Request(url, data=body), timeout=30) as answer:
        assert answer.status == 200


def test_history_that_was_forgotten_is_listed_anew_and_what_went_meanwhile_is_gone(own_server: ApiServer) -> None:
    async def scenario(place: Place) -> None:
        for name in ("a", "b"):
            await place.make(name)
        async with running(place.mirror()) as mirror:
            await until("it watches", lambda: place.seen.watches == 1)
            place.wire.cut()
            await place.remove("a")
            await place.change("b", "2")
            newest = await place.make("c")
            await asyncio.to_thread(own_server.stop_api_server)
            compact(own_server, int(newest["metadata"]["resourceVersion"]))
            await asyncio.to_thread(own_server.restart_api_server)
            place.wire.mend()
            await until("the new is seen", lambda: mirror.get("c") == "1")
            assert (mirror.get("a"), mirror.get("b")) == (None, "2")
            assert place.seen.gets == 2, "listed once more"

    play(own_server, scenario)


def test_history_that_is_forgotten_between_two_pages_is_read_from_the_start(
    own_server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(place: Place) -> None:
        monkeypatch.setattr("stepfast_operator.cache.PAGE", 2)
        for name in ("a", "b", "c", "d", "e"):
            await place.make(name)
        real, pages = place.seen.get, []

        async def get(path: str, **query: str) -> JSON:
            if "continue" in query and not pages:
                pages.append(query)
                await place.remove("b")
                newest = await place.make("f")
                compact(own_server, int(newest["metadata"]["resourceVersion"]))
            return await real(path, **query)

        monkeypatch.setattr(place.seen, "get", get)
        async with running(place.mirror()) as mirror:
            await until("all is read", lambda: mirror.get("f") == "1")
            assert mirror.get("b") is None
            assert len(list(mirror.values())) == 5

    play(own_server, scenario)


def test_restarted_api_server_is_found_again(own_server: ApiServer) -> None:
    async def scenario(place: Place) -> None:
        await place.make("a")
        async with running(place.mirror()) as mirror:
            await until("it watches", lambda: place.seen.watches >= 1)
            await asyncio.to_thread(own_server.stop_api_server)
            await asyncio.to_thread(own_server.restart_api_server)
            await place.change("a", "2")
            await until("the change is seen", lambda: mirror.get("a") == "2")

    play(own_server, scenario)


@asynccontextmanager
async def looking(world: World, kube: Kube) -> AsyncIterator[ClusterView]:
    view = ClusterView(
        kube, namespaces=[world.namespace], agent_namespace=world.namespace, wake_uid=lambda uid: None,
        wake_job=lambda job: None, wake_later=lambda job: None,
    )  # fmt: skip
    task = asyncio.create_task(view.run())
    try:
        await asyncio.wait_for(view.synced(), 60)
        yield view
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_node_that_is_called_silent_after_an_outage_has_time_to_speak(
    operator_api: KubernetesClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: World, wire: Wire) -> None:
        kube = await connect(operator_api.kubeconfig, server=wire.url)
        node = world.kubelets.node(0)
        try:
            await world.kubelets.make_node(0)
            async with looking(world, kube) as view:

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
                await until("the API server is missed", lambda: view.nodes.failed_seconds() < 60)
                wire.mend()
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
        async with looking(world, world.kube) as view:
            told = view.nodes.get(node)
            assert told is not None
            assert told.not_ready_time is not None
            assert view.is_ready(node) is not is_believed

    play_behind_a_wire(operator_api, scenario)


def play_behind_a_wire(api: KubernetesClient, scenario: Callable[[World, Wire], Awaitable[None]]) -> None:
    async def run() -> None:
        async with World.open(api.kubeconfig) as world:
            url = urlsplit(str(world.kube._api.configuration.host))
            assert url.hostname is not None
            async with Wire(url.hostname, url.port or 443).laid() as wire:
                await asyncio.wait_for(scenario(world, wire), 100)

    run_to_end(run())
