"""What the rest of Stepfast may ask of a storage. Every implementation passes one contract suite
(tests/contracts/test_store_contract.py).

Paths are relative to the store's root, with `/`. All methods block and may be called from any thread. They
raise only `stepfast.errors.StorageError`s: ObjectNotFound, StorageForbidden, StorageFull, StorageUnavailable
(transient, raised after retries until the store's deadline).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stepfast.layout import CHUNK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One entry of a folder: its last path component, size in bytes (0 for folders), and whether it is a
    folder."""

    name: str
    size_bytes: int
    is_folder: bool


class Upload(Protocol):
    """An object that comes into being whole, with `finish`, or not at all.

    `put` may be called from several threads at once, for chunks in any order; every chunk but the last is
    `chunk_bytes` long, and offsets are multiples of it. Chunks may be put again.
    """

    chunk_bytes: int

    def put(self, offset: int, data: memoryview) -> None: ...

    def finish(self) -> None:
        """Makes the object visible under its path, durably, replacing what was there."""

    def abort(self) -> None:
        """Forgets what was put. Never raises; safe to call after `finish`."""


class Store(Protocol):
    """A folder of objects somewhere."""

    uri: str

    def read(self, path: str) -> bytes:
        """The whole object. Raises ObjectNotFound."""

    def read_range(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fills the buffer from the object's bytes at the offset. A shorter object raises ObjectNotFound
        naming it."""

    def create(self, path: str, data: bytes) -> bool:
        """Conditional create: the object becomes `data`, durably, unless it exists; False if it did.

        Of two writers exactly one gets True. A reader sees nothing or all.
        """

    def replace(self, path: str, data: bytes) -> None:
        """The object becomes `data`, atomically and durably, whatever was there."""

    def upload(self, path: str, size_bytes: int, *, chunk_bytes: int = CHUNK_BYTES) -> Upload:
        """Begins an object of that size, to be put in chunks of that length, or of a multiple where the store's limits
        want it (`Upload.chunk_bytes`). A chunk may cost a request.
        """

    def list(self, folder: str) -> Sequence[ObjectInfo]:
        """A folder's direct entries, sorted by name; empty when there is no such folder."""

    def list_temporary(self, folder: str) -> Sequence[tuple[str, str]]:
        """What writers have begun in the folder and not finished: the name in the folder (which `delete` takes), and
        the name that the object would have had. Empty where unfinished objects are nobody's but the service's.
        """

    def delete(self, path: str) -> None:
        """Removes an object; fine when it is not there."""

    def delete_folder(self, folder: str) -> None:
        """Removes a folder with all in it; fine when it is not there."""

    def open_file(self, path: str) -> int | None:
        """A read-only file descriptor of the object (the caller closes it), or None where objects are not
        files.

        Raises ObjectNotFound.
        """

    def close(self) -> None:
        """Releases connections and threads."""


Probe = Callable[[str, str], None]
"""Called as `probe(operation, path)` around each effect; tests kill the process there."""
