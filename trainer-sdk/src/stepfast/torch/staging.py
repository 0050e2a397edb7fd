"""From tensors to a slot: one pass of memory copies into views that were made once.

A slot's file is mapped when it is first seen, ahead of its use where possible, and its pages are entered into this
process's page table in the background; after that nothing in a save grows with the number of tensors but the copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from stepfast.slot import CONTROL_BYTES, SlotRecord, rank_record
from stepfast.tensorfile import CACHE_LINE
from stepfast.torch.devicecopy import DeviceCopy, Pending
from stepfast.torch.dtypes import flat_bytes
from stepfast.torch.plan import Layout, SavePlan

_MADV_POPULATE_WRITE = 23
_POPULATE_BYTES = 8 << 20
_is_on_host = attrgetter("is_cpu")
# What torch.cat takes: not the dtypes below two bytes that it has no kernels for.
_JOINED = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32})
_CUT_BYTES = 1 << 18  # from this size on a tensor that begins within a cache line is copied in two pieces
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Small tensors that lie one behind the other, rows of one shape: one call copies them all, where each alone would
    cost as much as its bytes.
    """

    members: Sequence[int]
    target: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Views:
    """Where a layout's tensors go. `cuts`: of those that begin within a cache line, what lies before its end, and the
    rest, both flat. Stores that straddle two lines make a copy 1.5 times as long; loads that do cost nothing.
    """

    layout: Layout | None  # that they were made for; None: there are none yet
    whole: Sequence[torch.Tensor]
    cuts: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    runs: Sequence[_Run]
    singles: Sequence[int]  # those that are in no run

    def copy(self, sources: Sequence[torch.Tensor]) -> None:
        """Copies every source to its place."""
        if torch.accelerator.is_available() and not all(map(_is_on_host, sources)):
            copy_all(list(self.whole), sources)
            return
        with torch.no_grad():
            for run in self.runs:
                torch.cat(list(map(sources.__getitem__, run.members)), out=run.target)
        self._copy_singles(sources)

    def begin(self, sources: Sequence[torch.Tensor], device: DeviceCopy, deferrable: Sequence[bool]) -> Pending | None:
        """Begins to copy what lies on the device, and copies the rest."""
        held = [device.holds(source) for source in sources]
        ours = [index for index, is_held in enumerate(held) if is_held]
        rest = [index for index, is_held in enumerate(held) if not is_held]
        pending = device.begin([self.whole[i] for i in ours], [sources[i] for i in ours], [deferrable[i] for i in ours])
        try:
            if rest:
                copy_all([self.whole[i] for i in rest], [sources[i] for i in rest])
        except BaseException:
            if pending is not None:
                pending.wait()  # the slot may be another save's next
            raise
        return pending

    def _copy_singles(self, sources: Sequence[torch.Tensor]) -> None:
        targets, given = [], []
        for index in self.singles:
            source, target = sources[index], self.whole[index]
            cut = self.cuts.get(index)
            if cut is not None and source.is_contiguous():
                head, rest = cut
                flat, length = source.detach().view(-1), head.numel()
                targets += [head, rest]
                given += [flat[:length], flat[length:]]
            else:
                targets.append(target)
                given.append(source)
        if targets:
            copy_all(targets, given)


class MappedSlot:
    """One slot's file, mapped into this process; `device`: the accelerator that copies into it, if there is one."""

    def __init__(self, descriptor: int, capacity_bytes: int, device: DeviceCopy | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self._device = device
        self._pending: Pending | None = None
        self._pinning, self._is_pinned = threading.Lock(), False
        self._file = _identity(descriptor)
        self._map = mmap.mmap(descriptor, CONTROL_BYTES + capacity_bytes)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._views = _Views(layout=None, whole=(), cuts={}, runs=(), singles=())
        self._header: Layout | None = None  # the layout whose header's first bytes stand in the slot

    def is_of(self, descriptor: int) -> bool:
        """Whether this is a mapping of the descriptor's file."""
        return _identity(descriptor) == self._file

    @property
    def data(self) -> memoryview:
        """The slot's bytes behind the control page."""
        return memoryview(self._map)[CONTROL_BYTES:]

    def populate(self) -> None:
        """Enters the pages into the page table; without the GIL, about 0.2 s a GiB. A kernel before 5.14 cannot.

        Piece by piece: the kernel locks the process's memory meanwhile, and training asks for some all the time.
        """
        size = len(self._map)
        for begin in range(0, size, _POPULATE_BYTES):
            _libc.madvise(
                ctypes.c_void_p(self._bytes.data_ptr() + begin),
                ctypes.c_size_t(min(_POPULATE_BYTES, size - begin)),
                ctypes.c_int(_MADV_POPULATE_WRITE),
            )

    def pin(self) -> None:
        """Locks the pages for the device, once it is in use."""
        with self._pinning:
            if self._device is not None and not self._is_pinned:
                self._is_pinned = self._device.pin(self._bytes.data_ptr(), len(self._map))

    def release(self) -> None:
        """Before the mapping goes: nothing is copied into it any more, and its pages are let go."""
        if self._pending is not None:
            with contextlib.suppress(RuntimeError):  # whoever follows the copy tells
                self._pending.wait()
        with self._pinning:
            if self._is_pinned and self._device is not None:
                self._device.unpin(self._bytes.data_ptr())
            self._device, self._is_pinned = None, False

    def write_record(self, record: SlotRecord) -> None:
        offset, data = rank_record(record)
        self._map[offset : offset + len(data)] = data

    def stage(self, plan: SavePlan, header_tail: bytes, sources: Sequence[torch.Tensor]) -> None:
        """Copies a whole file: header, then every tensor, each in one pass."""
        self._write_header(plan, header_tail).copy(sources)

    def begin(
        self, plan: SavePlan, header_tail: bytes, sources: Sequence[torch.Tensor], device: DeviceCopy,
        deferrable: Sequence[bool],
    ) -> Pending | None:  # fmt: skip
        """The same, but that the device's tensors may still be on their way when it returns."""
        self._pending = self._write_header(plan, header_tail).begin(sources, device, deferrable)
        return self._pending

    def _write_header(self, plan: SavePlan, header_tail: bytes) -> _Views:
        """The views that belong to the header: another thread may `prepare` others at any time."""
        layout, views = plan.layout, self._views
        if views.layout is not layout:
            self._views = views = self._make_views(plan, layout)
        if self._header is not layout:
            self._write(0, layout.header.prefix)
            self._header = layout
        self._write(len(layout.header.prefix), header_tail)
        return views

    def prepare(self, plan: SavePlan) -> None:
        """Makes the plan's views ahead of the first save."""
        layout = plan.layout
        if layout.header.size_bytes <= self.capacity_bytes:
            self._views = self._make_views(plan, layout)

    def stage_window(
        self, plan: SavePlan, header_tail: bytes, sources: Sequence[torch.Tensor], begin: int, size: int
    ) -> None:
        """Copies the file's bytes `[begin, begin + size)` to the slot's first bytes."""
        self._header = None
        end, header_bytes = begin + size, len(plan.header_prefix) + len(header_tail)
        if begin < header_bytes:
            self._write(0, (plan.header_prefix + header_tail)[begin:end])
        for (low, high), source in zip(plan.layout.ranges, sources, strict=True):
            first, last = max(low, begin), min(high, end)
            if first >= last:
                continue
            piece = flat_bytes(source)[first - low : last - low]
            target = self._bytes[CONTROL_BYTES + first - begin : CONTROL_BYTES + last - begin]
            if head := _head_bytes(first - begin, last - first):
                target[:head].copy_(piece[:head])
            target[head:].copy_(piece[head:])

    def _write(self, offset: int, data: bytes) -> None:
        self._map[CONTROL_BYTES + offset : CONTROL_BYTES + offset + len(data)] = data

    def _make_views(self, plan: SavePlan, layout: Layout) -> _Views:
        forms, ranges = plan.stored_forms(), layout.ranges
        whole, cuts = [], {}
        for index, ((begin, end), (dtype, shape)) in enumerate(zip(ranges, forms, strict=True)):
            raw = self._bytes[CONTROL_BYTES + begin : CONTROL_BYTES + end]
            # An empty tensor has no bytes that could be viewed as something else.
            whole.append(raw.view(dtype).view(shape) if begin < end else torch.empty(shape, dtype=dtype))
            if head := _head_bytes(begin, end - begin):
                cuts[index] = raw[:head].view(dtype), raw[head:].view(dtype)
        runs = [self._make_run(ranges, members, *forms[members[0]]) for members in find_runs(ranges, forms)]
        in_runs = {index for run in runs for index in run.members}
        singles = [index for index in range(len(whole)) if index not in in_runs]
        return _Views(layout=layout, whole=whole, cuts=cuts, runs=runs, singles=singles)

    def _make_run(
        self, ranges: Sequence[tuple[int, int]], members: Sequence[int], dtype: torch.dtype, shape: tuple[int, ...]
    ) -> _Run:
        begin, end = ranges[members[0]][0], ranges[members[-1]][1]
        raw = self._bytes[CONTROL_BYTES + begin : CONTROL_BYTES + end]
        return _Run(members=members, target=raw.view(dtype).view(-1, *shape[1:]))


def find_runs(
    ranges: Sequence[tuple[int, int]], forms: Sequence[tuple[torch.dtype, tuple[int, ...]]]
) -> list[list[int]]:
    """The indexes of small tensors that follow each other in the file and can be copied by one concatenation."""
    small = [
        index
        for index, ((begin, end), (dtype, shape)) in enumerate(zip(ranges, forms, strict=True))
        if 0 < end - begin < _CUT_BYTES and shape and dtype in _JOINED
    ]
    runs: list[list[int]] = []
    for index in sorted(small, key=lambda i: ranges[i]):
        (dtype, shape), before = forms[index], runs[-1][-1] if runs else None
        if (
            before is not None
            and ranges[before][1] == ranges[index][0]
            and forms[before][0] is dtype
            and forms[before][1][1:] == shape[1:]
        ):
            runs[-1].append(index)
        else:
            runs.append([index])
    return [run for run in runs if len(run) > 1]


def _head_bytes(begin: int, size: int) -> int:
    """How many of a tensor's bytes lie before the end of the cache line that it begins in; 0: not to be cut there."""
    return -begin % CACHE_LINE if size >= _CUT_BYTES else 0


def _identity(descriptor: int) -> tuple[int, int]:
    """What tells a file from any other: its number is not given away again while it is mapped."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def copy_all(targets: list[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each source into its target; returns when the bytes are there, from whatever device."""
    with torch.no_grad():
        torch._foreach_copy_(targets, list(sources), non_blocking=True)
    if not all(map(_is_on_host, sources)):
        for device in {source.device for source in sources if not source.is_cpu}:
            torch.accelerator.synchronize(device)


class SlotMaps:
    """The slots that this process has mapped, by index; `device`: the accelerator that copies into them."""

    def __init__(self, device: DeviceCopy | None = None) -> None:
        self._device = device
        self._maps: dict[int, MappedSlot] = {}
        self._lock = threading.Lock()

    def take(self, index: int, capacity_bytes: int, descriptor: int) -> tuple[MappedSlot, bool]:
        """The mapping of that slot (and whether it is new); closes the descriptor."""
        try:
            with self._lock:
                known = self._maps.get(index)
                # By the file, not by its number: an agent that was started anew counts from the beginning.
                if known is not None and known.is_of(descriptor):
                    return known, False
                self._maps[index] = mapped = MappedSlot(descriptor, capacity_bytes, self._device)
            if known is not None:
                known.release()
            return mapped, True
        finally:
            os.close(descriptor)

    def clear(self) -> None:
        """Forgets all mappings; the memory goes when the last view does."""
        with self._lock:
            known = list(self._maps.values())
            self._maps.clear()
        for mapped in known:
            mapped.release()
