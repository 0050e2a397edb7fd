"""One file that is being uploaded to a local file system: its temporary file and the two ways to write it."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from stepfast.errors import UploadLost
from stepfast.storage.base import Probe
from stepfast.storage.blocks import reserve_blocks
from stepfast.storage.chunks import ChunkLedger
from stepfast.storage.faults import storage_error
from stepfast.storage.localfile import NO_SUCH_THING, remove_quietly, sync_folder, temp_path, write_at
from stepfast.storage.retry import Attempt, Retry

ALIGNMENT_BYTES = 4096  # enough for every file system that accepts O_DIRECT; memory pages have it by nature


class LocalUpload:
    """See `Upload`. Chunks in aligned memory go to the disk past the page cache, where the file system allows
    that: the cache of a training node belongs to the input data, and its write-back would stall the
    trainer."""

    def __init__(
        self, target: Path, path: str, size_bytes: int, *, chunk_bytes: int, retry: Retry, probe: Probe | None
    ) -> None:
        """Begins the temporary file, with its room on the disk; its folder exists. Raises OSError."""
        self.chunk_bytes = chunk_bytes
        self.direct_bytes = 0
        """Bytes that were written with O_DIRECT."""
        self._ledger = ChunkLedger(size_bytes, chunk_bytes)
        self._target = target
        self._path = path
        self._retry = retry
        self._probe = probe
        self._temp = temp_path(target)
        self._lock = threading.Lock()
        self._writers = 0
        self._is_over = False
        self._buffered = os.open(self._temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._direct: int | None = None
        try:
            os.truncate(self._buffered, size_bytes)  # writes that do not extend the file may run side by side
            self._direct = _open_direct(self._temp)
            if self._direct is not None:
                _reserve(self._direct, size_bytes)
        except BaseException:
            self._close()
            remove_quietly(self._temp)
            raise

    def put(self, offset: int, data: memoryview) -> None:
        view = data.cast("B") if data.format != "B" or data.ndim != 1 else data
        self._ledger.check(offset, len(view))
        if self._probe is not None:
            self._probe("upload.put:before", self._path)
        with self._writing():
            self._try(lambda: self._write(offset, view))
        self._ledger.mark(offset)
        if self._probe is not None:
            self._probe("upload.put:after", self._path)

    def finish(self) -> None:
        self._ledger.check_complete()
        if self._probe is not None:
            self._probe("upload.finish:before", self._path)
        with self._writing():
            try:
                os.fsync(self._buffered)
            except OSError as error:
                # Never again: the kernel forgets what it could not write, and says yes the next time.
                self.abort()
                raise UploadLost(str(storage_error(error, self._doing()))) from error
            self._try(self._make_visible)
        self._end()
        if self._probe is not None:
            self._probe("upload.finish:after", self._path)

    def abort(self) -> None:
        if self._end():
            remove_quietly(self._temp)

    def _make_visible(self) -> None:
        if self._temp.exists():
            os.replace(self._temp, self._target)
        elif not self._has_target():  # else it was renamed by a try whose folder could not be synced
            self.abort()
            raise UploadLost(f"{self._doing()}: somebody removed its temporary file, {self._temp.name}")
        sync_folder(self._target.parent)

    def _has_target(self) -> bool:
        """Whether the object of that name is this upload's, and not another writer's."""
        try:
            return os.path.samestat(os.fstat(self._buffered), os.lstat(self._target))
        except FileNotFoundError:
            return False

    def _write(self, offset: int, view: memoryview) -> None:
        whole = len(view) - len(view) % ALIGNMENT_BYTES
        if whole and self._direct is not None and offset % ALIGNMENT_BYTES == 0:
            try:
                write_at(self._direct, offset, view[:whole])
            except OSError as error:
                # Memory that begins elsewhere than this file system or disk wants it, which only they know; and some
                # file systems accept the flag and refuse every write. The other descriptor writes it all again.
                if error.errno != errno.EINVAL:
                    raise
            else:
                with self._lock:
                    self.direct_bytes += whole
                offset, view = offset + whole, view[whole:]
        write_at(self._buffered, offset, view)

    def _try(self, operation: Callable[[], None]) -> None:
        def attempt(_: Attempt) -> None:
            try:
                operation()
            except OSError as error:
                raise storage_error(error, self._doing()) from error

        self._retry.run(attempt)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Keeps the descriptors open meanwhile: a closed one's number may be another file's a moment
        later."""
        with self._lock:
            if self._has_ended():
                raise UploadLost(f"{self._doing()}: the upload was ended meanwhile")
            self._writers += 1
        try:
            yield
        finally:
            with self._lock:
                self._writers -= 1
                must_close = self._has_ended() and self._writers == 0
            if must_close:
                self._close()

    def _has_ended(self) -> bool:
        return self._is_over

    def _end(self) -> bool:
        """True the first time."""
        with self._lock:
            was_over, self._is_over = self._is_over, True
            is_idle = self._writers == 0
        if not was_over and is_idle:
            self._close()
        return not was_over

    def _close(self) -> None:
        for descriptor in (self._buffered, self._direct):
            if descriptor is not None:
                # What there was to say was said by fsync.
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    def _doing(self) -> str:
        return f"upload {self._path}"


def _open_direct(path: Path) -> int | None:
    """A descriptor past the page cache, or None where the file system or the system has none."""
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | flag)
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.EOPNOTSUPP}:
            return None
        raise


def _reserve(descriptor: int, size_bytes: int) -> None:
    """Blocks for the whole file, where the file system can give them before they are written; raises OSError when it
    has not so many. ext4 lets one thread at a time write past the page cache where a file has none yet.
    """
    try:
        reserve_blocks(descriptor, size_bytes)
    except OSError as error:
        if error.errno not in NO_SUCH_THING:
            raise
