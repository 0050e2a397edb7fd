"""Objects of the storage as files of this machine, which ranks read through a descriptor: they have no credentials.

A rank's file is downloaded once, however many ranks ask for it, and before the first does where that was foreseen. Its
bytes never change: its name holds its run. Records are read anew each time. What ranks ask for goes before what was
foreseen, also where the disk has no room for both.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import BinaryIO

from stepfast.errors import StorageError, StorageFull, StorageUnavailable
from stepfast.layout import join, parse_data_path
from stepfast.storage.base import Store
from stepfast.storage.download import download

_READ_AHEAD_BYTES = 128 * 1024  # of a longer range Linux reads the device's window alone, which is often this


@dataclass(slots=True, kw_only=True)
class _Copy:
    file: BinaryIO
    size_bytes: int
    until: float  # monotonic


class _Copying(Future[_Copy]):
    """A copy, there or on its way."""

    def __init__(self, *, is_foreseen: bool) -> None:
        super().__init__()
        self.is_foreseen = is_foreseen
        self.is_asked = not is_foreseen  # for, by a rank


class Copies:
    """Copies are nameless, so that nothing is left behind whoever dies meanwhile. Methods may be called side by side.

    threads, foresee_threads: which download what is asked for, and what is foreseen. spool_folder: on the disk where
    they lie; None: the system's folder for temporary files. asked_seconds: how long one stays after it was asked for;
    foreseen_seconds: how long one that nobody has asked for yet.
    """

    def __init__(
        self,
        store: Store,
        folder: str,
        threads: Executor,
        *,
        foresee_threads: Executor,
        spool_folder: str | None = None,
        asked_seconds: float = 60.0,
        foreseen_seconds: float = 600.0,
    ) -> None:
        self._store, self._folder, self._spool_folder = store, folder, spool_folder
        self._threads, self._foresee_threads = threads, foresee_threads
        self._asked_seconds, self._foreseen_seconds = asked_seconds, foreseen_seconds
        self._copies: dict[str | object, _Copying] = {}
        self._lock = threading.Lock()
        self._sweep: threading.Timer | None = None
        self._full_time = float("-inf")  # when the disk had no room for what was asked for (monotonic)

    def open_path(self, path: str) -> tuple[str, int]:
        """A path that can be opened now, the object itself or for a while its copy; and its size in bytes.

        Raises ObjectNotFound, StorageError.
        """
        full = join(self._folder, path)
        descriptor = self._store.open_file(full)
        if descriptor is None:
            copy = self._copy(path, is_foreseen=False)
            return f"/proc/{os.getpid()}/fd/{copy.file.fileno()}", copy.size_bytes
        try:
            return os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def foresee(self, path: str) -> None:
        """Has a rank's file at hand before it is asked for. Raises ObjectNotFound, StorageError."""
        descriptor = self._store.open_file(join(self._folder, path))
        if descriptor is None:
            if time.monotonic() - self._full_time >= self._foreseen_seconds:
                self._copy(path, is_foreseen=True)
            return
        try:
            for begin in range(0, os.fstat(descriptor).st_size, _READ_AHEAD_BYTES):
                os.posix_fadvise(descriptor, begin, _READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Lets all copies go."""
        with self._lock:
            if self._sweep is not None:
                self._sweep.cancel()
            for copy in self._made():
                copy.file.close()
            self._copies.clear()

    def _copy(self, path: str, *, is_foreseen: bool) -> _Copy:
        key = path if parse_data_path(path) is not None else object()
        with self._lock:
            known = self._copies.get(key)
            copying = known or self._copies.setdefault(key, _Copying(is_foreseen=is_foreseen))
            copying.is_asked |= not is_foreseen
        if known is None:
            try:
                copying.set_result(self._make(path, is_foreseen=is_foreseen))
            except BaseException as error:
                with self._lock:
                    del self._copies[key]
                copying.set_exception(error)
                raise
        try:
            copy = copying.result()
        except StorageError:
            if is_foreseen or not copying.is_foreseen:
                raise
            return self._copy(path, is_foreseen=False)  # who asks has a storage deadline of his own
        with self._lock:
            if not copy.file.closed:
                copy.until = time.monotonic() + (self._foreseen_seconds if is_foreseen else self._asked_seconds)
                self._arm()
                return copy
        return self._copy(path, is_foreseen=is_foreseen)  # it was let go a moment ago

    def _make(self, path: str, *, is_foreseen: bool) -> _Copy:
        if is_foreseen:
            return self._download(path, self._foresee_threads)
        try:
            return self._download(path, self._threads)
        except StorageFull:
            self._full_time = time.monotonic()
            if not self._let_foreseen_go():
                raise
            return self._download(path, self._threads)

    def _let_foreseen_go(self) -> bool:
        """Makes room: what is foreseen and nobody has asked for goes, as soon as it is there. Whether there was any."""
        with self._lock:
            found = {key: copying for key, copying in self._copies.items() if not copying.is_asked}
        wait(found.values())
        with self._lock:
            for key, copying in found.items():
                if self._copies.get(key) is copying and not copying.is_asked:
                    self._copies.pop(key).result().file.close()
        return bool(found)

    def _download(self, path: str, threads: Executor) -> _Copy:
        try:
            file = tempfile.TemporaryFile(prefix="stepfast-fetch-", dir=self._spool_folder)  # noqa: SIM115  # kept
        except OSError as error:  # never ObjectNotFound: a folder that is gone says nothing about the object
            raise StorageUnavailable(f"begin a copy of {path} on this node: {error}") from error
        try:
            size = download(self._store, join(self._folder, path), file.fileno(), threads)
        except BaseException:
            file.close()
            raise
        return _Copy(file=file, size_bytes=size, until=time.monotonic() + self._asked_seconds)

    def _arm(self) -> None:
        """With the lock: looks again when the first copy may go."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        if made := self._made():
            pause = max(0.0, min(copy.until for copy in made) - time.monotonic())
            self._sweep = threading.Timer(pause, self._let_go)
            self._sweep.daemon = True
            self._sweep.start()

    def _let_go(self) -> None:
        with self._lock:
            now = time.monotonic()
            for key, copying in list(self._copies.items()):
                if copying.done() and copying.result().until <= now:
                    self._copies.pop(key).result().file.close()
            self._arm()

    def _made(self) -> list[_Copy]:
        return [copying.result() for copying in self._copies.values() if copying.done()]
