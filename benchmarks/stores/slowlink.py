"""A TCP proxy on loopback that is as slow as it is told, for as much of the traffic as it is told. Knows no protocol
but the first line of a connection, by which it tells whose it is.

Bytes go from socket to socket through a pipe in the kernel: the proxy takes next to no processor time of its own.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PIECE_BYTES = 64 * 1024  # what a pipe holds
_BURST_SECONDS = 0.05
_FIRST_LINE_BYTES = 4096


class SlowLink:
    """In front of one server. `bytes_per_second`: what all connections together may send to it; None: anything."""

    def __init__(self, port: int, *, bytes_per_second: float | None = None) -> None:
        self._server_port = port
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_time = 0.0  # when what was sent so far has gone through at the rate
        self._held = ""
        self._released = threading.Event()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="slow-link", daemon=True).start()

    def hold(self, text: str) -> None:
        """From here on connections whose first line holds the text are taken and never answered; those that are open
        already, of whomever, are cut."""
        self._released.clear()
        self._held = text
        self._cut()

    def release(self) -> None:
        """Everybody is served again; connections that were held are cut, as by a service that starts again."""
        self._held = ""
        self._released.set()

    def close(self) -> None:
        """Ends all connections."""
        self._released.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._cut()

    def _cut(self) -> None:
        with self._lock:
            opened = list(self._open)
        for each in opened:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), name="slow-link", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, self._known(client), suppress(OSError):
            first = client.recv(_FIRST_LINE_BYTES, socket.MSG_PEEK).split(b"\r\n")[0].decode(errors="replace")
            if self._held and self._held in first:
                self._released.wait()
                return
            with socket.create_connection(("127.0.0.1", self._server_port)) as server, self._known(server):
                back = threading.Thread(target=self._pass, args=(server, client, None), name="slow-link", daemon=True)
                back.start()
                self._pass(client, server, self._rate)
                back.join()

    @contextmanager
    def _known(self, opened: socket.socket) -> Iterator[None]:
        with self._lock:
            self._open.add(opened)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(opened)

    def _pass(self, source: socket.socket, target: socket.socket, rate: float | None) -> None:
        outlet, inlet = os.pipe()
        try:
            while count := os.splice(source.fileno(), inlet, _PIECE_BYTES):
                if rate is not None:
                    self._wait_turn(count / rate)
                while count:
                    count -= os.splice(outlet, target.fileno(), count)
        except OSError:
            pass  # the one or the other has gone
        finally:
            os.close(outlet)
            os.close(inlet)
            for each in (source, target):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _wait_turn(self, seconds: float) -> None:
        with self._lock:
            now = time.monotonic()
            self._free_time = max(self._free_time, now - _BURST_SECONDS) + seconds
            pause = self._free_time - now
        if pause > 0:
            time.sleep(pause)


@contextmanager
def slow_link(port: int, *, bytes_per_second: float | None = None) -> Iterator[SlowLink]:
    """A link that is closed at the end."""
    link = SlowLink(port, bytes_per_second=bytes_per_second)
    try:
        yield link
    finally:
        link.close()
