"""The checksum of stored bytes: xxh3-128, at memory speed, without the GIL."""

from __future__ import annotations

import xxhash


def checksum(data: memoryview | bytes) -> str:
    """xxh3-128 of the bytes, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)
