"""A store in memory that counts what is asked of it, as Azure Blob Storage would count it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stepfast.errors import ObjectNotFound
from stepfast.storage.base import ObjectInfo, Upload

PAGE_ENTRIES = 5000  # what one request lists at most (List Blobs, Azure Blob Storage REST API)


@dataclass(slots=True)
class Counts:
    """Requests, and bytes of the objects' content that they moved."""

    reads: int = 0
    missing: int = 0  # reads that found nothing
    lists: int = 0  # pages
    writes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0

    @property
    def requests(self) -> int:
        return self.reads + self.missing + self.lists + self.writes


@dataclass(slots=True)
class MemoryStore:
    """See `stepfast.storage.Store`. Data files are names alone: nobody reads them here."""

    uri: str = "memory://counted"
    counts: Counts = field(default_factory=Counts)
    _objects: dict[str, bytes] = field(default_factory=dict)
    _folders: dict[str, dict[str, int]] = field(default_factory=dict)

    def put(self, path: str, data: bytes = b"", size_bytes: int | None = None) -> None:
        """The object is there; nobody is charged for it."""
        folder, _, name = path.rpartition("/")
        self._folders.setdefault(folder, {})[name] = len(data) if size_bytes is None else size_bytes
        self._objects[path] = data

    def read(self, path: str) -> bytes:
        if path not in self._objects:
            self.counts.missing += 1
            raise ObjectNotFound(path)
        self.counts.reads += 1
        self.counts.read_bytes += len(self._objects[path])
        return self._objects[path]

    def create(self, path: str, data: bytes) -> bool:
        self.counts.writes += 1
        if path in self._objects:
            return False
        self.counts.written_bytes += len(data)
        self.put(path, data)
        return True

    def list(self, folder: str) -> Sequence[ObjectInfo]:
        entries = self._folders.get(folder, {})
        self.counts.lists += max(1, -(-len(entries) // PAGE_ENTRIES))
        return [ObjectInfo(name=name, size_bytes=entries[name], is_folder=False) for name in sorted(entries)]

    def read_range(self, path: str, offset: int, buffer: memoryview) -> None:
        raise NotImplementedError

    def replace(self, path: str, data: bytes) -> None:
        raise NotImplementedError

    def upload(self, path: str, size_bytes: int, *, chunk_bytes: int = 0) -> Upload:
        raise NotImplementedError

    def list_temporary(self, folder: str) -> Sequence[tuple[str, str]]:
        raise NotImplementedError

    def delete(self, path: str) -> None:
        raise NotImplementedError

    def delete_folder(self, folder: str) -> None:
        raise NotImplementedError

    def open_file(self, path: str) -> int | None:
        return None

    def close(self) -> None:
        """There is nothing to close."""
