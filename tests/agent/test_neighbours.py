"""What travels between two agents, over a pair of sockets: whole, or refused."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepfast.errors import ProtocolError
from stepfast.protocol import encode
from stepfast_sidecar.neighbours import NeighbourLost, PieceDamaged, Wire
from stepfast_sidecar.neighbourwire import PIECE_BYTES, VERSION, Alive, Greeting

SIZE = 2 * PIECE_BYTES + 12345


class Tampered:
    """A socket whose one byte arrives otherwise than it was sent."""

    def __init__(self, sock: socket.socket, at: int) -> None:
        self._sock, self._left = sock, at

    def recv_into(self, view: memoryview) -> int:
        count = self._sock.recv_into(view)
        if 0 <= self._left < count:
            view[self._left] ^= 1
        self._left -= count
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    first, second = socket.socketpair()
    for sock in (first, second):
        sock.settimeout(30)
    yield first, second
    first.close()
    second.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tuple[int, bytes]]:
    content = os.urandom(SIZE)
    (tmp_path / "slot").write_bytes(content)
    descriptor = os.open(tmp_path / "slot", os.O_RDWR)
    yield descriptor, content
    os.close(descriptor)


def carry(pair: tuple[Any, Any], send: Callable[[Wire], object], receive: Callable[[Wire], object]) -> object:
    """Both ends at once; what sending returned. Raises what receiving does."""
    result: list[object] = []

    def run() -> None:
        result.append(send(Wire(pair[0], "node-a")))

    sending = threading.Thread(target=run)
    sending.start()
    try:
        receive(Wire(pair[1], "node-b"))
    finally:
        pair[1].close()
        sending.join()
    return result[0]


def quietly(send: Callable[[Wire], object]) -> Callable[[Wire], object]:
    """The other end may be gone before all is sent."""

    def run(wire: Wire) -> object:
        try:
            return send(wire)
        except NeighbourLost:
            return None

    return run


def test_file_arrives_as_it_was_sent(pair: tuple[Any, Any], file: tuple[int, bytes]) -> None:
    got, paced = bytearray(SIZE), []

    def take(begin: int, piece: memoryview) -> None:
        got[begin : begin + len(piece)] = piece

    is_whole = carry(
        pair,
        lambda wire: wire.send_file(file[0], 0, SIZE, paced.append),
        lambda wire: wire.read_file(SIZE, take),
    )
    assert is_whole
    assert got == file[1]
    assert sum(paced) == SIZE, "every byte was paid for"


@pytest.mark.parametrize("at", [0, PIECE_BYTES - 1, PIECE_BYTES, SIZE // 2], ids=["first", "last", "checksum", "later"])
def test_byte_that_changes_on_the_way_is_noticed(pair: tuple[Any, Any], file: tuple[int, bytes], at: int) -> None:
    greeting = len(encode(Greeting(version=VERSION, node="node-a")))
    taken: list[int] = []

    def receive(wire: Wire) -> None:
        wire.read_file(SIZE, lambda begin, _: taken.append(begin))

    with pytest.raises(PieceDamaged, match="are not those that were sent"):
        carry(
            (pair[0], Tampered(pair[1], greeting + at)),
            quietly(lambda wire: wire.send_file(file[0], 0, SIZE, lambda _: None)),
            receive,
        )
    assert PIECE_BYTES * (at // (PIECE_BYTES + 16)) not in taken, "what is damaged is not taken"


def test_file_that_becomes_shorter_while_it_is_sent_is_no_whole_one(
    pair: tuple[Any, Any], file: tuple[int, bytes]
) -> None:
    def send(wire: Wire) -> bool:
        os.ftruncate(file[0], PIECE_BYTES + 1)  # its rank may do that at any moment
        return wire.send_file(file[0], 0, SIZE, lambda _: None)

    assert carry(pair, send, lambda wire: wire.read_file(SIZE, lambda *_: None)) is False


def test_connection_that_ends_in_the_middle_is_lost(pair: tuple[Any, Any]) -> None:
    def send(wire: Wire) -> None:
        wire.send_bytes(b"x" * 100)
        wire.close()

    with pytest.raises(NeighbourLost, match="ended"):
        carry(pair, send, lambda wire: wire.read_file(SIZE, lambda *_: None))


def test_frame_that_is_too_large_is_refused(pair: tuple[Any, Any]) -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        carry(pair, lambda wire: wire.send_bytes(b"\xff\xff\xff\xff"), lambda wire: wire.read())


def test_whoever_does_not_greet_is_refused(pair: tuple[Any, Any]) -> None:
    pair[0].sendall(encode(Alive()))
    with pytest.raises(ProtocolError, match="before a greeting"):
        Wire(pair[1], "node-b")
