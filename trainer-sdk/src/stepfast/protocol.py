"""How messages travel: frames, and what is in them. No sockets, no pickle.

A frame is a four-byte big-endian length and that many bytes of JSON, `{"type": <message>, …fields}`. Descriptors
travel beside the first byte of a frame (SCM_RIGHTS); the message says how many belong to it. What does not parse, is
over the limit or out of range raises ProtocolError, and whoever reads closes that connection and touches nothing else.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from math import isfinite
from typing import Any, get_args, get_origin, get_type_hints

from stepfast.errors import ProtocolError
from stepfast.messages import FROM_AGENT, FROM_LAUNCHER, FROM_RANK, FROM_SUPERVISOR, Message, check

REQUEST_LIMIT = 64 * 1024  # bytes of one frame to the agent
ANSWER_LIMIT = 16 * 1024 * 1024  # bytes of one frame from the agent


def encode(message: Message) -> bytes:
    """The message's frame."""
    document: dict[str, Any] = {"type": type(message).__name__}
    for field in fields(message):
        value = getattr(message, field.name)
        document[field.name] = dict(value) if isinstance(value, Mapping) else value
    body = json.dumps(document, separators=(",", ":")).encode()
    return len(body).to_bytes(4, "big") + body


class Codec:
    """What frames may hold: messages of these types, and no others."""

    def __init__(self, types: Iterable[type[Message]]) -> None:
        self._by_name: Mapping[str, type[Message]] = {cls.__name__: cls for cls in types}
        self._expected = {cls: _types_of(cls) for cls in self._by_name.values()}
        self._required = {
            cls: {field.name for field in fields(cls) if field.default is MISSING} for cls in self._by_name.values()
        }

    def decode(self, body: bytes) -> Message:
        """The message in a frame's body. Raises ProtocolError."""
        try:
            document = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a frame is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise ProtocolError("a frame is not a JSON object")
        cls = self._by_name.get(str(document.pop("type", None)))
        if cls is None:
            raise ProtocolError("a frame of an unknown type")
        expected = self._expected[cls]
        # What came to a message later has a default, and who was installed before it does not send it.
        if not self._required[cls] <= document.keys() <= expected.keys():
            raise ProtocolError(f"{cls.__name__} with the fields {sorted(document)[:20]}")
        values = {key: _read(f"{cls.__name__}.{key}", value, expected[key]) for key, value in document.items()}
        return cls(**values)


def decode(body: bytes) -> Message:
    """The message of SDK, launcher, supervisor or agent in a frame's body. Raises ProtocolError."""
    return _NODE.decode(body)


class Decoder:
    """Cuts a stream of bytes into messages. Holds at most one frame's bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Takes bytes in, yields the messages that are now whole. Raises ProtocolError."""
        self._buffer += data
        while len(self._buffer) >= 4:
            length = int.from_bytes(self._buffer[:4], "big")
            if length > self._limit:
                raise ProtocolError(f"a frame of {length} bytes is over the limit of {self._limit}")
            if len(self._buffer) < 4 + length:
                return
            body = bytes(self._buffer[4 : 4 + length])
            del self._buffer[: 4 + length]
            yield decode(body)


def _types_of(cls: type[Message]) -> Mapping[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


_NODE = Codec((*FROM_RANK, *FROM_LAUNCHER, *FROM_SUPERVISOR, *FROM_AGENT))


def _read(where: str, value: object, want: Any) -> Any:
    """The value, checked strictly against the field's type."""
    origin = get_origin(want)
    if origin is tuple:
        item = get_args(want)[0]
        check(isinstance(value, list), f"{where} is not a list")
        return tuple(_read(where, entry, item) for entry in value)  # type: ignore[attr-defined]  # a list by now
    if origin is types.UnionType:
        return None if value is None else _read(where, value, get_args(want)[0])
    if origin is not None:  # Mapping[str, float]
        check(isinstance(value, dict), f"{where} is not an object")
        return {key: _read(where, entry, float) for key, entry in value.items()}  # type: ignore[attr-defined]  # same
    if want is float:
        check(isinstance(value, int | float) and not isinstance(value, bool), f"{where} is {value!r:.80}")
        is_huge = isinstance(value, int) and abs(value) >= 2**1000
        number = float("inf") if is_huge else float(value)  # type: ignore[arg-type]  # a number
        check(isfinite(number) or where.endswith("metrics"), f"{where} is {number}")
        return number
    if want is int:
        check(type(value) is int and abs(value) < 2**63, f"{where} is {value!r:.80}")
        return value
    check(type(value) is want, f"{where} is {value!r:.80}")
    return value
