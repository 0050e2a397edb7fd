"""A small HTTP server that whoever reaches its port cannot exhaust: few connections, each for a short time (I10)."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIServer

log = logging.getLogger(__name__)

_MOST_CONNECTIONS = 64  # each has a thread
_REQUEST_SECONDS = 10.0  # until a request is read and answered, however little of it comes at a time
_ENDING_SECONDS = 1.0  # a thread whose connection was cut ends within milliseconds


class BoundedServer(ThreadingMixIn, WSGIServer):
    """Has a thread for each connection, and one request on each.

    When there are too many the oldest is cut: a probe is answered in a moment, so those that take long are others'.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._places = threading.Semaphore(_MOST_CONNECTIONS)
        self._lock = threading.Lock()
        self._deadlines: dict[socket.socket, float] = {}  # monotonic; the oldest connection first

    def process_request(self, request: Any, client_address: Any) -> None:
        """Of a new connection, in the thread that accepts them."""
        if not self._places.acquire(blocking=False):
            self._cut_oldest()
            if not self._places.acquire(timeout=_ENDING_SECONDS):
                self.shutdown_request(request)
                return
        with self._lock:
            self._deadlines[request] = time.monotonic() + _REQUEST_SECONDS
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system has no thread left
            self._ended(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """All of a connection, in its own thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ended(request)

    def service_actions(self) -> None:
        """Twice a second, and after each new connection."""
        now = time.monotonic()
        with self._lock:
            late = [request for request, deadline in self._deadlines.items() if deadline <= now]
            for request in late:
                del self._deadlines[request]
        for request in late:
            _cut(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away, or are cut off, are no news."""
        if not isinstance(sys.exception(), OSError):
            log.exception("a request of %s failed", client_address)

    def _cut_oldest(self) -> None:
        with self._lock:
            oldest = next(iter(self._deadlines), None)
            if oldest is not None:
                del self._deadlines[oldest]
        if oldest is not None:
            _cut(oldest)

    def _ended(self, request: socket.socket) -> None:
        with self._lock:
            self._deadlines.pop(request, None)
        self._places.release()


def _cut(request: socket.socket) -> None:
    """Ends the connection; whoever reads from it or writes to it in another thread goes on at once."""
    with contextlib.suppress(OSError):  # it has ended meanwhile
        request.shutdown(socket.SHUT_RDWR)
