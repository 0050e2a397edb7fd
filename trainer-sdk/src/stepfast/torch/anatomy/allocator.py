"""CUDA's caching allocator, simulated: what it reserves of the device for the allocations of a timeline. Pure.

After c10/cuda/CUDACachingAllocator.cpp, one stream, default settings: sizes are rounded to 512 bytes; up to 1 MiB comes
out of segments of 2 MiB; up to 10 MiB out of segments of 20 MiB; more gets a segment of its own, in multiples of 2 MiB.
The smallest free block that fits is taken, the rest of it split off where it is worth it, and neighbours that are free
are joined again. A segment goes back to the device only where the device would be full otherwise.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from stepfast.torch.anatomy.timeline import Timeline

_KIB = 1 << 10
_MIB = 1 << 20
_ROUND = 512
_SMALL = 1 * _MIB  # the largest allocation of the small pool
_SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_OWN_SEGMENT = 10 * _MIB  # allocations from here on get a segment of their own size
_ROUND_SEGMENT = 2 * _MIB


class OutOfMemory(Exception):
    """The device is full: `wanted_bytes` more do not fit beside what is reserved."""

    def __init__(self, wanted_bytes: int) -> None:
        super().__init__(f"{wanted_bytes} bytes do not fit")
        self.wanted_bytes = wanted_bytes


def rounded(size_bytes: int) -> int:
    """What an allocation takes of the allocator, in bytes."""
    return max(_ROUND, -(-size_bytes // _ROUND) * _ROUND)


@dataclass(slots=True, eq=False)
class _Piece:
    """A part of a segment: its neighbours are the parts beside it."""

    address: int
    size: int
    pool: _Pool
    is_free: bool = False
    before: _Piece | None = None
    behind: _Piece | None = None


class _Pool:
    """Free pieces, in the order in which the allocator looks at them: by size, then by address."""

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self._order: list[tuple[int, int]] = []
        self._pieces: dict[int, _Piece] = {}

    def add(self, piece: _Piece) -> None:
        piece.is_free = True
        insort(self._order, (piece.size, piece.address))
        self._pieces[piece.address] = piece

    def remove(self, piece: _Piece) -> None:
        piece.is_free = False
        del self._order[bisect_left(self._order, (piece.size, piece.address))]
        del self._pieces[piece.address]

    def smallest(self, size: int) -> _Piece | None:
        """The smallest piece of at least `size` bytes, the first of those that are as small."""
        at = bisect_left(self._order, (size, -1))
        return self._pieces[self._order[at][1]] if at < len(self._order) else None

    def whole_segments(self) -> list[_Piece]:
        return [piece for piece in self._pieces.values() if piece.before is None and piece.behind is None]


class CachingAllocator:
    """Its state. `limit_bytes` is what the device has for it (None: as much as is asked for)."""

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        self.reserved_bytes = 0
        self.allocated_bytes = 0  # rounded, as torch.cuda.memory_allocated counts
        self._limit_bytes = limit_bytes
        self._small, self._large = _Pool(is_small=True), _Pool(is_small=False)
        self._held: dict[int, _Piece] = {}
        self._next_address = 0

    def allocate(self, key: int, size_bytes: int) -> None:
        """Takes memory for the block `key`. Raises OutOfMemory; then nothing is taken."""
        if size_bytes == 0:
            return
        size = rounded(size_bytes)
        pool = self._small if size <= _SMALL else self._large
        piece = pool.smallest(size)
        if piece is None:
            piece = self._segment(size, pool)
        else:
            pool.remove(piece)
        rest = piece.size - size
        if rest >= _ROUND if pool.is_small else rest > _SMALL:
            self._split(piece, size)
        self._held[key] = piece
        self.allocated_bytes += piece.size

    def free(self, key: int) -> None:
        """Gives back what block `key` took."""
        piece = self._held.pop(key, None)
        if piece is None:
            return
        self.allocated_bytes -= piece.size
        pool, before, behind = piece.pool, piece.before, piece.behind
        if before is not None and before.is_free:
            pool.remove(before)
            piece = self._join(before, piece)
        if behind is not None and behind.is_free:
            pool.remove(behind)
            piece = self._join(piece, behind)
        pool.add(piece)

    def _segment(self, size: int, pool: _Pool) -> _Piece:
        if pool.is_small:
            wanted = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            wanted = _LARGE_SEGMENT
        else:
            wanted = -(-size // _ROUND_SEGMENT) * _ROUND_SEGMENT
        if self._limit_bytes is not None and self.reserved_bytes + wanted > self._limit_bytes:
            self._release_segments()
            if self.reserved_bytes + wanted > self._limit_bytes:
                raise OutOfMemory(wanted)
        self.reserved_bytes += wanted
        piece = _Piece(self._next_address, wanted, pool)
        self._next_address += wanted
        return piece

    def _release_segments(self) -> None:
        for pool in (self._small, self._large):
            for piece in pool.whole_segments():
                pool.remove(piece)
                self.reserved_bytes -= piece.size

    def _split(self, piece: _Piece, size: int) -> None:
        rest = _Piece(piece.address + size, piece.size - size, piece.pool, before=piece, behind=piece.behind)
        if rest.behind is not None:
            rest.behind.before = rest
        piece.size, piece.behind = size, rest
        piece.pool.add(rest)

    def _join(self, first: _Piece, second: _Piece) -> _Piece:
        first.size += second.size
        first.behind = second.behind
        if first.behind is not None:
            first.behind.before = first
        return first


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What the allocator held behind each change of a timeline, in bytes.

    `failed_at` is the index of the change that did not fit any more (None: all did); the lists end there.
    """

    allocated: Sequence[int]
    reserved: Sequence[int]
    failed_at: int | None

    @property
    def peak_reserved_bytes(self) -> int:
        return max(self.reserved, default=0)


def reserve(timeline: Timeline, *, limit_bytes: int | None = None) -> Reservation:
    """Runs a timeline's allocations through the allocator."""
    allocator = CachingAllocator(limit_bytes=limit_bytes)
    allocated: list[int] = []
    reserved: list[int] = []
    for index, change in enumerate(timeline.changes):
        if change.is_birth:
            try:
                allocator.allocate(change.block, timeline.blocks[change.block].size_bytes)
            except OutOfMemory:
                return Reservation(allocated=allocated, reserved=reserved, failed_at=index)
        else:
            allocator.free(change.block)
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)
    return Reservation(allocated=allocated, reserved=reserved, failed_at=None)
