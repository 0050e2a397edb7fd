"""What the machine itself can do, measured beside the peers in the same run: every ratio is to one of these."""

from __future__ import annotations

import mmap
import os
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_LINE = 64
_BLOCK_BYTES = 4096
_DIRECT_BYTES = 8 * 2**20
_DIRECT_THREADS = 4


class PlainCopy:
    """One pass of copies into mapped, populated shared memory, through views made once: the limit of a stall."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._sources = list(tensors)
        sizes = [-(-t.numel() * t.element_size() // _LINE) * _LINE for t in tensors]
        self.descriptor = os.memfd_create("bench")
        os.ftruncate(self.descriptor, sum(sizes))
        self._map = mmap.mmap(self.descriptor, sum(sizes))
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        whole.fill_(1)
        offset, self._views = 0, []
        for tensor, size in zip(tensors, sizes, strict=True):
            length = tensor.numel() * tensor.element_size()
            self._views.append(whole[offset : offset + length].view(tensor.dtype).view(tensor.shape))
            offset += size
        self._sizes = sizes

    def copy(self) -> float:
        """Copies all tensors; seconds."""
        begin = time.perf_counter()
        torch._foreach_copy_(self._views, self._sources)
        return time.perf_counter() - begin

    def read_back(self) -> float:
        """Reads every tensor back, one `preadv` each, by one thread; seconds: the limit of a restore from memory."""
        targets = [memoryview(t.detach().reshape(-1).view(torch.uint8).numpy().data) for t in self._sources]
        begin, offset = time.perf_counter(), 0
        for target, size in zip(targets, self._sizes, strict=True):
            _fill(self.descriptor, target, offset)
            offset += size
        return time.perf_counter() - begin

    def write_direct(self, folder: Path) -> float:
        """Writes what was copied to a new file, as `direct_write` does, with no second buffer; seconds."""
        return direct_write(folder, sum(self._sizes), self._map)

    def close(self) -> None:
        """Lets the descriptor go; the memory goes with the last view."""
        os.close(self.descriptor)


def direct_write(folder: Path, size_bytes: int, source: mmap.mmap | None = None) -> float:
    """Writes a new file past the page cache from populated shared memory, 8 MiB at a time, and syncs it; seconds. Its
    blocks are reserved and several threads write, because ext4 takes more so. Raises OSError where the disk is full,
    or its file system always goes through the page cache.

    source: shared memory that is there already and at least that large; without it some is made for the while.
    """
    if source is None:
        source = mmap.mmap(-1, size_bytes)
        torch.frombuffer(source, dtype=torch.uint8).fill_(7)
    path = folder / f"limit-{os.getpid()}"
    whole = size_bytes - size_bytes % _BLOCK_BYTES
    begin = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
    try:
        view = memoryview(source)
        os.posix_fallocate(descriptor, 0, max(whole, 1))

        def write(offset: int) -> None:
            os.pwrite(descriptor, view[offset : min(offset + _DIRECT_BYTES, whole)], offset)

        with ThreadPoolExecutor(_DIRECT_THREADS) as executor:
            for _ in executor.map(write, range(0, whole, _DIRECT_BYTES)):
                pass
        os.fsync(descriptor)
        return time.perf_counter() - begin
    finally:
        os.close(descriptor)
        path.unlink()


def cold_read(paths: Sequence[Path]) -> float:
    """Reads the files by one thread, 8 MiB at a time, after they were dropped from the page cache; seconds."""
    drop_caches()
    return read_files(paths)


def read_files(paths: Sequence[Path]) -> float:
    """Reads the files by one thread, 8 MiB at a time; seconds. They are in the page cache after it."""
    buffer = memoryview(bytearray(_DIRECT_BYTES))
    begin = time.perf_counter()
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begin


def drop_caches() -> None:
    """What was read or written is on disk alone from here on. Needs root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def repeated(measure: Callable[[], float], times: int) -> list[float]:
    """The measurement so many times."""
    return [measure() for _ in range(times)]


def describe() -> dict[str, str]:
    """The machine, in words."""
    model = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                  if line.startswith("model name")), "unknown")  # fmt: skip
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": f"{os.cpu_count()} × {model}",
        "memory": f"{memory:.0f} GiB",
        "kernel": os.uname().release,
        "torch": torch.__version__,
        "open_files": f"{resource.getrlimit(resource.RLIMIT_NOFILE)[1]:,} open files a process",
    }


def _fill(descriptor: int, target: memoryview, offset: int) -> None:
    filled = 0
    while filled < len(target):
        filled += os.preadv(descriptor, [target[filled:]], offset + filled)
