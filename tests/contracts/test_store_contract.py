"""What every store promises: on a file system, fsspec's memory and its streams, and Azurite."""

from __future__ import annotations

import mmap
import os
import random
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stepfast.errors import ObjectNotFound, StorageForbidden
from stepfast.layout import CHUNK_BYTES
from stepfast.storage import Store, open_store


def _file(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store((tmp_path / "root").as_uri())


def _memory(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(f"memory://{uuid.uuid4().hex}/root")


def _azure(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    azurite = request.getfixturevalue("azurite")
    options = {"connection_string": azurite.connection_string()}
    return open_store(f"abfs://{azurite.new_container()}/root", options=options)


def _streams(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(f"local://{tmp_path}/root")  # as fsspec sees files: a stream that is committed at its end


_STORES: dict[str, Callable[[pytest.FixtureRequest, Path], Store]] = {
    "file": _file,
    "memory": _memory,
    "azurite": _azure,
    "streams": _streams,
}


@pytest.fixture(params=_STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    opened = _STORES[request.param](request, tmp_path)
    yield opened
    opened.close()


@pytest.fixture(params=[name for name in _STORES if name != "streams"])
def exact_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """Stores whose `create` is exact."""
    opened = _STORES[request.param](request, tmp_path)
    yield opened
    opened.close()


def pages(size_bytes: int) -> memoryview:
    """Random bytes where slots have theirs: in page-aligned, writable memory."""
    memory = mmap.mmap(-1, max(size_bytes, 1))
    memory.write(random.Random(size_bytes).randbytes(size_bytes))
    return memoryview(memory)[:size_bytes]


def chunks(data: memoryview, chunk_bytes: int) -> list[tuple[int, memoryview]]:
    return [(offset, data[offset : offset + chunk_bytes]) for offset in range(0, len(data), chunk_bytes)]


def upload(store: Store, path: str, data: memoryview) -> None:
    begun = store.upload(path, len(data))
    for offset, chunk in chunks(data, begun.chunk_bytes):
        begun.put(offset, chunk)
    begun.finish()


def test_created_object_is_read_back(store: Store) -> None:
    assert store.create("a/b/manifest.json", b"{}") is True
    assert store.read("a/b/manifest.json") == b"{}"


def test_create_leaves_an_existing_object_alone(store: Store) -> None:
    assert store.create("a/x", b"first")
    assert store.create("a/x", b"second") is False
    assert store.create("a/x", b"first") is False
    assert store.read("a/x") == b"first"


def test_of_concurrent_creates_exactly_one_wins_and_readers_see_it_whole(exact_store: Store) -> None:
    for round_number in range(3):
        path, start = f"folder{round_number}/manifest.json", threading.Barrier(8)
        contents = [bytes([writer]) * 50_000 for writer in range(8)]

        def create(writer: int, path: str = path, start: threading.Barrier = start) -> bool:
            start.wait(30)
            return exact_store.create(path, bytes([writer]) * 50_000)

        with ThreadPoolExecutor(8) as threads:
            won = list(threads.map(create, range(8)))
        assert won.count(True) == 1
        assert exact_store.read(path) == contents[won.index(True)]


def test_equal_bytes_of_two_writers_are_still_one_creation(exact_store: Store) -> None:
    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(lambda _: exact_store.create("same", b"same"), range(8)))
    assert won.count(True) == 1


def test_replace_makes_and_overwrites(store: Store) -> None:
    store.replace("histories.csv", b"one")
    store.replace("histories.csv", b"three")
    assert store.read("histories.csv") == b"three"


@pytest.mark.parametrize(
    "size_bytes",
    [0, 1, 4096, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 4097],
    ids=["empty", "1 byte", "1 page", "1 chunk", "1 chunk and 1 byte", "3 chunks, unaligned end"],
)
def test_upload_in_any_order_from_several_threads_is_read_back(store: Store, size_bytes: int) -> None:
    data = pages(size_bytes)
    begun = store.upload("step/data.bin", size_bytes)
    order = chunks(data, begun.chunk_bytes)
    random.Random(7).shuffle(order)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda chunk: begun.put(*chunk), order))
    assert list(store.list("step")) == []
    begun.finish()
    begun.abort()
    assert store.read("step/data.bin") == bytes(data)
    assert [(info.name, info.size_bytes) for info in store.list("step")] == [("data.bin", size_bytes)]


def test_chunks_may_be_put_again(store: Store) -> None:
    data = pages(CHUNK_BYTES + 5)
    begun = store.upload("x", len(data))
    for offset, chunk in chunks(data, begun.chunk_bytes) * 2:
        begun.put(offset, chunk)
    begun.finish()
    assert store.read("x") == bytes(data)


def test_read_only_and_unaligned_memory_is_uploaded_too(store: Store) -> None:
    data = random.Random(1).randbytes(CHUNK_BYTES + 4096)
    upload(store, "read-only", memoryview(data))
    upload(store, "unaligned", memoryview(bytearray(data))[1:])
    assert store.read("read-only") == data
    assert store.read("unaligned") == data[1:]


def test_upload_replaces_what_was_there(store: Store) -> None:
    upload(store, "x", pages(2 * CHUNK_BYTES))
    upload(store, "x", pages(10))
    assert store.read("x") == bytes(pages(10))


def test_aborted_upload_leaves_nothing_visible(store: Store) -> None:
    store.replace("kept/other", b"")
    begun = store.upload("kept/x", CHUNK_BYTES + 1)
    begun.put(0, pages(CHUNK_BYTES))
    begun.abort()
    begun.abort()
    assert [info.name for info in store.list("kept")] == ["other"]
    with pytest.raises(ObjectNotFound):
        store.read("kept/x")


def test_incomplete_upload_cannot_be_finished(store: Store) -> None:
    begun = store.upload("x", CHUNK_BYTES + 1)
    begun.put(0, pages(CHUNK_BYTES))
    with pytest.raises(ValueError, match="never put"):
        begun.finish()
    with pytest.raises(ValueError, match="no chunk"):
        begun.put(1, pages(1))
    begun.abort()


def test_list_shows_direct_entries_sorted_by_name(store: Store) -> None:
    for path in ["job/b", "job/a", "job/step10/x", "job/step1/y/z", "other", "job2/c"]:
        store.replace(path, b"12")
    seen = [(info.name, info.size_bytes, info.is_folder) for info in store.list("job")]
    assert seen == [("a", 2, False), ("b", 2, False), ("step1", 0, True), ("step10", 0, True)]
    assert [info.name for info in store.list("")] == ["job", "job2", "other"]


@pytest.mark.parametrize("folder", ["", "nothing", "nothing/here"], ids=["root", "folder", "nested"])
def test_list_of_a_missing_folder_is_empty(store: Store, folder: str) -> None:
    assert list(store.list(folder)) == []


def test_list_is_never_stale(store: Store) -> None:
    store.replace("f/a", b"")
    assert [info.name for info in store.list("f")] == ["a"]
    store.replace("f/b", b"")
    assert [info.name for info in store.list("f")] == ["a", "b"]
    store.delete("f/a")
    assert [info.name for info in store.list("f")] == ["b"]


def test_delete_is_idempotent(store: Store) -> None:
    store.replace("f/a", b"1")
    store.delete("f/a")
    store.delete("f/a")
    store.delete("never/was")
    with pytest.raises(ObjectNotFound, match="f/a"):
        store.read("f/a")
    assert store.create("f/a", b"2")


def test_delete_folder_removes_all_under_it_and_nothing_else(store: Store) -> None:
    for path in ["s/step5/a", "s/step5/deep/er/b", "s/step50/c"]:
        store.replace(path, b"1")
    store.delete_folder("s/step5")
    store.delete_folder("s/step5")
    store.delete_folder("never")
    assert [info.name for info in store.list("s")] == ["step50"]
    assert list(store.list("s/step5/deep")) == []
    assert store.create("s/step5/a", b"again")


def test_range_is_read_into_the_buffer(store: Store) -> None:
    data = pages(CHUNK_BYTES + 100)
    upload(store, "x", data)
    buffer = bytearray(1000)
    store.read_range("x", CHUNK_BYTES - 900, memoryview(buffer))
    assert bytes(buffer) == bytes(data[CHUNK_BYTES - 900 : CHUNK_BYTES + 100])
    store.read_range("x", 3, memoryview(buffer)[:0])


@pytest.mark.parametrize("offset", [5, 10, 1_000_000], ids=["across the end", "at the end", "beyond"])
def test_range_past_the_end_is_an_error_that_names_the_object(store: Store, offset: int) -> None:
    store.replace("f/short", b"0123456789")
    with pytest.raises(ObjectNotFound, match="f/short"):
        store.read_range("f/short", offset, memoryview(bytearray(6)))


def test_missing_objects_are_not_found(store: Store) -> None:
    with pytest.raises(ObjectNotFound, match="no/such"):
        store.read("no/such")
    with pytest.raises(ObjectNotFound, match="no/such"):
        store.read_range("no/such", 0, memoryview(bytearray(1)))
    with pytest.raises(ObjectNotFound, match="no/such"):
        store.read_range("no/such", 0, memoryview(bytearray(0)))


def test_open_file_is_a_descriptor_or_none(store: Store) -> None:
    store.replace("x", b"data")
    descriptor = store.open_file("x")
    if store.uri.startswith("file:"):
        assert descriptor is not None
        assert os.pread(descriptor, 10, 0) == b"data"
        os.close(descriptor)
        with pytest.raises(ObjectNotFound):
            store.open_file("missing")
    else:
        assert descriptor is None


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "a//b", ".", "a/", ""], ids=repr)
def test_paths_out_of_the_root_are_refused(store: Store, path: str) -> None:
    with pytest.raises(StorageForbidden):
        store.create(path, b"")
    with pytest.raises(StorageForbidden):
        store.upload(path, 1)
    with pytest.raises(StorageForbidden):
        store.delete(path)
    with pytest.raises(StorageForbidden):
        store.read(path)


def test_root_is_never_deleted(store: Store) -> None:
    with pytest.raises(StorageForbidden, match="root"):
        store.delete_folder("")
