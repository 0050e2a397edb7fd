"""Azure's instance metadata service, as far as a machine's name and its scheduled events go.

Answers as the real one does: to requests with the header `Metadata: true` alone, with RFC 1123 times, and each machine
with its own name.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


class MetadataService:
    """One service for all machines that can reach it. `name_of` tells a machine's name by the address that asks."""

    def __init__(
        self, *, address: str = "127.0.0.1", port: int = 0, name_of: Callable[[str], str] = lambda _: "machine-1"
    ) -> None:
        self.name_of = name_of
        self.asked = 0  # how often about events
        self.is_failing = False
        self._events: list[dict[str, Any]] = []
        self._numbers = itertools.count(1)
        self._incarnation = 0
        self._server = ThreadingHTTPServer((address, port), _handler_of(self))
        self._server.daemon_threads = True
        self.url = f"http://{address}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="metadata service", daemon=True).start()

    def announce(self, kind: str, *machines: str, seconds: float = 30.0) -> str:
        """An event that begins in so many seconds; its name."""
        event = f"event-{next(self._numbers)}"
        self._change([*self._events, {
            "EventId": event, "EventType": kind, "ResourceType": "VirtualMachine", "Resources": list(machines),
            "EventStatus": "Scheduled", "NotBefore": formatdate(time.time() + seconds, usegmt=True),
            "Description": "", "EventSource": "Platform", "DurationInSeconds": -1,
        }])  # fmt: skip
        return event

    def begin(self, event: str) -> None:
        """It has started."""
        self._change([
            {**one, "EventStatus": "Started", "NotBefore": ""} if one["EventId"] == event else one
            for one in self._events
        ])  # fmt: skip

    def withdraw(self, event: str) -> None:
        """It is over, or will not come."""
        self._change([one for one in self._events if one["EventId"] != event])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _change(self, events: list[dict[str, Any]]) -> None:
        self._incarnation += 1
        self._events = events

    def document(self) -> dict[str, Any]:
        self.asked += 1
        return {"DocumentIncarnation": self._incarnation, "Events": self._events}


def _handler_of(service: MetadataService) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            if service.is_failing:
                self._answer(500, b"")
            elif self.headers.get("Metadata") != "true" or "api-version" not in parse_qs(asked.query):
                self._answer(400, b'{"error": "Bad request"}')
            elif asked.path == "/metadata/instance/compute/name":
                self._answer(200, service.name_of(self.client_address[0]).encode())
            elif asked.path == "/metadata/scheduledevents":
                self._answer(200, json.dumps(service.document()).encode())
            else:
                self._answer(404, b"")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: a request a second and machine."""

    return Handler
