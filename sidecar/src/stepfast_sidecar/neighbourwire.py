"""What two nodes' agents say to each other, and how the bytes of a file travel between them. No sockets.

Frames are those of `stepfast.protocol`. Both say Greeting first; after that whoever opened the connection speaks, one
thing at a time, and is answered:

    Offer, a control page      Refused, or Accepted; then pieces and Sent; then Refused or Accepted again
    Ask                        Absent, or Found, then pieces and Sent
    Alive                      Alive

A piece is up to PIECE_BYTES of the file, all but the last of the same size, each followed by its checksum (I5). What
does not parse or is out of range raises ProtocolError, and whoever reads closes the connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from stepfast.checksum import checksum
from stepfast.errors import ProtocolError, SpecError
from stepfast.layout import parse_data_path
from stepfast.messages import MAX_SAVE_BYTES, Message, check
from stepfast.protocol import Codec
from stepfast.ranks import EVERY_RANK, RankSet
from stepfast.step import MAX_WORLD_SIZE, JobKey, is_run

VERSION = 1
FRAME_LIMIT = 64 * 1024  # bytes
PIECE_BYTES = 1 << 20
DIGEST_BYTES = 16
MAX_RANKS_TEXT = 128  # characters: a part of a folder's name
_MAX_NAME = 253


class Refusal(StrEnum):
    """Why an offer is not taken. HELD: it is there already. UNKNOWN: the gang is not, yet. FULL: there is no room.
    DAMAGED: what came is not what was offered.
    """

    HELD = "Held"
    UNKNOWN = "Unknown"
    FULL = "Full"
    DAMAGED = "Damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting(Message):
    """Who speaks: the agent of that node of the cluster."""

    version: int
    node: str

    def __post_init__(self) -> None:
        check(self.version == VERSION, f"version {self.version}: the agents speak different versions")
        check(0 < len(self.node) <= _MAX_NAME, "node")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(Message):
    """A file of a step that is whole on the offering node; the slot's control page follows, which says which.

    `node`: that node's index in the gang; `ranks`: which of the gang's it has; `sharers`: those that have files in the
    step, EVERY_RANK or a RankSet.
    """

    job: str
    run: str
    node: int
    ranks: str
    sharers: str

    def __post_init__(self) -> None:
        _check_job(self.job)
        check(is_run(self.run), f"run {self.run!r}")
        check(0 <= self.node < MAX_WORLD_SIZE, f"node {self.node}")
        check(len(self.ranks) <= MAX_RANKS_TEXT, "ranks")
        _check_ranks("ranks", self.ranks)
        if self.sharers != EVERY_RANK:
            _check_ranks("sharers", self.sharers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted(Message):
    """Send it; or, after Sent: it is held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Message):
    """It is not taken. `refusal` is a Refusal."""

    refusal: str
    reason: str

    def __post_init__(self) -> None:
        check(self.refusal in set(Refusal), f"refusal {self.refusal!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent(Message):
    """All pieces are out. `is_whole`: they are of one save; the slot may have been used again meanwhile."""

    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask(Message):
    """A rank's file of the job's folder, if it is held in memory."""

    job: str
    path: str

    def __post_init__(self) -> None:
        _check_job(self.job)
        check(parse_data_path(self.path) is not None, f"path {self.path!r:.200}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(Message):
    """It is held; its pieces follow."""

    size_bytes: int

    def __post_init__(self) -> None:
        check(0 < self.size_bytes <= MAX_SAVE_BYTES, f"size_bytes {self.size_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent(Message):
    """It is not held here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive(Message):
    """Nothing else is to be said, and the agent lives."""


_CODEC = Codec((Greeting, Offer, Accepted, Refused, Sent, Ask, Found, Absent, Alive))


def decode(body: bytes) -> Message:
    """The message in a frame's body. Raises ProtocolError."""
    return _CODEC.decode(body)


def pieces(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Where each piece of a file of that size begins and ends."""
    for begin in range(0, size_bytes, PIECE_BYTES):
        yield begin, min(begin + PIECE_BYTES, size_bytes)


def digest(piece: memoryview | bytes) -> bytes:
    """What follows a piece."""
    return bytes.fromhex(checksum(piece))


def _check_ranks(what: str, text: str) -> None:
    try:
        RankSet.parse(text, MAX_WORLD_SIZE)
    except ValueError as error:
        raise ProtocolError(f"out of range: {what}: {error}") from error


def _check_job(job: str) -> None:
    try:
        JobKey.parse(job)
    except SpecError as error:
        raise ProtocolError(str(error)) from error
