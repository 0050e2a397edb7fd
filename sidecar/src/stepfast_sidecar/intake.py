"""One connection of the agent's socket: frames in, frames and descriptors out, and whose process is at the other end.

A peer that sends nonsense, or that never reads what it is sent, loses its connection with a reason; nobody else
notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from stepfast.messages import Message
from stepfast.protocol import REQUEST_LIMIT, Decoder, encode

_READ_BYTES = 64 * 1024
_OUTBOX_DESCRIPTORS = 64  # the agent has a limited number of them, for everybody
_OUTBOX_BYTES = 32 * 1024 * 1024  # a peer that is this far behind with reading is not going to


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The process at the other end, as the kernel knows it."""

    pid: int
    uid: int


class Peer:
    """A connected socket within an event loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._outbox: deque[tuple[bytes, int | None]] = deque()
        self._outbox_bytes = 0
        self._outbox_descriptors = 0
        self._writing = False
        self._closed = False

    def credentials(self) -> Credentials:
        raw = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", raw)
        return Credentials(pid=pid, uid=uid)

    async def messages(self) -> AsyncIterator[Message]:
        """What the peer sends, until it ends. Raises ProtocolError for what does not parse."""
        decoder = Decoder(REQUEST_LIMIT)
        while not self._closed:
            try:
                data = await self._loop.sock_recv(self._sock, _READ_BYTES)
            except OSError:
                return
            if not data:
                return
            for message in decoder.feed(data):
                yield message

    def send(self, message: Message, descriptor: int | None = None) -> None:
        """Queues a message; its descriptor is closed once sent. Never blocks."""
        if self._closed:
            if descriptor is not None:
                os.close(descriptor)
            return
        frame = encode(message)
        self._outbox.append((frame, descriptor))
        self._outbox_bytes += len(frame)
        self._outbox_descriptors += descriptor is not None
        if self._outbox_bytes > _OUTBOX_BYTES or self._outbox_descriptors > _OUTBOX_DESCRIPTORS:
            self.close()
        elif not self._writing:
            self._write()

    def _write(self) -> None:
        while self._outbox:
            frame, descriptor = self._outbox[0]
            try:
                if descriptor is None:
                    sent = self._sock.send(frame)
                else:
                    sent = socket.send_fds(self._sock, [frame], [descriptor])
            except BlockingIOError:
                break
            except OSError:
                self.close()
                return
            if descriptor is not None:
                os.close(descriptor)
                self._outbox_descriptors -= 1
            self._outbox_bytes -= sent
            if sent < len(frame):
                self._outbox[0] = (frame[sent:], None)
            else:
                self._outbox.popleft()
        if self._outbox and not self._writing:
            self._writing = True
            self._loop.add_writer(self._sock.fileno(), self._write)
        elif not self._outbox and self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock.fileno())

    def close(self) -> None:
        """Ends the connection; what was queued is lost. The reader, if one waits, ends too."""
        if self._closed:
            return
        self._closed = True
        if self._writing:
            self._loop.remove_writer(self._sock.fileno())
        for _, descriptor in self._outbox:
            if descriptor is not None:
                os.close(descriptor)
        self._outbox.clear()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def dispose(self) -> None:
        """Gives the descriptor back, once nobody reads any more."""
        self.close()
        self._sock.close()


def listen(path: str, *, mode: int = 0o600, building: str | None = None) -> socket.socket:
    """A listening socket at the path, in place of one that a dead agent left; by default for this user alone.

    It is made at `building` (beside the path, if not told), on the same file system, and moved: whoever sees it can
    connect to it, and what others put at the path meanwhile is replaced, not followed.
    """
    building = building or f"{path}.new"
    folders = [os.open(os.path.dirname(p) or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) for p in (building, path)]
    try:
        # Through the folder's descriptor: a unix address holds about a hundred characters, a path any number.
        address = f"/proc/self/fd/{folders[0]}/{os.path.basename(building)}"
        if os.path.lexists(address):
            os.unlink(address)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.bind(address)
            os.chmod(address, mode)
            sock.listen(512)
            sock.setblocking(False)
            os.rename(address, os.path.basename(path), dst_dir_fd=folders[1])
        except OSError:
            sock.close()
            raise
        return sock
    finally:
        for folder in folders:
            os.close(folder)
