"""An object as a readable file on this machine, whatever the storage."""

from __future__ import annotations

import os
from concurrent.futures import Executor, wait

from stepfast.errors import ObjectNotFound
from stepfast.layout import CHUNK_BYTES
from stepfast.storage.base import Store
from stepfast.storage.faults import storage_error
from stepfast.storage.localfile import write_at


def object_bytes(store: Store, path: str) -> int:
    """The object's size. Raises ObjectNotFound."""
    folder, _, name = path.rpartition("/")
    for entry in store.list(folder):
        if entry.name == name and not entry.is_folder:
            return entry.size_bytes
    raise ObjectNotFound(f"{store.uri}/{path} is not there")


def download(store: Store, path: str, descriptor: int, executor: Executor) -> int:
    """Fills the file behind the descriptor with the object, in parallel ranges; returns its size.

    Raises ObjectNotFound, StorageError, also where it is this machine's disk that takes no more.
    """
    size = object_bytes(store, path)

    def fetch(begin: int) -> None:
        buffer = memoryview(bytearray(min(CHUNK_BYTES, size - begin)))
        store.read_range(path, begin, buffer)
        write_at(descriptor, begin, buffer)

    try:
        os.ftruncate(descriptor, size)
        fetches = [executor.submit(fetch, begin) for begin in range(0, size, CHUNK_BYTES)]
        try:
            for fetched in fetches:
                fetched.result()
        finally:  # a chunk on its way would land in the file that has the descriptor's number next
            wait([fetched for fetched in fetches if not fetched.cancel()])
    except OSError as error:
        raise storage_error(error, f"write a copy of {path} on this machine") from error
    return size
