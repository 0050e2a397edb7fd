"""The operator's two small HTTP servers: metrics, and the probes. Whoever reaches a port cannot exhaust it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from aiohttp import web

from stepfast_operator.metrics import Metrics

# Beyond the watches' own time-outs: such a watcher is dead, and a new process costs nothing.
DEAD_WATCH_SECONDS = 180.0
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_MOST_CONNECTIONS = 64  # of each server
_REQUEST_SECONDS = 10.0  # until a request is read and answered, however little of it comes at a time


@asynccontextmanager
async def serve(port: int | None, **answers: Callable[[], web.Response]) -> AsyncIterator[None]:
    """Answers GET /<name> on every address of the pod while the context lasts; nothing without a port."""
    if port is None:
        yield
        return

    async def handle(request: web.BaseRequest) -> web.Response:
        answer = answers.get(request.path.lstrip("/"))
        found = answer() if answer is not None else web.Response(status=404)
        found.force_close()
        return found

    runner = web.ServerRunner(_BoundedServer(handle, access_log=None))
    await runner.setup()
    try:
        await web.TCPSite(runner, port=port).start()
        yield
    finally:
        await runner.cleanup()


class _BoundedServer(web.Server):
    """One request on each connection, and a time for it. When there are too many connections the oldest is cut: a probe
    is answered in a moment, so those that take long are others'.
    """

    def __init__(self, handle: Callable[[web.BaseRequest], Awaitable[web.Response]], *, access_log: None) -> None:
        super().__init__(handle, access_log=access_log)
        self._ends: dict[web.RequestHandler, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}  # the oldest first

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        ending = asyncio.get_running_loop().call_later(_REQUEST_SECONDS, transport.abort)
        self._ends[handler] = transport, ending
        if len(self._ends) > _MOST_CONNECTIONS:
            self._forget(next(iter(self._ends))).abort()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        if handler in self._ends:
            self._forget(handler)

    def _forget(self, handler: web.RequestHandler) -> asyncio.Transport:
        transport, ending = self._ends.pop(handler)
        ending.cancel()
        return transport


def metrics_answer(metrics: Metrics) -> Callable[[], web.Response]:
    return lambda: web.Response(body=metrics.text(), headers={"Content-Type": _TEXT})


def health_answer(ages: Callable[[], Mapping[str, float]], owed: Callable[[], float]) -> Callable[[], web.Response]:
    """200 while every watch is alive, else 503 naming those that are not. `ages`: the seconds since each of our own has
    heard of the API server; `owed`: for which that of TrainingJobs owes something. Where all are silent it is the API
    server that is away, which no new process brings back.
    """

    def answer() -> web.Response:
        silent = ages()
        away = min(silent.values())
        dead = {
            name: age for name, age in {**silent, "trainingjobs": owed()}.items() if age - away > DEAD_WATCH_SECONDS
        }
        return _probed("".join(f"{name}: nothing heard for {age:.0f} s\n" for name, age in sorted(dead.items())))

    return answer


def ready_answer(has_begun: Callable[[], bool]) -> Callable[[], web.Response]:
    """200 once TrainingJobs are heard of, else 503."""
    return lambda: _probed("" if has_begun() else "no TrainingJob is seen yet\n")


def _probed(trouble: str) -> web.Response:
    return web.Response(status=503, text=trouble) if trouble else web.Response(text="ok\n")
