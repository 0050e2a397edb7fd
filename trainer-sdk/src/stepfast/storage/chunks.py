"""Which chunks of an upload were put. Knows no storage; may be called from several threads."""

from __future__ import annotations

import threading


class ChunkLedger:
    """The chunks of one object: all of `chunk_bytes`, the last one what is left.

    A chunk that does not fit, or one that is missing at the end, is the caller's mistake: ValueError, before
    a file with a hole becomes visible.
    """

    def __init__(self, size_bytes: int, chunk_bytes: int) -> None:
        if size_bytes < 0:
            raise ValueError(f"an object cannot have {size_bytes} bytes")
        self.size_bytes = size_bytes
        self.chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._put: set[int] = set()

    def check(self, offset: int, length: int) -> None:
        """Refuses a chunk that is none of this object's."""
        expected = min(self.chunk_bytes, self.size_bytes - offset)
        if offset < 0 or offset % self.chunk_bytes or expected <= 0 or length != expected:
            raise ValueError(
                f"{length} bytes at {offset} are no chunk of {self.size_bytes} bytes by {self.chunk_bytes}"
            )

    def mark(self, offset: int) -> None:
        """The chunk has arrived."""
        with self._lock:
            self._put.add(offset)

    def offsets(self) -> range:
        """The offsets of all chunks, in order."""
        return range(0, self.size_bytes, self.chunk_bytes)

    def check_complete(self) -> None:
        """Refuses to finish an object that is not whole."""
        with self._lock:
            missing = [offset for offset in self.offsets() if offset not in self._put]
        if missing:
            raise ValueError(f"{len(missing)} chunks were never put, the first at {missing[0]}")
