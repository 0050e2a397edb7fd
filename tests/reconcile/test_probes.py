"""What the operator answers to a kubelet's probes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import aiohttp
import psutil
import pytest
from aiohttp import web

from stepfast_operator.serving import DEAD_WATCH_SECONDS, health_answer, serve

LONG = DEAD_WATCH_SECONDS + 60
_MANY = 300


@pytest.mark.parametrize(
    ("ages", "owed", "dead"),
    [
        pytest.param({"pods": 3.0, "nodes": 40.0}, 0.0, "", id="all are heard of"),
        pytest.param({"pods": 3.0, "nodes": LONG}, 0.0, "nodes: nothing heard for 240 s", id="one is not"),
        pytest.param({"pods": 3.0, "nodes": 40.0}, LONG, "trainingjobs: nothing heard for 240 s", id="kopf's is not"),
        pytest.param({"pods": LONG, "nodes": LONG + 9}, LONG, "", id="the API server is away"),
    ],
)
def test_watch_that_is_silent_while_others_hear_is_dead(ages: dict[str, float], owed: float, dead: str) -> None:
    answer = health_answer(lambda: ages, lambda: owed)()
    assert (answer.status, answer.text) == ((503, f"{dead}\n") if dead else (200, "ok\n"))


async def _statuses(port: int, *pages: str) -> list[int]:
    statuses = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        for page in pages:
            async with session.get(f"http://127.0.0.1:{port}/{page}") as answer:
                statuses.append(answer.status)
    return statuses


def _connections(port: int) -> int:
    """How many the server has."""
    found = psutil.Process(os.getpid()).net_connections("tcp")
    return sum(one.laddr.port == port and bool(one.raddr) for one in found)


def test_connections_that_never_end_their_requests_are_few_and_hold_up_no_probe() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]

    async def meet() -> None:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(serve(port, healthz=lambda: web.Response(text="ok")))
            readers = []
            for _ in range(_MANY):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                stack.callback(writer.close)
                writer.write(b"GET /heal")
                readers.append(reader)
            assert await _statuses(port, "healthz", "elsewhere") == [200, 404]
            assert _connections(port) < _MANY // 2
            async with asyncio.timeout(60):
                for reader in readers:
                    with contextlib.suppress(ConnectionError):
                        await reader.read()
            assert _connections(port) == 0

    asyncio.run(meet())
