"""Copies of a storage's objects on a node: made once, and not for ever."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from eventual import wait_until
from stepfast.errors import ObjectNotFound, StorageFull, StorageUnavailable
from stepfast.layout import CHUNK_BYTES, data_path, manifest_path
from stepfast.storage import Store, open_store
from stepfast_sidecar.copies import Copies
from stepfast_sidecar.persist import UPLOAD_THREADS, JobPersister

FILE = data_path(5, "uid-1", "state", 0, 1)
DATA = bytes(range(256)) * 1000
SECONDS = 30


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    made = open_store(f"memory://copies/{request.node.name}")
    made.replace(f"job/{FILE}", DATA)
    yield made
    made.close()


class HeldStore:
    """A storage of which rank files are read once `gate` opens; a read that begins while it `is_down` fails then."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.gate = threading.Event()
        self.is_down = False
        self.asked, self.reading = threading.Semaphore(0), threading.Semaphore(0)  # calls so far

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def open_file(self, path: str) -> int | None:
        self.asked.release()
        return self._store.open_file(path)

    def read_range(self, path: str, offset: int, buffer: memoryview) -> None:
        if path.endswith(FILE):
            is_down = self.is_down
            self.reading.release()
            assert self.gate.wait(SECONDS)
            if is_down:
                raise StorageUnavailable(f"read {path}: it is down")
        self._store.read_range(path, offset, buffer)


@pytest.fixture
def held(store: Store) -> HeldStore:
    return HeldStore(store)


@pytest.fixture
def callers(held: HeldStore) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads
        held.gate.set()


@pytest.fixture
def make(store: Store, tmp_path: Path) -> Iterator[Callable[..., Copies]]:
    made = []
    with ThreadPoolExecutor(2) as threads:

        def copies(of: Any = store, **settings: Any) -> Copies:
            settings = {"spool_folder": str(tmp_path), **settings}
            made.append(Copies(of, "job", threads, foresee_threads=threads, **settings))
            return made[-1]

        yield copies
        for one in made:
            one.close()
    assert not _held_in(tmp_path)


def _held_in(folder: Path) -> list[str]:
    """The nameless files there that this process holds open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            target = os.readlink(link)
            found += [target] if target.startswith(str(folder)) else []
    return found


def test_file_is_copied_once_for_all_that_ask(make: Callable[..., Copies], store: Store) -> None:
    copies = make()
    copies.foresee(FILE)
    store.delete(f"job/{FILE}")
    with ThreadPoolExecutor(8) as ranks:
        found = {one.result() for one in [ranks.submit(copies.open_path, FILE) for _ in range(16)]}
    ((path, size),) = found
    assert (Path(path).read_bytes(), size) == (DATA, len(DATA))


def test_record_is_read_anew_each_time(make: Callable[..., Copies], store: Store) -> None:
    copies = make()
    for text in (b"one", b"another"):
        store.replace(f"job/{manifest_path(5)}", text)
        path, size = copies.open_path(manifest_path(5))
        assert Path(path).read_bytes()[:size] == text


@pytest.mark.parametrize(
    ("is_asked_for", "seconds"),
    [(False, {"foreseen_seconds": 0.1}), (True, {"asked_seconds": 0.1, "foreseen_seconds": 600.0})],
    ids=["not asked for", "asked for"],
)
def test_copy_is_let_go_after_a_while(
    make: Callable[..., Copies], tmp_path: Path, is_asked_for: bool, seconds: dict[str, float]
) -> None:
    copies = make(**seconds)
    copies.foresee(FILE)
    if is_asked_for:
        copies.open_path(FILE)
    wait_until(lambda: not _held_in(tmp_path), "the copy is let go", SECONDS)
    assert copies.open_path(FILE)[1] == len(DATA)  # made again


def test_copy_that_failed_is_tried_again(make: Callable[..., Copies], store: Store) -> None:
    copies = make()
    store.delete(f"job/{FILE}")
    with pytest.raises(ObjectNotFound):
        copies.foresee(FILE)
    store.replace(f"job/{FILE}", DATA)
    assert Path(copies.open_path(FILE)[0]).read_bytes() == DATA


def test_rank_that_asks_is_not_failed_by_what_was_foreseen(
    make: Callable[..., Copies], held: HeldStore, callers: ThreadPoolExecutor
) -> None:
    copies = make(held)
    held.is_down = True
    foreseen = callers.submit(copies.foresee, FILE)
    assert held.asked.acquire(timeout=SECONDS)
    assert held.reading.acquire(timeout=SECONDS)
    asked = callers.submit(copies.open_path, FILE)
    assert held.asked.acquire(timeout=SECONDS)
    held.is_down = False
    held.gate.set()
    with pytest.raises(StorageUnavailable):
        foreseen.result(SECONDS)
    assert Path(asked.result(SECONDS)[0]).read_bytes() == DATA


def test_record_waits_for_nothing_that_is_foreseen(
    held: HeldStore, callers: ThreadPoolExecutor, tmp_path: Path
) -> None:
    data = bytes((2 * UPLOAD_THREADS) * CHUNK_BYTES)
    held.replace(f"job/{FILE}", data)
    held.replace(f"job/{manifest_path(5)}", b"1")
    persister = JobPersister(held, "job", spool_folder=str(tmp_path))
    foreseen = callers.submit(persister.foresee, FILE)
    assert held.reading.acquire(timeout=SECONDS)
    try:
        record = callers.submit(persister.fetch, manifest_path(5)).result(SECONDS)
        assert Path(record["path"]).read_bytes() == b"1"
        assert not foreseen.done()
    finally:
        held.gate.set()
    file = callers.submit(persister.fetch, FILE)  # joins it
    assert Path(file.result(SECONDS)["path"]).stat().st_size == len(data)
    persister.close()


def test_file_of_a_folder_is_read_ahead_to_its_end(tmp_path: Path) -> None:
    folder_store = open_store(tmp_path.as_uri())
    folder_store.replace(f"job/{FILE}", os.urandom(64 << 20))  # more than any device's window
    file = tmp_path / "job" / FILE
    if _file_system(file) == "tmpfs":
        pytest.skip(f"NOT TESTED HERE: a file that is read ahead: {file} lies in memory. Give --basetemp on a disk")

    def is_evicted() -> bool:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return _cached_bytes(file) == 0

    wait_until(is_evicted, "the file leaves the page cache", SECONDS)
    with ThreadPoolExecutor(1) as threads:
        copies = Copies(folder_store, "job", threads, foresee_threads=threads)
        copies.foresee(FILE)
        wait_until(lambda: _cached_bytes(file) == file.stat().st_size, "all of the file is in the page cache", SECONDS)
        copies.close()
    folder_store.close()


def _file_system(file: Path) -> str:
    command = ["stat", "--file-system", "--format=%T", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _cached_bytes(file: Path) -> int:
    command = ["fincore", "--bytes", "--raw", "--noheadings", "--output=RES", str(file)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


class HalfDeadStore(HeldStore):
    """The first chunk fails once the second is on its way, which comes a little after the download has failed."""

    reads_under_way = 0

    def read_range(self, path: str, offset: int, buffer: memoryview) -> None:
        if offset == 0:
            assert self.reading.acquire(timeout=SECONDS)
            raise StorageUnavailable(f"read {path}: it is down")
        self.reads_under_way += 1
        self.reading.release()
        self.gate.wait(0.5)
        self.reads_under_way -= 1


def test_download_that_failed_writes_no_more(make: Callable[..., Copies], store: Store) -> None:
    """A chunk that is still on its way would land in the file that has the descriptor's number next."""
    store.replace(f"job/{FILE}", bytes(2 * CHUNK_BYTES))
    half_dead = HalfDeadStore(store)
    with pytest.raises(StorageUnavailable):
        make(half_dead).open_path(FILE)
    assert half_dead.reads_under_way == 0


@pytest.mark.parametrize("size_bytes", [2_000_000, 20_000_000], ids=["a chunk", "several"])
@pytest.mark.parametrize("ask", [Copies.open_path, Copies.foresee], ids=["asked for", "foreseen"])
def test_full_disk_of_the_node_is_storage_full(
    make: Callable[..., Copies],
    store: Store,
    tmpfs: Callable[[str], Path],
    ask: Callable[[Copies, str], object],
    size_bytes: int,
) -> None:
    store.replace(f"job/{FILE}", bytes(size_bytes))
    copies = make(spool_folder=str(tmpfs("size=1m")))
    with pytest.raises(StorageFull, match=FILE):
        ask(copies, FILE)


OTHER = data_path(5, "uid-1", "state", 1, 2)


def test_what_nobody_asks_for_makes_room_for_what_a_rank_does(
    make: Callable[..., Copies], store: Store, tmpfs: Callable[[str], Path]
) -> None:
    data = os.urandom(2_000_000)
    for path in (FILE, OTHER):
        store.replace(f"job/{path}", data)
    copies = make(spool_folder=str(tmpfs("size=3m")))
    copies.foresee(FILE)
    found, _ = copies.open_path(OTHER)
    copies.foresee(FILE)  # does not take that room
    assert Path(found).read_bytes() == data


def test_room_that_was_made_is_not_taken_from_a_rank(
    make: Callable[..., Copies], store: Store, tmpfs: Callable[[str], Path]
) -> None:
    for path in (FILE, OTHER):
        store.replace(f"job/{path}", bytes(2_000_000))
    copies = make(spool_folder=str(tmpfs("size=3m")))
    copies.foresee(FILE)
    found, _ = copies.open_path(FILE)
    with pytest.raises(StorageFull):
        copies.open_path(OTHER)
    assert Path(found).stat().st_size == 2_000_000


class HalfHeldStore(HeldStore):
    """A storage of which all but the first chunk of a rank's file is read once `gate` opens."""

    def read_range(self, path: str, offset: int, buffer: memoryview) -> None:
        if offset:
            super().read_range(path, offset, buffer)
        else:
            self._store.read_range(path, offset, buffer)
            self.reading.release()


def test_what_nobody_asks_for_makes_room_once_it_is_there(
    make: Callable[..., Copies], store: Store, callers: ThreadPoolExecutor, tmpfs: Callable[[str], Path]
) -> None:
    store.replace(f"job/{FILE}", bytes(CHUNK_BYTES + (1 << 20)))
    store.replace(f"job/{OTHER}", bytes(CHUNK_BYTES))
    half_held = HalfHeldStore(store)
    spool = tmpfs(f"size={CHUNK_BYTES + (2 << 20)}")
    copies = make(half_held, spool_folder=str(spool))
    foreseeing = callers.submit(copies.foresee, FILE)
    try:
        wait_until(lambda: _used_bytes(spool) >= CHUNK_BYTES, "half of it is there", SECONDS)
        asking = callers.submit(copies.open_path, OTHER)
        with pytest.raises(TimeoutError):
            asking.result(0.5)
    finally:
        half_held.gate.set()
    foreseeing.result(SECONDS)
    assert asking.result(SECONDS)[1] == CHUNK_BYTES


def _used_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def test_folder_of_copies_that_is_gone_does_not_say_that_the_object_is(
    make: Callable[..., Copies], tmp_path: Path
) -> None:
    with pytest.raises(StorageUnavailable, match=FILE):
        make(spool_folder=str(tmp_path / "gone")).open_path(FILE)
