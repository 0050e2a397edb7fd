"""The checksum of stored bytes: xxh3-128, at memory speed, without the GIL."""

from __future__ import annotations

from typing import Protocol

import xxhash


class Checksum(Protocol):
    """One that is still being taken."""

    def update(self, data: memoryview | bytes) -> None: ...
    def hexdigest(self) -> str: ...


def checksum(data: memoryview | bytes) -> str:
    """xxh3-128 of the bytes, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def new_checksum() -> Checksum:
    """The same, taken piece by piece."""
    hasher: Checksum = xxhash.xxh3_128()
    return hasher
