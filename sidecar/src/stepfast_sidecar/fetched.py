"""Files of a job that came out of other nodes' memory, for ranks to read: nameless, so that nothing is left behind,
within the memory tier. They stay until the job's ranks have saved something newer: some may be late, or read for long.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from stepfast.errors import AgentError
from stepfast.step import JobKey
from stepfast_sidecar.memory import MemoryTier, lay_out

_RESTORING_SECONDS = 600.0  # since a file was last asked for: as long as copies from the storage that are foreseen
_SAVED_SECONDS = 60.0  # likewise, once the job's ranks on this node have saved something
_SLACK_BYTES = 4 << 20  # of a file's blocks: a tmpfs of huge pages gives whole ones


@dataclass(slots=True, kw_only=True)
class FetchedFile:
    """`descriptor` stays this object's."""

    descriptor: int
    size_bytes: int
    asked_time: float  # monotonic

    def has_grown(self) -> bool:
        """Whether a rank with root's rights made it larger."""
        found = os.fstat(self.descriptor)
        return found.st_size > self.size_bytes or found.st_blocks * 512 > self.size_bytes + _SLACK_BYTES

    def open(self) -> int:
        """A descriptor to read by; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)


class NoRoom(AgentError):
    """The memory tier has no room for the file: it is read from the storage."""


class FetchedFiles:
    """Those of one job. A file is fetched once, however many ranks ask for it meanwhile."""

    def __init__(self, job: JobKey, memory: MemoryTier, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._folder, self._memory = memory.folder(job), memory
        self._files: dict[str, FetchedFile] = {}
        self._fetching: dict[str, asyncio.Future[FetchedFile | None]] = {}
        self._is_over = False

    @property
    def size_bytes(self) -> int:
        """What they take of the memory tier."""
        return sum(file.size_bytes for file in self._files.values())

    async def get(self, path: str, fetch: Callable[[], Awaitable[tuple[int, int] | None]]) -> FetchedFile | None:
        """The file, fetched now unless it is there; None when `fetch` finds none. `fetch` has taken its room."""
        file = self._files.get(path)
        if file is not None:
            file.asked_time = self._monotonic()
            return file
        if path not in self._fetching:
            self._fetching[path] = asyncio.ensure_future(self._fetch(path, fetch))
        return await asyncio.shield(self._fetching[path])

    async def _fetch(self, path: str, fetch: Callable[[], Awaitable[tuple[int, int] | None]]) -> FetchedFile | None:
        try:
            found = await fetch()
            if found is None:
                return None
            if self._is_over:
                self._free(*found)
                return None
            self._files[path] = FetchedFile(descriptor=found[0], size_bytes=found[1], asked_time=self._monotonic())
            return self._files[path]
        finally:
            del self._fetching[path]

    def sweep(self, *, has_saved: bool) -> None:
        """Lets those go that nobody has asked for in a while, and those that take more than they were given.

        `has_saved`: whether the job's ranks on this node have saved a step, so that they have restored theirs.
        """
        oldest = self._monotonic() - (_SAVED_SECONDS if has_saved else _RESTORING_SECONDS)
        for path in [path for path, file in self._files.items() if file.asked_time <= oldest or file.has_grown()]:
            self._let_go(path)

    def release(self, wanted_bytes: int) -> int:
        """Frees memory for slots; returns the bytes. Whoever reads one of them finds zeros, which no checksum fits."""
        freed = 0
        for path in list(self._files):
            if freed < wanted_bytes:
                freed += self._let_go(path)
        return freed

    def release_all(self) -> None:
        """The job is over here."""
        self._is_over = True
        for path in list(self._files):
            self._let_go(path)

    def _let_go(self, path: str) -> int:
        file = self._files.pop(path)
        self._free(file.descriptor, file.size_bytes)
        return file.size_bytes

    def _free(self, descriptor: int, size_bytes: int) -> None:
        def free() -> None:
            try:
                os.ftruncate(descriptor, 0)  # ranks may have it open still
            finally:
                os.close(descriptor)

        self._memory.budget.free(size_bytes, free)

    def make(self, size_bytes: int) -> int:
        """A nameless file of that size, whose room was taken before. Raises OSError when the memory is not there."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        try:
            lay_out(descriptor, size_bytes)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor
