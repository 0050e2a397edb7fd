"""The local store on real file systems: full, read-only, with and without O_DIRECT, and killed anywhere."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepfast.errors import StorageForbidden, StorageFull, StorageUnavailable, UploadLost
from stepfast.layout import CHUNK_BYTES
from stepfast.storage import exclusive, open_store
from stepfast.storage.local import LocalStore
from stepfast.storage.localupload import LocalUpload
from stepfast.storage.retry import Retry

QUICK = Retry(deadline_seconds=0.2)
_CHILD = """
import mmap, os, signal, sys
from stepfast.storage import open_store

root, operation, moment, size = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])

def probe(name, path):
    if name == moment:
        os.kill(os.getpid(), signal.SIGKILL)

store = open_store(root, probe=probe)
memory = mmap.mmap(-1, size)
memory.write(b"n" * size)
if operation == "upload":
    upload = store.upload("step/x", size)
    view = memoryview(memory)
    for offset in range(0, size, upload.chunk_bytes):
        upload.put(offset, view[offset : offset + upload.chunk_bytes])
    upload.finish()
else:
    getattr(store, operation)("step/x", *([memory[:]] if operation != "delete" else []))
sys.exit("the probe was never called")
"""


def pages(size_bytes: int, byte: bytes = b"n") -> memoryview:
    memory = mmap.mmap(-1, size_bytes)
    memory.write(byte * size_bytes)
    return memoryview(memory)


def put_all(upload: LocalUpload, data: memoryview) -> None:
    for offset in range(0, len(data), upload.chunk_bytes):
        upload.put(offset, data[offset : offset + upload.chunk_bytes])


def begin(store: LocalStore, path: str, size_bytes: int) -> LocalUpload:
    upload = store.upload(path, size_bytes)
    assert isinstance(upload, LocalUpload)
    return upload


def test_full_file_system_is_storage_full_and_leaves_nothing_behind(tmpfs: Callable[[str], Path]) -> None:
    root = tmpfs("size=1m")
    store = LocalStore(root)
    with pytest.raises(StorageFull, match="step/x"):
        store.create("step/x", b"n" * 2_000_000)
    with pytest.raises(StorageFull):
        store.replace("step/x", b"n" * 2_000_000)
    with pytest.raises(StorageFull):
        put_all(begin(store, "step/x", 2_000_000), pages(2_000_000))
    assert list((root / "step").iterdir()) == []
    assert store.create("step/x", b"small") is True


def test_read_only_file_system_is_storage_forbidden(tmpfs: Callable[[str], Path]) -> None:
    root = tmpfs("size=1m")
    LocalStore(root).create("step/x", b"1")
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
    store = LocalStore(root)
    attempts: list[Callable[[], object]] = [
        lambda: store.create("step/y", b"1"),
        lambda: store.replace("step/x", b"1"),
        lambda: store.upload("step/y", 1),
        lambda: store.delete("step/x"),
        lambda: store.delete_folder("step"),
    ]
    for attempt in attempts:
        with pytest.raises(StorageForbidden):
            attempt()
    assert store.read("step/x") == b"1"
    assert store.create("step/x", b"2") is False


def test_aligned_chunks_bypass_the_page_cache(tmp_path: Path) -> None:
    size_bytes = 2 * CHUNK_BYTES + 4097
    upload = begin(LocalStore(tmp_path), "x", size_bytes)
    put_all(upload, pages(size_bytes))
    upload.finish()
    assert upload.direct_bytes == 2 * CHUNK_BYTES + 4096, "this file system has no O_DIRECT: use a real one"
    assert (tmp_path / "x").read_bytes() == b"n" * size_bytes


def test_chunks_of_a_read_only_mapping_bypass_the_page_cache(tmp_path: Path) -> None:
    """What an agent uploads: it maps the slots of a rank to read them, never to write."""
    (tmp_path / "slot").write_bytes(b"n" * (CHUNK_BYTES + 8192))
    with open(tmp_path / "slot", "rb") as slot, mmap.mmap(slot.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        upload = begin(LocalStore(tmp_path), "x", CHUNK_BYTES)
        with memoryview(mapped) as whole, whole[4096 : 4096 + CHUNK_BYTES] as chunk:
            upload.put(0, chunk)
    upload.finish()
    assert upload.direct_bytes == CHUNK_BYTES
    assert (tmp_path / "x").read_bytes() == b"n" * CHUNK_BYTES


def test_unaligned_chunks_are_written_through_the_page_cache(tmp_path: Path) -> None:
    upload = begin(LocalStore(tmp_path), "x", CHUNK_BYTES)
    upload.put(0, pages(CHUNK_BYTES + 8)[8:])
    upload.finish()
    assert upload.direct_bytes == 0
    assert (tmp_path / "x").read_bytes() == b"n" * CHUNK_BYTES


def test_direct_writes_that_are_refused_go_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite

    def refusing(descriptor: int, data: memoryview, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}") and _is_direct(descriptor):
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", refusing)
    upload = begin(LocalStore(tmp_path), "x", CHUNK_BYTES + 1)
    put_all(upload, pages(CHUNK_BYTES + 1))
    upload.finish()
    assert upload.direct_bytes == 0
    assert (tmp_path / "x").read_bytes() == b"n" * (CHUNK_BYTES + 1)


def test_room_on_the_disk_is_taken_before_the_first_byte(tmp_path: Path) -> None:
    """So that threads write side by side, and a disk that is too full says so at once."""
    upload = begin(LocalStore(tmp_path), "x", 2 * CHUNK_BYTES)
    [temp] = tmp_path.iterdir()
    assert temp.stat().st_blocks * 512 >= 2 * CHUNK_BYTES
    upload.abort()


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL], ids=errno.errorcode.__getitem__)
def test_file_systems_that_reserve_no_room_take_every_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refusing(*_: object) -> int:
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(fallocate=refusing))
    upload = begin(LocalStore(tmp_path), "x", CHUNK_BYTES + 4097)
    monkeypatch.undo()
    put_all(upload, pages(CHUNK_BYTES + 4097))
    upload.finish()
    assert (tmp_path / "x").read_bytes() == b"n" * (CHUNK_BYTES + 4097)


def _is_direct(descriptor: int) -> bool:
    flags = Path(f"/proc/self/fdinfo/{descriptor}").read_text().split("flags:")[1].split()[0]
    return bool(int(flags, 8) & os.O_DIRECT)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT], ids=errno.errorcode.__getitem__)
def test_a_write_error_that_passes_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    fsync, failures = os.fsync, [code, code]

    def failing(descriptor: int) -> None:
        if failures:
            raise OSError(failures.pop(), "injected")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    store = LocalStore(tmp_path)
    assert store.create("a/x", b"1") is True
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["x"]


def syncs_of_which_the_folders_fails_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The descriptors that are synced from now on, as they come."""
    fsync, calls = os.fsync, list[int]()

    def failing(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:  # the folder's, after the object has its name
            raise OSError(errno.EIO, "injected")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    return calls


def test_create_that_fails_after_its_effect_is_still_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    store = LocalStore(tmp_path)
    store.create("a/first", b"")
    calls = syncs_of_which_the_folders_fails_once(monkeypatch)
    assert store.create("a/x", b"1") is True
    assert len(calls) == 3


def test_failed_fsync_of_an_upload_is_never_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = begin(LocalStore(tmp_path), "x", 10)
    upload.put(0, pages(10))
    calls: list[int] = []

    def failing(descriptor: int) -> None:
        calls.append(descriptor)
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(os, "fsync", failing)
    for _ in range(2):
        with pytest.raises(UploadLost):
            upload.finish()
    with pytest.raises(UploadLost):
        upload.put(0, pages(10))
    upload.abort()
    assert len(calls) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has_target", [False, True], ids=["no such object", "another writer's object"])
def test_upload_whose_temporary_file_somebody_removed_is_lost(tmp_path: Path, has_target: bool) -> None:
    store = LocalStore(tmp_path)
    if has_target:
        store.create("x", b"other")
    upload = begin(store, "x", 10)
    upload.put(0, pages(10))
    ((temporary, _),) = store.list_temporary("")
    store.delete(temporary)

    with pytest.raises(UploadLost, match="removed"):
        upload.finish()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == ([b"other"] if has_target else [])


def test_upload_that_has_its_name_is_not_lost_when_its_folder_is_synced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = begin(LocalStore(tmp_path), "x", 10)
    upload.put(0, pages(10))
    calls = syncs_of_which_the_folders_fails_once(monkeypatch)
    upload.finish()
    assert len(calls) == 3
    assert (tmp_path / "x").read_bytes() == bytes(pages(10))


def test_errors_that_last_are_unavailable_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StorageUnavailable, match="attempts"):
        LocalStore(tmp_path, retry=QUICK).create("x", b"1")


@pytest.mark.parametrize("without", ["links", "links and renameat2"])
def test_create_is_exclusive_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    def no_link(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "injected")

    monkeypatch.setattr(os, "link", no_link)
    if without != "links":
        monkeypatch.setattr(exclusive, "_rename", lambda *_: None)
    store, start, won = LocalStore(tmp_path), threading.Barrier(8), []

    def create(writer: int) -> None:
        start.wait(30)
        won.append(store.create("a/x", bytes([writer])))

    threads = [threading.Thread(target=create, args=(writer,)) for writer in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won.count(True) == 1
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["x"]


@pytest.mark.parametrize("existing", [False, True], ids=["new", "over an older one"])
@pytest.mark.parametrize(
    ("operation", "moment", "is_done"),
    [
        ("create", "create:before", False),
        ("create", "create:after", True),
        ("replace", "replace:before", False),
        ("replace", "replace:after", True),
        ("upload", "upload.put:before", False),
        ("upload", "upload.put:after", False),
        ("upload", "upload.finish:before", False),
        ("upload", "upload.finish:after", True),
        ("delete", "delete:before", False),
        ("delete", "delete:after", True),
    ],
)
def test_writer_killed_at_any_effect_leaves_the_old_object_or_the_new(
    tmp_path: Path, operation: str, moment: str, is_done: bool, existing: bool
) -> None:
    store = open_store(str(tmp_path))
    if existing:
        store.replace("step/x", b"old")
    size = CHUNK_BYTES + 5
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, str(tmp_path), operation, moment, str(size)], timeout=180, check=False
    )
    assert child.returncode == -signal.SIGKILL
    after = None if operation == "delete" else b"n" * size
    before = b"old" if existing else None
    if operation == "create" and existing:
        after = before
    found = store.read("step/x") if store.list("step") else None
    assert found == (after if is_done else before)
    store.delete_folder("step")
    assert list(tmp_path.iterdir()) == []


def test_writer_killed_at_random_moments_never_shows_a_torn_object(tmp_path: Path) -> None:
    loop = (
        "import sys\nfrom stepfast.storage import open_store\nstore = open_store(sys.argv[1])\n"
        "print('ready', flush=True)\nnumber = 0\n"
        "while True:\n"
        "    data = bytes([number % 256]) * 300_000\n"
        "    store.create(f'step/c{number}', data)\n"
        "    store.replace('step/r', data)\n"
        "    number += 1\n"
    )
    store = open_store(str(tmp_path))
    for round_number in range(6):
        with subprocess.Popen([sys.executable, "-c", loop, str(tmp_path)], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            seen = 0
            while seen < 3 + round_number:  # wait for progress, not for time
                seen = len(store.list("step"))
            child.kill()
        infos = store.list("step")
        assert infos
        for info in infos:
            data = store.read(f"step/{info.name}")
            assert len(data) == 300_000
            assert len(set(data)) == 1
        store.delete_folder("step")


def test_temporary_files_of_killed_writers_are_not_listed_and_go_with_their_folder(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.upload("step/x", 10)
    assert len(list((tmp_path / "step").iterdir())) == 1
    assert list(store.list("step")) == []
    store.delete_folder("step")
    assert not (tmp_path / "step").exists()


def test_folder_that_is_deleted_while_being_written_into_is_made_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("step/x", b"1")
    LocalStore(tmp_path).delete_folder("step")
    assert store.create("step/x", b"2") is True


def test_symbolic_links_are_removed_and_never_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("1")
    store = LocalStore(tmp_path / "root")
    store.create("step/x", b"1")
    (tmp_path / "root" / "step" / "link").symlink_to(outside)
    store.delete_folder("step")
    assert (outside / "precious").exists()


def test_importing_the_storage_imports_no_third_party_package() -> None:
    code = "import sys, stepfast.storage; print([m for m in ('fsspec', 'azure', 'aiohttp') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_tmpfs_is_written_too() -> None:
    place = Path(tempfile.mkdtemp(prefix="stepfast-test-", dir="/dev/shm"))
    store = LocalStore(place / "storage")
    try:
        upload = begin(store, "step/x", CHUNK_BYTES + 1)
        put_all(upload, pages(CHUNK_BYTES + 1))
        upload.finish()
        assert store.read("step/x") == b"n" * (CHUNK_BYTES + 1)
    finally:
        store.delete_folder("step")
        (place / "storage").rmdir()
        place.rmdir()
