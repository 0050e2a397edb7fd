"""A trimmed copy of what the API server holds stays true, whatever happens to the connection and to history."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from stepfast.kube import ALL_FIELDS, Fields, Kube, Page
from stepfast_operator.cache import Reflector
from stepfast_operator.document import JSON
from testcluster.binaries import Binaries
from testcluster.claim import Claim
from testcluster.controlplane import ApiServer, KubernetesClient
from testcluster.fixtures import loudly
from testoperator.connection import connect
from testoperator.polling import until
from testoperator.running import run_to_end
from testoperator.wire import Wire
from testoperator.world import make_namespace

Mirror = Reflector[str, str]


class Counting(Kube):
    """Counts what is asked."""

    pages_read = watches = 0

    async def pages(self, path: str, fields: Fields = ALL_FIELDS, /, **query: str) -> AsyncGenerator[Page, None]:
        async for page in super().pages(path, fields, **query):
            self.pages_read += 1
            yield page

    def watch(self, path: str, fields: Fields = ALL_FIELDS, /, *, idle_seconds: float, **query: str) -> Any:
        self.watches += 1
        return super().watch(path, fields, idle_seconds=idle_seconds, **query)


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
            assert place.seen.pages_read == 2, "pages of 500"
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
            assert place.seen.pages_read == 1, "history goes on where it stood: nothing is listed again"

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
            assert place.seen.pages_read == 2, "listed once more"

    play(own_server, scenario)


def test_history_that_is_forgotten_between_two_pages_is_read_from_the_start(
    own_server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(place: Place) -> None:
        monkeypatch.setattr("stepfast.kube.PAGE", 2)
        for name in ("a", "b", "c", "d", "e"):
            await place.make(name)
        real, forgotten = place.seen.pages, asyncio.Event()

        async def pages(path: str, fields: Fields = ALL_FIELDS, /, **query: str) -> AsyncGenerator[Page, None]:
            async for page in real(path, fields, **query):
                yield page
                if not forgotten.is_set():
                    forgotten.set()
                    await place.remove("b")
                    newest = await place.make("f")
                    compact(own_server, int(newest["metadata"]["resourceVersion"]))

        monkeypatch.setattr(place.seen, "pages", pages)
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
