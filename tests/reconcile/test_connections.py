"""How many connections to the API server are kept, and by which way they go, seen from the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from kubernetes.aio import client

from stepfast.kube import Kube, Patience

BUSY = 20  # requests at once
IDLE_SECONDS = 0.2
SECONDS = 60.0


class Server:
    """Answers a request once so many are there at a time as the test says."""

    def __init__(self) -> None:
        self._crowd = asyncio.Condition()
        self._here = 0
        self.asked: list[tuple[str, str | None]] = []  # hosts of requests that were answered at once, and who asked

    async def answer_together(self, request: web.Request) -> web.Response:
        async with self._crowd:
            self._here += 1
            self._crowd.notify_all()
            await self._crowd.wait_for(lambda: self._here >= BUSY)
        return web.json_response({})

    async def answer_at_once(self, request: web.Request) -> web.Response:
        self.asked.append((request.host, request.headers.get("Authorization")))
        return web.json_response({})


@asynccontextmanager
async def served(server: Server) -> AsyncIterator[tuple[str, web.Server]]:
    """Its address, and aiohttp's own server, which knows what is connected."""
    application = web.Application()
    application.router.add_get("/together", server.answer_together)
    application.router.add_get("/lease", server.answer_at_once)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert runner.server is not None
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", runner.server
    finally:
        await runner.cleanup()


def connected(address: str) -> Kube:
    patience = Patience(
        connect_seconds=SECONDS, read_seconds=SECONDS, change_seconds=SECONDS, idle_seconds=IDLE_SECONDS
    )
    return Kube(client.Configuration(host=address), patience)


def test_connections_of_a_busy_spell_go_while_requests_come_now_and_then() -> None:
    async def scenario() -> None:
        async with served(Server()) as (address, server):
            kube = connected(address)
            try:
                await asyncio.gather(*(kube.get("/together") for _ in range(BUSY)))
                assert len(server.connections) == BUSY
                async with asyncio.timeout(SECONDS):
                    while len(server.connections) > BUSY // 4:
                        await kube.get("/lease")
                        await asyncio.sleep(IDLE_SECONDS / 2)
            finally:
                await kube.close()

    asyncio.run(scenario())


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without proxies."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


async def ask_once(address: str) -> None:
    kube = connected(address)
    try:
        await kube.get("/lease")
    finally:
        await kube.close()


def test_api_server_is_reached_by_the_proxy_that_the_environment_names(environment: pytest.MonkeyPatch) -> None:
    async def scenario() -> list[tuple[str, str | None]]:
        server = Server()
        async with served(server) as (address, _):
            environment.setenv("http_proxy", address)
            await ask_once("http://api.invalid")
        return server.asked

    assert asyncio.run(scenario()) == [("api.invalid", None)]


def test_api_server_is_told_no_password_of_a_netrc(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def scenario() -> list[str | None]:
        server = Server()
        async with served(server) as (address, _):
            await ask_once(address)
        return [authorization for _, authorization in server.asked]

    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login somebody password secret\n")
    environment.setenv("NETRC", str(netrc))
    assert asyncio.run(scenario()) == [None]
