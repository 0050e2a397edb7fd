"""Whether the agent lives and is ready, and the port that says so: /healthz, /readyz, /metrics."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from stepfast_sidecar.httpserver import BoundedServer

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_BEAT_SECONDS = 1.0
_SILENCE_SECONDS = 30.0  # an event loop that stands still for so long serves nobody


class Health:
    """What the agent still waits for before it is ready, and when its event loop last turned. Read by any thread."""

    def __init__(self, waits_for: Iterable[str] = ()) -> None:
        self._waits_for = set(waits_for)
        self._beat_time = time.monotonic()

    def done(self, what: str) -> None:
        """One thing less to wait for."""
        self._waits_for = self._waits_for - {what}

    def wait_for(self, what: str) -> None:
        """Not ready (any more) before that is done."""
        self._waits_for = self._waits_for | {what}

    def ready(self) -> tuple[bool, str]:
        """And what is said about it."""
        waits = sorted(self._waits_for)
        return not waits, f"waits for: {', '.join(waits)}\n" if waits else "ok\n"

    def alive(self) -> tuple[bool, str]:
        """And what is said about it."""
        silence = time.monotonic() - self._beat_time
        return silence < _SILENCE_SECONDS, f"the event loop turned {silence:.1f} s ago\n"

    async def beat(self) -> None:
        """For ever."""
        while True:
            self._beat_time = time.monotonic()
            await asyncio.sleep(_BEAT_SECONDS)


def serve_http(address: str, port: int, registry: CollectorRegistry, health: Health) -> Callable[[], None]:
    """Serves in a thread; returns what ends that. Raises OSError."""
    family = socket.AF_INET6 if _is_ipv6(address) else socket.AF_INET
    server: BoundedServer = make_server(
        address, port, _application(registry, health),
        server_class=type("_Server", (BoundedServer,), {"address_family": family}), handler_class=_Handler,
    )  # fmt: skip
    thread = threading.Thread(target=server.serve_forever, name="stepfast-http", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


def _application(registry: CollectorRegistry, health: Health) -> WSGIApplication:
    metrics = make_wsgi_app(registry)
    probes = {"/healthz": health.alive, "/readyz": health.ready}

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            found: Iterable[bytes] = metrics(environ, start_response)
            return found
        if path not in probes:
            start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
            return [b"/healthz, /readyz and /metrics are here\n"]
        is_well, text = probes[path]()
        status = "200 OK" if is_well else "503 Service Unavailable"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [text.encode()]

    return answer


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Probes come every few seconds."""


def _is_ipv6(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).version == 6
    except ValueError:
        return False
