"""Any other storage that fsspec knows, as a store. Azure Blob Storage has its own (`azure`).

What fsspec does not promise for every storage, and so neither does this store: that two `create`s at the same
moment on two machines give one True (where the file system knows no conditional create, `create` looks first
and writes then), and that a call which never answers is given up at the deadline.
"""

from __future__ import annotations

import errno
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from stepfast.errors import ObjectNotFound, StorageError, StorageForbidden, StorageUnavailable
from stepfast.layout import CHUNK_BYTES
from stepfast.storage.base import ObjectInfo, Probe, Upload
from stepfast.storage.faults import storage_error
from stepfast.storage.objectupload import BufferedUpload, FileLike, StreamedUpload
from stepfast.storage.paths import folder_path, object_path
from stepfast.storage.retry import Attempt, Retry

T = TypeVar("T")

_MEMORY_LOCK = threading.Lock()
"""fsspec has one memory file system for the whole process, which looks and then writes: creates take
turns."""


class FileSystem(Protocol):
    """What is used of fsspec.AbstractFileSystem."""

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes: ...
    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> object: ...
    def info(self, path: str) -> dict[str, object]: ...
    def exists(self, path: str) -> bool: ...
    def ls(self, path: str, detail: bool = True) -> Sequence[dict[str, object]]: ...
    def rm_file(self, path: str) -> object: ...
    def rm(self, path: str, recursive: bool = False) -> object: ...
    def makedirs(self, path: str, exist_ok: bool = False) -> object: ...
    def open(self, path: str, mode: str, autocommit: bool = True) -> FileLike: ...
    def invalidate_cache(self, path: str | None = None) -> None: ...


class ObjectStore:
    """See `Store`. `root` is the file system's own name of the folder, without the protocol."""

    def __init__(
        self,
        filesystem: FileSystem,
        root: str,
        *,
        uri: str,
        in_memory: bool = False,
        retry: Retry | None = None,
        probe: Probe | None = None,
    ) -> None:
        self.uri = uri
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._in_memory = in_memory
        self._retry = retry or Retry()
        self._probe = probe
        self._create_lock = _MEMORY_LOCK if in_memory else threading.Lock()
        self._is_conditional = _takes_mode(filesystem)

    def read(self, path: str) -> bytes:
        name = self._name(path)
        return self._try("read", path, lambda _: bytes(self._filesystem.cat_file(name)))

    def read_range(self, path: str, offset: int, buffer: memoryview) -> None:
        name = self._name(path)
        view = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        end = offset + len(view)

        def attempt(_: Attempt) -> bytes:
            if not len(view):
                self._filesystem.info(name)
                return b""
            try:
                return self._filesystem.cat_file(name, start=offset, end=end)
            except OSError as error:
                if error.errno == errno.EINVAL:  # s3fs: the range begins after the end
                    return b""
                raise

        data = self._try("read", path, attempt)
        if len(data) != len(view):
            raise ObjectNotFound(f"read {path}: it ends {len(view) - len(data)} bytes before {end}")
        view[:] = data

    def create(self, path: str, data: bytes) -> bool:
        name = self._name(path)

        def attempt(attempt: Attempt) -> bool:
            with self._create_lock:
                if self._create(name, data):
                    return True
            # The answer to an attempt before this one may have been lost. Two writers of one object write the
            # same bytes (I2), so equal bytes may be called ours.
            return attempt.number > 0 and self._filesystem.cat_file(name) == data

        self._call_probe("create:before", path)
        is_ours = self._try("create", path, attempt)
        self._call_probe("create:after", path)
        return is_ours

    def replace(self, path: str, data: bytes) -> None:
        name = self._name(path)
        self._call_probe("replace:before", path)
        self._try("replace", path, lambda _: self._pipe(name, data))
        self._call_probe("replace:after", path)

    def upload(self, path: str, size_bytes: int, *, chunk_bytes: int = CHUNK_BYTES) -> Upload:
        name = self._name(path)
        if self._in_memory:
            return BufferedUpload(
                path,
                size_bytes,
                chunk_bytes=chunk_bytes,
                write=lambda data: self._pipe(name, data),
                probe=self._probe,
            )
        stream = self._try("upload", path, lambda _: self._in_folder(name, lambda: self._open_stream(name)))
        return StreamedUpload(
            stream,
            path,
            size_bytes,
            chunk_bytes=chunk_bytes,
            commit=lambda: self._in_folder(name, stream.commit),
            probe=self._probe,
        )

    def list(self, folder: str) -> Sequence[ObjectInfo]:
        name = self._folder_name(folder)

        def attempt(_: Attempt) -> Sequence[dict[str, object]]:
            self._filesystem.invalidate_cache()
            try:
                return self._filesystem.ls(name, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return ()

        return _infos(self._try("list", folder, attempt), name)

    def list_temporary(self, folder: str) -> Sequence[tuple[str, str]]:
        return []  # what was not committed is no object

    def delete(self, path: str) -> None:
        name = self._name(path)
        self._call_probe("delete:before", path)
        self._try("delete", path, lambda _: _unless_missing(lambda: self._filesystem.rm_file(name)))
        self._call_probe("delete:after", path)

    def delete_folder(self, folder: str) -> None:
        if not folder_path(folder):
            raise StorageForbidden("the whole root is never deleted")
        name = self._folder_name(folder)

        def attempt(_: Attempt) -> None:
            self._filesystem.invalidate_cache()
            _unless_missing(lambda: self._filesystem.rm(name, recursive=True))

        self._call_probe("delete:before", folder)
        self._try("delete", folder, attempt)
        self._call_probe("delete:after", folder)

    def open_file(self, path: str) -> int | None:
        object_path(path)
        return None

    def close(self) -> None:
        """fsspec closes its file systems by itself."""

    def _create(self, name: str, data: bytes) -> bool:
        if self._is_conditional:
            try:
                self._pipe(name, data, mode="create")
            except FileExistsError:
                return False
            except NotImplementedError:
                self._is_conditional = False
            else:
                return True
        if self._filesystem.exists(name):
            return False
        self._pipe(name, data)
        return True

    def _pipe(self, name: str, data: bytes, mode: str = "overwrite") -> None:
        if mode == "overwrite":
            self._in_folder(name, lambda: self._filesystem.pipe_file(name, data))
        else:
            self._in_folder(name, lambda: self._filesystem.pipe_file(name, data, mode=mode))

    def _in_folder(self, name: str, operation: Callable[[], T]) -> T:
        """Object stores have no folders; others want them made first."""
        try:
            return operation()
        except FileNotFoundError:
            self._filesystem.makedirs(name.rpartition("/")[0], exist_ok=True)
            return operation()

    def _open_stream(self, name: str) -> FileLike:
        return self._filesystem.open(name, "wb", autocommit=False)

    def _try(self, doing: str, path: str, operation: Callable[[Attempt], T]) -> T:
        def attempt(attempt: Attempt) -> T:
            try:
                return operation(attempt)
            except StorageError:
                raise
            except OSError as error:
                raise storage_error(error, f"{doing} {path}") from error
            # The seam to any file system somebody registered with fsspec: what else it raises (botocore,
            # aiohttp, paramiko, ...) is its own, and may pass.
            except Exception as error:
                raise StorageUnavailable(f"{doing} {path}: {str(error) or type(error).__name__}") from error

        return self._retry.run(attempt)

    def _name(self, path: str) -> str:
        return f"{self._root}/{object_path(path)}"

    def _folder_name(self, folder: str) -> str:
        return f"{self._root}/{folder_path(folder)}".rstrip("/")

    def _call_probe(self, operation: str, path: str) -> None:
        if self._probe is not None:
            self._probe(operation, path)


def _takes_mode(filesystem: FileSystem) -> bool:
    function = getattr(filesystem, "_pipe_file", filesystem.pipe_file)
    return "mode" in inspect.signature(function).parameters


def _unless_missing(operation: Callable[[], object]) -> None:
    try:
        operation()
    except FileNotFoundError:
        return


def _infos(entries: Sequence[dict[str, object]], folder: str) -> Sequence[ObjectInfo]:
    infos = {}
    for entry in entries:
        full_name = str(entry["name"]).strip("/")
        size = entry.get("size")
        is_folder = entry.get("type") == "directory"
        name = full_name.rpartition("/")[2]
        # A file is listed as its own only entry, and a folder's marker among what is in it.
        if full_name != folder.strip("/") and name:
            size_bytes = size if isinstance(size, int) and not is_folder else 0
            infos[name] = ObjectInfo(name=name, size_bytes=size_bytes, is_folder=is_folder)
    return [infos[name] for name in sorted(infos)]
