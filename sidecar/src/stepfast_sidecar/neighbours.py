"""Connections between agents: mutual TLS, the frames of `neighbourwire`, and the bytes of files. Blocking, for threads.

Owns the network's half of I10: whoever has no certificate of the agents' authority, with the agents' name in it, gets
no further than the handshake; nothing is read of what he sends, and he takes one of a limited number of places for a
few seconds at most.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stepfast.errors import AgentError, ProtocolError
from stepfast.messages import Message
from stepfast.protocol import encode
from stepfast_sidecar.gangs import Address
from stepfast_sidecar.neighbourwire import DIGEST_BYTES, FRAME_LIMIT, PIECE_BYTES, VERSION, Greeting, digest, pieces
from stepfast_sidecar.neighbourwire import decode as decode_frame

log = logging.getLogger(__name__)

AGENTS_NAME = "agents.stepfast.dev"  # in every agent's certificate, as a DNS name
_SILENCE_SECONDS = 10.0  # of a connection: a living agent says something each second
_HANDSHAKE_SECONDS = 5.0
_CONNECT_SECONDS = 2.0
_CONNECTIONS = 128  # that are served at once
_NICENESS = 10


class NeighbourLost(AgentError):
    """The other agent is not there, is none, or its connection ended."""


class PieceDamaged(NeighbourLost):
    """What came is not what was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Folder with `tls.crt`, `tls.key` and `ca.crt`: read anew for each connection, so that a renewed one counts."""

    folder: Path

    def server(self) -> ssl.SSLContext:
        """Raises NeighbourLost when the files are none."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client(self) -> ssl.SSLContext:
        """Raises NeighbourLost when the files are none."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self.folder / "tls.crt", self.folder / "tls.key")
            context.load_verify_locations(self.folder / "ca.crt")
        except (OSError, ssl.SSLError) as error:
            raise NeighbourLost(f"no certificate in {self.folder}: {error}") from error
        return context


def give_way() -> None:
    """This thread alone: training comes first."""
    with contextlib.suppress(OSError):  # a container may forbid it
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class Wire:
    """One connection after its handshake. For one thread, but for `close`. Raises NeighbourLost, ProtocolError."""

    def __init__(self, sock: ssl.SSLSocket, node: str) -> None:
        self._sock = sock
        self._buffer = memoryview(bytearray(PIECE_BYTES + DIGEST_BYTES))
        self.send(Greeting(version=VERSION, node=node))
        greeting = self.read()
        if not isinstance(greeting, Greeting):
            raise ProtocolError(f"{type(greeting).__name__} before a greeting")
        self.other = greeting.node

    def send(self, message: Message, attached: bytes = b"") -> None:
        """A frame, and what belongs to it."""
        self.send_bytes(encode(message) + attached)

    def send_bytes(self, data: bytes | memoryview) -> None:
        """As they are."""
        try:
            self._sock.sendall(data)
        except (OSError, ValueError) as error:  # ValueError: closed meanwhile
            raise NeighbourLost(str(error)) from error

    def read(self) -> Message:
        """The next frame."""
        head = self.read_bytes(4)
        length = int.from_bytes(head, "big")
        if length > FRAME_LIMIT:
            raise ProtocolError(f"a frame of {length} bytes is over the limit of {FRAME_LIMIT}")
        return decode_frame(bytes(self.read_bytes(length)))

    def read_bytes(self, size_bytes: int) -> memoryview:
        """So many; good until the next call."""
        view = self._buffer[:size_bytes]
        got = 0
        while got < size_bytes:
            try:
                count = self._sock.recv_into(view[got:])
            except (OSError, ValueError) as error:
                raise NeighbourLost(str(error)) from error
            if count == 0:
                raise NeighbourLost("the connection ended")
            got += count
        return view

    def send_file(self, descriptor: int, offset: int, size_bytes: int, pace: Callable[[int], None]) -> bool:
        """The pieces of a file, at the given pace; False when the file became shorter meanwhile.

        Then as many bytes went out nevertheless, and are of no use.
        """
        is_whole = True
        for begin, end in pieces(size_bytes):
            pace(end - begin)
            piece = os.pread(descriptor, end - begin, offset + begin)
            if len(piece) < end - begin:
                is_whole, piece = False, piece.ljust(end - begin, b"\0")
            self.send_bytes(piece)
            self.send_bytes(digest(piece))
        return is_whole

    def read_file(self, size_bytes: int, take: Callable[[int, memoryview], None]) -> None:
        """The pieces of a file; each is checked, then taken. Raises PieceDamaged, what `take` raises."""
        for begin, end in pieces(size_bytes):
            sealed = self.read_bytes(end - begin + DIGEST_BYTES)
            piece, seal = sealed[: end - begin], sealed[end - begin :]
            if digest(piece) != seal:
                raise PieceDamaged(f"bytes {begin} to {end} are not those that were sent")
            take(begin, piece)

    def close(self) -> None:
        """Whoever reads or writes meanwhile fails."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def connect(address: Address, credentials: Credentials, node: str) -> Wire:
    """To another agent, in the name of this node. Raises NeighbourLost, ProtocolError."""
    context = credentials.client()
    try:
        plain = socket.create_connection((address.host, address.port), timeout=_CONNECT_SECONDS)
    except OSError as error:
        raise NeighbourLost(f"{address}: {error}") from error
    try:
        plain.settimeout(_HANDSHAKE_SECONDS)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock = context.wrap_socket(plain, server_hostname=AGENTS_NAME)
        sock.settimeout(_SILENCE_SECONDS)
        return Wire(sock, node)
    except (OSError, NeighbourLost) as error:
        plain.close()
        raise NeighbourLost(f"{address} is no agent that this one trusts: {error}") from error


class Listener:
    """Accepts other agents; each is served in a thread of its own by `serve`, until that returns or raises."""

    def __init__(
        self, host: str, port: int, credentials: Credentials, node: str, serve: Callable[[Wire], None]
    ) -> None:
        """Raises AgentError when the port cannot be had."""
        self._credentials, self._node, self._serve = credentials, node, serve
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=64)
        except OSError as error:
            raise AgentError(f"mirrors cannot be taken at {host}, port {port}: {error}") from error
        self._thread = threading.Thread(target=self._accept, name="stepfast-neighbours", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The one that was asked for, or that was free."""
        port: int = self._socket.getsockname()[1]
        return port

    def close(self) -> None:
        """Ends every connection; returns when their threads have ended."""
        with self._lock:
            self._closed = True
            threads = list(self._open.values())
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._socket.close()
        for thread in (self._thread, *threads):
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError as error:
                if self._closed:
                    return
                log.error("an agent's connection was not accepted: %s", error)
                threading.Event().wait(0.1)  # out of descriptors: others may end meanwhile
                continue
            with self._lock:
                if self._closed or len(self._open) >= _CONNECTIONS:
                    sock.close()
                    continue
                thread = threading.Thread(target=self._meet, args=(sock,), name="stepfast-neighbour", daemon=True)
                self._open[sock] = thread
                thread.start()

    def _meet(self, plain: socket.socket) -> None:
        give_way()
        try:
            plain.settimeout(_HANDSHAKE_SECONDS)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._credentials.server().wrap_socket(plain, server_side=True, do_handshake_on_connect=False) as sock:
                self._open_as(plain, sock)
                sock.do_handshake()
                _check_name(sock)
                sock.settimeout(_SILENCE_SECONDS)
                self._serve(Wire(sock, self._node))
        except (NeighbourLost, ProtocolError, OSError) as error:
            if not self._closed:
                log.info("the connection of another agent, or of nobody, ended: %s", error)
        finally:
            plain.close()
            with self._lock:
                self._open = {s: t for s, t in self._open.items() if t is not threading.current_thread()}

    def _open_as(self, plain: socket.socket, sock: socket.socket) -> None:
        """The TLS socket has taken the plain one's descriptor over: it is the one to be closed."""
        with self._lock:
            self._open[sock] = self._open.pop(plain)
            if self._closed:
                raise NeighbourLost("the agent ends")


def _check_name(sock: ssl.SSLSocket) -> None:
    """The authority may have signed other things than agents. Raises NeighbourLost."""
    certificate = sock.getpeercert() or {}
    names = {str(entry[1]) for entry in certificate.get("subjectAltName", ()) if entry[0] == "DNS"}
    if AGENTS_NAME not in names:
        raise NeighbourLost(f"a certificate for {', '.join(sorted(names)) or 'nobody'}")
