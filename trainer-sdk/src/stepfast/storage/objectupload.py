"""Uploads to file systems that take an object whole (`BufferedUpload`) or as one stream
(`StreamedUpload`)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Protocol

from stepfast.errors import StorageUnavailable, UploadLost
from stepfast.storage.base import Probe
from stepfast.storage.chunks import ChunkLedger
from stepfast.storage.faults import storage_error


class FileLike(Protocol):
    """What is used of the file that fsspec opens with `autocommit=False`: nothing is visible before
    `commit`."""

    def write(self, data: bytes) -> object: ...
    def close(self) -> None: ...
    def commit(self) -> None: ...
    def discard(self) -> None: ...


class BufferedUpload:
    """See `Upload`. Holds the object's bytes until `finish`."""

    def __init__(
        self,
        path: str,
        size_bytes: int,
        *,
        chunk_bytes: int,
        write: Callable[[bytes], None],
        probe: Probe | None,
    ) -> None:
        self.chunk_bytes = chunk_bytes
        self._ledger = ChunkLedger(size_bytes, chunk_bytes)
        self._data: bytearray | None = bytearray(size_bytes)
        self._path = path
        self._write = write
        self._probe = probe

    def put(self, offset: int, data: memoryview) -> None:
        self._ledger.check(offset, data.nbytes)
        _call(self._probe, "upload.put:before", self._path)
        if self._data is None:
            raise UploadLost(f"upload {self._path}: the upload was ended meanwhile")
        self._data[offset : offset + data.nbytes] = data
        self._ledger.mark(offset)
        _call(self._probe, "upload.put:after", self._path)

    def finish(self) -> None:
        self._ledger.check_complete()
        _call(self._probe, "upload.finish:before", self._path)
        if self._data is None:
            raise UploadLost(f"upload {self._path}: the upload was ended meanwhile")
        try:
            self._write(bytes(self._data))
        except OSError as error:
            raise storage_error(error, f"upload {self._path}") from error
        self._data = None
        _call(self._probe, "upload.finish:after", self._path)

    def abort(self) -> None:
        self._data = None


class StreamedUpload:
    """See `Upload`. Chunks go out in the order of their offsets; what comes too early waits in memory.

    A stream that failed has taken an unknown part of the chunk, so nothing is tried again here (the file
    systems have their own retries inside): the upload is lost, and its owner begins another.
    """

    def __init__(
        self,
        stream: FileLike,
        path: str,
        size_bytes: int,
        *,
        chunk_bytes: int,
        commit: Callable[[], None],
        probe: Probe | None,
    ) -> None:
        self.chunk_bytes = chunk_bytes
        self._ledger = ChunkLedger(size_bytes, chunk_bytes)
        self._stream = stream
        self._commit = commit
        self._path = path
        self._probe = probe
        self._lock = threading.Lock()
        self._waiting: dict[int, bytes] = {}
        self._next = 0
        self._is_over = False

    def put(self, offset: int, data: memoryview) -> None:
        self._ledger.check(offset, data.nbytes)
        _call(self._probe, "upload.put:before", self._path)
        with self._lock:
            self._check_alive()
            if offset >= self._next:
                self._waiting[offset] = bytes(data)
            while self._next in self._waiting:
                chunk = self._waiting[self._next]
                self._do(lambda chunk=chunk: self._stream.write(chunk))  # type: ignore[misc]  # a lambda's default
                del self._waiting[self._next]
                self._next += len(chunk)
        self._ledger.mark(offset)
        _call(self._probe, "upload.put:after", self._path)

    def finish(self) -> None:
        self._ledger.check_complete()
        _call(self._probe, "upload.finish:before", self._path)
        with self._lock:
            self._check_alive()
            self._do(self._stream.close)
            self._do(self._commit)
            self._is_over = True
        _call(self._probe, "upload.finish:after", self._path)

    def abort(self) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            self._waiting.clear()
            self._drop()

    def _drop(self) -> None:
        # Nobody will see what cannot be discarded: it was never committed.
        with contextlib.suppress(Exception):
            self._stream.discard()
        with contextlib.suppress(Exception):
            self._stream.close()

    def _check_alive(self) -> None:
        if self._is_over:
            raise UploadLost(f"upload {self._path}: the upload was ended meanwhile")

    def _do(self, operation: Callable[[], object]) -> None:
        try:
            operation()
        except OSError as error:
            self._is_over = True
            self._drop()
            raise storage_error(error, f"upload {self._path}") from error
        # The same seam as in `objects`: file systems raise errors of their own.
        except Exception as error:
            self._is_over = True
            self._drop()
            raise StorageUnavailable(f"upload {self._path}: {str(error) or type(error).__name__}") from error


def _call(probe: Probe | None, operation: str, path: str) -> None:
    if probe is not None:
        probe(operation, path)
