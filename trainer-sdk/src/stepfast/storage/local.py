"""A folder of a local (or mounted) file system as a store.

Invariant owned here (I2): an object's name appears when all its bytes are on disk: temporary file, fsync,
link or rename, fsync of the folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from stepfast.errors import ObjectNotFound, StorageForbidden, StorageUnavailable
from stepfast.layout import CHUNK_BYTES
from stepfast.storage.base import ObjectInfo, Probe, Upload
from stepfast.storage.exclusive import place_exclusively
from stepfast.storage.faults import storage_error
from stepfast.storage.localfile import (
    is_temp_name,
    read_at,
    remove_quietly,
    remove_tree,
    sync_folder,
    target_name,
    write_temp,
)
from stepfast.storage.localupload import LocalUpload
from stepfast.storage.paths import folder_path, object_path
from stepfast.storage.retry import Attempt, Retry

T = TypeVar("T")


class LocalStore:
    """See `Store`. The root is made with the first object."""

    def __init__(self, root: str | os.PathLike[str], *, retry: Retry | None = None, probe: Probe | None = None) -> None:
        self._root = Path(os.path.abspath(root))
        self.uri = self._root.as_uri()
        self._retry = retry or Retry()
        self._probe = probe
        self._lock = threading.Lock()
        self._durable_folders: set[Path] = set()

    def read(self, path: str) -> bytes:
        return self._read("read", path, lambda file: file.read_bytes())

    def read_range(self, path: str, offset: int, buffer: memoryview) -> None:
        view = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer

        def fill(file: Path) -> int:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return read_at(descriptor, offset, view)
            finally:
                os.close(descriptor)

        filled = self._read("read", path, fill)
        if filled < len(view):
            raise ObjectNotFound(f"read {path}: it ends {len(view) - filled} bytes before {offset + len(view)}")

    def create(self, path: str, data: bytes) -> bool:
        target = self._root / object_path(path)
        placed: list[os.stat_result] = []

        def attempt() -> bool:
            self._make_folder(target.parent)
            if _exists(target):
                # An attempt before this one may have placed it, and failed after that.
                is_ours = any(os.path.samestat(os.lstat(target), stat) for stat in placed)
            else:
                temp = write_temp(target, data)
                placed.append(os.lstat(temp))
                try:
                    is_ours = place_exclusively(temp, target)
                finally:
                    remove_quietly(temp)
            # For the loser too: it will act upon an object that must not vanish with the power.
            sync_folder(target.parent)
            return is_ours

        self._call_probe("create:before", path)
        is_ours = self._write("create", path, attempt)
        self._call_probe("create:after", path)
        return is_ours

    def replace(self, path: str, data: bytes) -> None:
        target = self._root / object_path(path)

        def attempt() -> None:
            self._make_folder(target.parent)
            temp = write_temp(target, data)
            try:
                os.replace(temp, target)
            except BaseException:
                remove_quietly(temp)
                raise
            sync_folder(target.parent)

        self._call_probe("replace:before", path)
        self._write("replace", path, attempt)
        self._call_probe("replace:after", path)

    def upload(self, path: str, size_bytes: int, *, chunk_bytes: int = CHUNK_BYTES) -> Upload:
        target = self._root / object_path(path)

        def attempt() -> LocalUpload:
            self._make_folder(target.parent)
            return LocalUpload(target, path, size_bytes, chunk_bytes=chunk_bytes, retry=self._retry, probe=self._probe)

        return self._write("upload", path, attempt)

    def list(self, folder: str) -> Sequence[ObjectInfo]:
        def entries(place: Path) -> list[ObjectInfo]:
            found = []
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(place) as scan:
                for entry in scan:
                    with contextlib.suppress(FileNotFoundError):  # removed since
                        if not is_temp_name(entry.name):
                            found.append(_info(entry))
            return sorted(found, key=lambda info: info.name)

        place = self._root / folder_path(folder)
        return self._try("list", folder, lambda: entries(place))

    def list_temporary(self, folder: str) -> Sequence[tuple[str, str]]:
        def entries() -> Sequence[tuple[str, str]]:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                names = sorted(name for name in os.listdir(self._root / folder_path(folder)) if is_temp_name(name))
                return [(name, target_name(name)) for name in names]
            return []

        return self._try("list", folder, entries)

    def delete(self, path: str) -> None:
        target = self._root / object_path(path)

        def attempt() -> None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(target)
                # Whoever deletes a manifest first deletes its parts next: that order must survive a power
                # cut.
                sync_folder(target.parent)
                if target.parent != self._root:
                    # What has no entry left is no folder to an object store either; the kernel refuses if it has.
                    with contextlib.suppress(OSError):
                        os.rmdir(target.parent)

        self._call_probe("delete:before", path)
        self._try("delete", path, attempt)
        self._call_probe("delete:after", path)

    def delete_folder(self, folder: str) -> None:
        if not folder_path(folder):
            raise StorageForbidden("the whole root is never deleted")
        target = self._root / folder_path(folder)

        def attempt() -> None:
            with self._lock:
                self._durable_folders = {known for known in self._durable_folders if not known.is_relative_to(target)}
            try:
                remove_tree(target)
            except NotADirectoryError:
                return
            except OSError as error:
                if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:  # somebody wrote into it meanwhile
                    raise StorageUnavailable(f"delete {folder}: it is being written into") from error
                raise
            with contextlib.suppress(FileNotFoundError):
                sync_folder(target.parent)

        self._call_probe("delete:before", folder)
        self._try("delete", folder, attempt)
        self._call_probe("delete:after", folder)

    def open_file(self, path: str) -> int | None:
        def attempt(file: Path) -> int:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            if os.path.isfile(descriptor):
                return descriptor
            os.close(descriptor)
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))

        return self._read("open", path, attempt)

    def close(self) -> None:
        """Nothing is held."""

    def _read(self, doing: str, path: str, operation: Callable[[Path], T]) -> T:
        file = self._root / object_path(path)
        try:
            return self._try(doing, path, lambda: operation(file))
        except StorageForbidden as error:
            if isinstance(error.__cause__, NotADirectoryError | IsADirectoryError):
                raise ObjectNotFound(str(error)) from error
            raise

    def _write(self, doing: str, path: str, operation: Callable[[], T]) -> T:
        def attempt() -> T:
            try:
                return operation()
            except FileNotFoundError as error:
                # The folder was just made: somebody removes it at this very moment, or what is above it takes none.
                raise StorageUnavailable(
                    f"{doing} {path}: its folder cannot be made, or is being removed: {self._root}"
                ) from error

        return self._try(doing, path, attempt)

    def _try(self, doing: str, path: str, operation: Callable[[], T]) -> T:
        def attempt(_: Attempt) -> T:
            try:
                return operation()
            except OSError as error:
                raise storage_error(error, f"{doing} {path}") from error

        return self._retry.run(attempt)

    def _make_folder(self, folder: Path) -> None:
        """Makes it durably: a file is on disk only if every folder above it is."""
        if folder in self._durable_folders and folder.is_dir():
            return
        existing = folder
        while not existing.exists():
            existing = existing.parent
        folder.mkdir(parents=True, exist_ok=True)
        # Folders inside the root that are there already may have been made by somebody who was killed before
        # this.
        top = min(existing, self._root, key=lambda path: len(path.parts))
        above = folder
        while above != top:
            sync_folder(above)
            above = above.parent
        sync_folder(top)
        with self._lock:
            self._durable_folders.add(folder)

    def _call_probe(self, operation: str, path: str) -> None:
        if self._probe is not None:
            self._probe(operation, path)


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


def _info(entry: os.DirEntry[str]) -> ObjectInfo:
    is_folder = entry.is_dir()
    return ObjectInfo(name=entry.name, size_bytes=0 if is_folder else entry.stat().st_size, is_folder=is_folder)
