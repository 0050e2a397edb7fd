"""How many connections to the API server are kept, seen from the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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

    async def answer_together(self, request: web.Request) -> web.Response:
        async with self._crowd:
            self._here += 1
            self._crowd.notify_all()
            await self._crowd.wait_for(lambda: self._here >= BUSY)
        return web.json_response({})

    async def answer_at_once(self, request: web.Request) -> web.Response:
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


def test_connections_of_a_busy_spell_go_while_requests_come_now_and_then() -> None:
    async def scenario() -> None:
        async with served(Server()) as (address, server):
            configuration = client.Configuration(host=address)
            patience = Patience(
                connect_seconds=SECONDS, read_seconds=SECONDS, change_seconds=SECONDS, idle_seconds=IDLE_SECONDS
            )
            kube = Kube(configuration, patience)
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
