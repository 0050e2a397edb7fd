"""One rank's file, every byte checked on its way to whoever asked for it (I5).

What is handed out is checked where it was delivered, block by block while it is still in the processor's cache: a slot
may be used again, and a disk may fail, between a check and a copy.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, wait
from operator import itemgetter
from typing import NamedTuple

from stepfast.checksum import Checksum, new_checksum
from stepfast.errors import CheckpointError, StorageError
from stepfast.layout import FileEntry
from stepfast.step import Tier
from stepfast.storage.localfile import read_at
from stepfast.tensorfile import Header, HeaderInvalid, header_bytes, parse_header
from stepfast.torch.rereading import unreadable
from stepfast.torch.sources import Found

_BLOCK_BYTES = 1 << 20  # read, then checked: small enough to stay in the cache, large enough for two calls not to count
_DIRECT_BYTES = 1 << 16  # from this size on bytes are read straight to their place, below it with their neighbours
_scratch = threading.local()
_begin_of, _end_of = itemgetter(0), itemgetter(1)  # of an Extent
_copy = ctypes.PyDLL(None).memmove  # keeps the GIL: to take it again takes longer than to copy a small tensor
_copy.argtypes, _copy.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None


class FileMismatch(CheckpointError):
    """Bytes are not those that were saved."""


class Extent(NamedTuple):  # one a tensor: a dataclass is made ten times as slowly
    """The file's bytes `[begin, end)`, and the address where they are to go, in memory that the caller keeps."""

    begin: int
    end: int
    address: int


class VerifiedFile:
    """The file of one rank. Its header is read and checked when it is opened.

    Whatever reads raises FileMismatch, and StorageError (Unreadable where another try may work) when the system cannot
    read it; what the memory tier cannot read is a mismatch.
    """

    def __init__(self, found: Found, entry: FileEntry) -> None:
        self.tier = found.tier
        self._entry, self._offset = entry, found.offset
        self._file = open(found.descriptor, "rb", buffering=0)  # noqa: SIM115  # closed with this object
        try:
            if found.size_bytes != entry.size_bytes:
                raise FileMismatch(f"{found.size_bytes} bytes instead of {entry.size_bytes}")
            # Its length is learnt unchecked, and checked with the rest of it.
            first = bytearray(min(8, entry.size_bytes))
            self._fill(0, memoryview(first))
            self.header: Header = parse_header(self._head(header_bytes(bytes(first))))
        except HeaderInvalid as error:
            self._file.close()
            raise FileMismatch(str(error)) from error
        except (FileMismatch, StorageError):
            self._file.close()
            raise

    def check(self, ranges: Iterable[tuple[int, int]], threads: Executor | None = None) -> None:
        """Reads every chunk that one of the ranges `[begin, end)` touches. Raises FileMismatch, StorageError."""
        size = self._entry.chunk_bytes
        chunks = {index for begin, end in ranges if begin < end for index in range(begin // size, -(-end // size))}
        _for_each(lambda index: self._pass_chunk(index, ()), sorted(chunks), threads)

    def read(self, extents: Sequence[Extent], threads: Executor | None = None) -> None:
        """Fills every extent's target. Raises FileMismatch, StorageError; targets may hold anything then."""
        by_chunk: dict[int, list[Extent]] = {}
        size = self._entry.chunk_bytes
        for extent in sorted(extents, key=_begin_of):
            first, last = extent.begin // size, (extent.end - 1) // size
            if first == last:
                by_chunk.setdefault(first, []).append(extent)
                continue
            for index in range(first, last + 1):
                by_chunk.setdefault(index, []).append(_clipped(extent, index * size, (index + 1) * size))
        _for_each(lambda index: self._pass_chunk(index, by_chunk[index]), list(by_chunk), threads)

    def close(self) -> None:
        """Lets the file go."""
        self._file.close()

    def _head(self, end: int) -> bytes:
        size = max(0, min(end, self._entry.size_bytes))
        memory = (ctypes.c_char * size)()
        if size:
            self.read([Extent(0, size, ctypes.addressof(memory))])
        return memory.raw

    def _pass_chunk(self, index: int, extents: Sequence[Extent]) -> None:
        """Reads one whole chunk, delivering what is wanted of it, and compares its checksum."""
        begin = index * self._entry.chunk_bytes
        end = min(begin + self._entry.chunk_bytes, self._entry.size_bytes)
        if begin >= end or (extents and extents[-1].end > end):
            raise FileMismatch(f"it ends before byte {extents[-1].end if extents else begin + 1}")
        hasher = new_checksum()
        small = [extent for extent in extents if extent.end - extent.begin < _DIRECT_BYTES]
        reached = begin
        for extent in extents:
            if extent.end - extent.begin >= _DIRECT_BYTES:
                self._pass_between(reached, extent.begin, small, hasher)
                target = _memory(extent.address, extent.end - extent.begin)
                for offset in range(0, len(target), _BLOCK_BYTES):
                    block = target[offset : offset + _BLOCK_BYTES]
                    self._fill(extent.begin + offset, block)
                    hasher.update(block)
                reached = extent.end
        self._pass_between(reached, end, small, hasher)
        if hasher.hexdigest() != self._entry.checksums[index]:
            raise FileMismatch(f"bytes {begin} to {end} are not those that were saved")

    def _pass_between(self, begin: int, end: int, small: Sequence[Extent], hasher: Checksum) -> None:
        """Reads `[begin, end)` through a buffer, and delivers the small extents that lie there."""
        buffer, source = _buffer()
        for first in range(begin, end, _BLOCK_BYTES):
            block = buffer[: min(_BLOCK_BYTES, end - first)]
            last = first + len(block)
            self._fill(first, block)
            hasher.update(block)
            reaching = bisect_right(small, first, key=_end_of), bisect_left(small, last, key=_begin_of)
            for extent in small[slice(*reaching)]:
                low, high = max(extent.begin, first), min(extent.end, last)
                _copy(extent.address + low - extent.begin, source + low - first, high - low)

    def _fill(self, begin: int, block: memoryview) -> None:
        try:
            got = read_at(self._file.fileno(), self._offset + begin, block)
        except OSError as error:
            doing = f"read bytes {begin} to {begin + len(block)} of {self._entry.path}"
            if self.tier is Tier.MEMORY:
                raise FileMismatch(f"{doing}: {error.strerror}") from error
            raise unreadable(error, doing) from error
        if got < len(block):
            raise FileMismatch("cut short")


def _clipped(extent: Extent, low: int, high: int) -> Extent:
    """What of the extent lies within `[low, high)`."""
    first, last = max(extent.begin, low), min(extent.end, high)
    return Extent(first, last, extent.address + first - extent.begin)


def _memory(address: int, size_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


def _buffer() -> tuple[memoryview, int]:
    """This thread's own, and its address."""
    buffer = getattr(_scratch, "buffer", None)
    if buffer is None:
        buffer = _scratch.buffer = (ctypes.c_char * _BLOCK_BYTES)()
    return memoryview(buffer).cast("B"), ctypes.addressof(buffer)


def _for_each(work: Callable[[int], None], items: Sequence[int], threads: Executor | None) -> None:
    if threads is None or len(items) < 2:
        for item in items:
            work(item)
        return
    jobs = [threads.submit(work, item) for item in items]
    try:
        for job in jobs:
            job.result()
    finally:
        for job in jobs:
            job.cancel()
        wait(jobs)  # after a failure the same targets are filled from elsewhere: nobody else may write to them then
