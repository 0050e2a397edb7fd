"""The operator's two small HTTP servers: metrics, and the health probe."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from aiohttp import web

from stepfast_operator.metrics import Metrics

# Beyond the watches' own time-outs: the API server is away, or a watcher is dead. A new process costs nothing then.
DEAD_WATCH_SECONDS = 180.0
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


@asynccontextmanager
async def serve(port: int | None, path: str, answer: Callable[[], web.Response]) -> AsyncIterator[None]:
    """Answers GET on that path of every address of the pod while the context lasts; nothing without a port."""
    if port is None:
        yield
        return

    async def handle(_: web.Request) -> web.Response:
        return answer()

    application = web.Application()
    application.router.add_get(path, handle)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, port=port).start()
        yield
    finally:
        await runner.cleanup()


def metrics_answer(metrics: Metrics) -> Callable[[], web.Response]:
    return lambda: web.Response(body=metrics.text(), headers={"Content-Type": _TEXT})


def health_answer(ages: Callable[[], Mapping[str, float]]) -> Callable[[], web.Response]:
    """200 while every watch is alive, else 503 naming those that are not."""

    def answer() -> web.Response:
        dead = {name: age for name, age in ages().items() if age > DEAD_WATCH_SECONDS}
        if not dead:
            return web.Response(text="ok\n")
        text = "".join(f"{name}: nothing heard for {age:.0f} s\n" for name, age in sorted(dead.items()))
        return web.Response(status=503, text=text)

    return answer
