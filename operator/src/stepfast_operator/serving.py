"""The operator's two small HTTP servers: metrics, and the probes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from aiohttp import web

from stepfast_operator.metrics import Metrics

# Beyond the watches' own time-outs: such a watcher is dead, and a new process costs nothing.
DEAD_WATCH_SECONDS = 180.0
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


@asynccontextmanager
async def serve(port: int | None, **answers: Callable[[], web.Response]) -> AsyncIterator[None]:
    """Answers GET /<name> on every address of the pod while the context lasts; nothing without a port."""
    if port is None:
        yield
        return

    async def handle(request: web.Request) -> web.Response:
        return answers[request.path.lstrip("/")]()

    application = web.Application()
    for name in answers:
        application.router.add_get(f"/{name}", handle)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, port=port).start()
        yield
    finally:
        await runner.cleanup()


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
