"""Retention on a real store, beside steps that are still on their way."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from stepfast import catalog
from stepfast.commit import FileUpload, StepParts, try_commit, write_part
from stepfast.errors import StorageUnavailable, UploadLost
from stepfast.layout import CHUNK_BYTES, FileEntry, Part, data_path, part_path
from stepfast.makingroom import make_room
from stepfast.slot import CONTROL_BYTES, SlotRecord, SlotState, rank_record
from stepfast.storage import Store, open_store
from stepfast_sidecar.persist import JobPersister
from stepfast_sidecar.slotmaps import SlotDamaged, SlotRef


def begin(store: Store, step: int, run: str) -> FileUpload:
    path = data_path(step, run, "state", 0, 1)
    upload = FileUpload(store, "ns/job", path, name="state", rank=0, size_bytes=4)
    upload.put(0, memoryview(b"data"))
    return upload


def finish(store: Store, step: int, run: str, upload: FileUpload) -> None:
    part = Part(
        step=step,
        run=run,
        node=0,
        world_size=1,
        ranks=(0,),
        files=(upload.finish(),),
        saved_time=1.0,
        persisted_time=2.0,
    )
    write_part(store, "ns/job", part)
    assert try_commit(store, "ns/job", step, run) is not None


def test_a_step_that_is_being_uploaded_survives_the_sweep_after_a_newer_commit(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    persister = JobPersister(store, "ns/job")
    older = begin(store, 18, "uid-2")
    finish(store, 20, "uid-2", begin(store, 20, "uid-2"))
    persister.retain(run="uid-2", max_to_keep=5, protected=[])
    finish(store, 18, "uid-2", older)
    assert [found.step for found in catalog.committed_steps(store, "ns/job")] == [18, 20]
    persister.close()


def test_leftovers_of_earlier_attempts_go_with_their_folder(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    persister = JobPersister(store, "ns/job")
    begin(store, 4, "uid-1").finish()
    finish(store, 6, "uid-2", begin(store, 6, "uid-2"))
    persister.retain(run="uid-2", max_to_keep=5, protected=[])
    assert sorted(path.name for path in (tmp_path / "ns" / "job").iterdir()) == ["global_step6"]
    persister.close()


@pytest.mark.parametrize("step", [4, 6], ids=["uncommitted step", "committed step"])
def test_file_that_a_killed_writer_began_goes_with_the_next_commit(tmp_path: Path, step: int) -> None:
    store = open_store(str(tmp_path))
    persister = JobPersister(store, "ns/job")
    begin(store, step, "uid-1")  # and is killed
    if step == 6:
        finish(store, 6, "uid-2", begin(store, 6, "uid-2"))
    alive = begin(store, 5, "uid-2")  # of this run: still on its way
    finish(store, 8, "uid-2", begin(store, 8, "uid-2"))
    persister.retain(run="uid-2", max_to_keep=5, protected=[])
    assert [path.parent.name for path in tmp_path.rglob("*.tmp")] == ["global_step5"]
    alive.abort()
    persister.close()


def test_later_window_of_a_file_that_is_lost_is_refused(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    persister = JobPersister(store, "ns/job")
    slot = tmp_path / "slot"
    slot.write_bytes(bytes(CONTROL_BYTES + 4))
    window = SlotRef(
        path=str(slot),
        seq=1,
        rank=0,
        name="state",
        file_bytes=CHUNK_BYTES + 4,
        window_begin=CHUNK_BYTES,
        window_bytes=4,
    )
    with pytest.raises(UploadLost, match="begin again"):
        persister.persist_window(step=1, run="uid-1", world_size=1, slot=window)
    persister.close()


def test_file_that_a_killed_persister_began_gives_its_room_to_the_next_try(
    tmpfs: Callable[[str], Path], tmp_path: Path
) -> None:
    size = 3 * CHUNK_BYTES
    slot = tmp_path / "slot"
    slot.write_bytes(bytes(CONTROL_BYTES) + bytes(size))
    ref = SlotRef(path=str(slot), seq=1, rank=0, name="state", file_bytes=size, window_begin=0, window_bytes=size)
    store = open_store(str(tmpfs(f"size={size + 2 * CHUNK_BYTES}")))
    killed = store.upload(f"ns/job/{data_path(4, 'uid-1', 'state', 0, 1)}", size)
    (left,) = tmp_path.rglob("*.tmp")
    killed.abort()
    left.write_bytes(bytes(size))  # as a killed process leaves it: no descriptor holds it
    other = store.upload(f"ns/job/{data_path(4, 'uid-1', 'state', 1, 2)}", 1)  # somebody else's, still on its way
    persister = JobPersister(store, "ns/job")
    with pytest.raises(SlotDamaged):  # the file's control page says nothing; there was room until then
        persister.persist(
            step=4,
            run="uid-1",
            node=0,
            world_size=1,
            replicated="",
            saved_time=1.0,
            ranks=[0],
            slots=[ref],
            streamed=[],
        )
    other.put(0, memoryview(b"x"))
    other.finish()
    persister.close()


def test_no_part_names_a_rank_of_which_no_file_is_there(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    persister = JobPersister(store, "ns/job")
    with pytest.raises(SlotDamaged, match=r"no file is left of ranks \[0, 1\]"):
        persister.persist(
            step=4, run="uid-1", node=0, world_size=2, replicated="", saved_time=1.0, ranks=[0, 1], slots=[],
            streamed=[],
        )  # fmt: skip
    assert list(tmp_path.rglob("*.json")) == []
    persister.close()


def leave(store: Store, step: int, run: str, *, ranks: tuple[int, ...] = (0,), size_bytes: int = 4) -> None:
    """What a node of a gang of two ranks has persisted."""
    files = []
    for rank in ranks:
        path = data_path(step, run, "model", rank, 2)
        upload = FileUpload(store, "ns/job", path, name="model", rank=rank, size_bytes=size_bytes)
        upload.put(0, memoryview(bytes(size_bytes)))
        files.append(upload.finish())
    part = Part(
        step=step, run=run, node=ranks[0], world_size=2, ranks=ranks, files=tuple(files), saved_time=1.0,
        persisted_time=2.0,
    )  # fmt: skip
    write_part(store, "ns/job", part)


def staged(
    folder: Path, step: int, run: str, rank: int, *, file_bytes: int = 4, window_bytes: int | None = None
) -> SlotRef:
    """A slot that holds the rank's file of the step, or its first window."""
    window = file_bytes if window_bytes is None else window_bytes
    record = SlotRecord(
        seq=1, state=SlotState.STAGED, run=run, step=step, name="state", rank=rank, world_size=2, node=0,
        file_bytes=file_bytes, window_begin=0, window_bytes=window, files=1, saved_time=1.0,
    )  # fmt: skip
    place, page = rank_record(record)
    slot = folder / f"slot-{rank}"
    slot.write_bytes((bytes(place) + page).ljust(CONTROL_BYTES, b"\0") + bytes(window))
    return SlotRef(
        path=str(slot), seq=1, rank=rank, name="state", file_bytes=file_bytes, window_begin=0, window_bytes=window
    )


def left_of(root: Path, run: str) -> list[str]:
    return sorted(path.name for path in root.rglob(f"*{run}.*"))


@pytest.mark.parametrize("left", ["part", "temporary file"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "in windows"])
def test_full_storage_is_given_room_by_what_an_earlier_attempt_left_unfinished(
    tmpfs: Callable[[str], Path], tmp_path: Path, left: str, is_streamed: bool
) -> None:
    size = 3 * CHUNK_BYTES
    root = tmpfs(f"size={size + 2 * CHUNK_BYTES}")
    store = open_store(str(root))
    if left == "part":
        leave(store, 4, "uid-1", size_bytes=size)
    else:
        killed = store.upload(f"ns/job/{data_path(4, 'uid-1', 'state', 0, 2)}", size)
        (temporary,) = root.rglob("*.tmp")
        killed.abort()
        temporary.write_bytes(bytes(size))  # as a killed process leaves it: no descriptor holds it
    window = 2 * CHUNK_BYTES if is_streamed else size
    ref = staged(tmp_path, 4, "uid-2", 0, file_bytes=size, window_bytes=window)
    persister = JobPersister(store, "ns/job", settle_seconds=0)
    if is_streamed:
        assert persister.persist_window(step=4, run="uid-2", world_size=1, slot=ref) is None
    else:
        persister.persist(
            step=4, run="uid-2", node=0, world_size=1, replicated="", saved_time=1.0, ranks=[0], slots=[ref],
            streamed=[],
        )  # fmt: skip
        assert try_commit(store, "ns/job", 4, "uid-2") is not None
    assert left_of(root, "uid-1") == []
    persister.close()


@pytest.mark.parametrize(
    ("run", "ranks", "spared"),
    [("uid-1", (0, 1), ()), ("uid-1", (0,), ("uid-1",)), ("uid-2", (0,), ()), ("other-1", (0,), ())],
    ids=["whole: anybody may commit it", "on its way", "of the same attempt", "of another job"],
)
def test_what_may_still_be_committed_makes_no_room(
    tmp_path: Path, run: str, ranks: tuple[int, ...], spared: tuple[str, ...]
) -> None:
    store = open_store(str(tmp_path))
    leave(store, 4, run, ranks=ranks)
    begin(store, 5, "uid-1").finish()  # of a node that has yet to write its part
    assert not make_room(store, "ns/job", run="uid-2", spared=spared, settle_seconds=0)
    assert len(left_of(tmp_path / "ns" / "job" / "global_step4", run)) == len(ranks) + 1
    assert len(left_of(tmp_path / "ns" / "job" / "global_step5", "uid-1")) == 1


def test_step_that_is_committed_while_room_is_made_keeps_its_files(tmp_path: Path) -> None:
    store, seen = open_store(str(tmp_path)), StepParts(open_store(str(tmp_path)), "ns/job", 4, "uid-1")
    leave(store, 4, "uid-1", ranks=(0,))

    def commit(seconds: float) -> None:
        assert try_commit(store, "ns/job", 4, "uid-1", seen) is not None

    def look(operation: str, path: str) -> None:
        """Another node writes the last part, and a third has seen both, before the first one goes."""
        if operation == "delete:before" and not seen.are_complete:
            leave(store, 4, "uid-1", ranks=(1,))
            seen.look()

    assert not make_room(open_store(str(tmp_path), probe=look), "ns/job", run="uid-2", settle_seconds=9, sleep=commit)
    assert len(list(catalog.verify_step(store, "ns/job", 4))) == 2


def test_step_that_made_room_is_committed_by_nobody_who_saw_its_parts_before(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    seen = StepParts(store, "ns/job", 4, "uid-1")
    leave(store, 4, "uid-1", ranks=(0,))
    assert try_commit(store, "ns/job", 4, "uid-1", seen) is None
    assert make_room(store, "ns/job", run="uid-2", settle_seconds=0)
    leave(store, 4, "uid-1", ranks=(1,))
    assert try_commit(store, "ns/job", 4, "uid-1", seen) is None


def sweep(uri: str) -> None:
    """A later attempt commits step 20, and has what is older swept."""
    store = open_store(uri)
    finish(store, 20, "uid-2", begin(store, 20, "uid-2"))
    catalog.retain(store, "ns/job", run="uid-2", max_to_keep=5, protected=[])


def persist_18(persister: JobPersister, slots: list[SlotRef], streamed: Sequence[FileEntry] = ()) -> None:
    persister.persist(
        step=18, run="uid-1", node=0, world_size=2, replicated="", saved_time=1.0, ranks=[0, 1], slots=slots,
        streamed=streamed,
    )  # fmt: skip
    assert persister.commit(step=18, run="uid-1", may_write=True) is not None


@pytest.mark.parametrize(("kind", "after"), [("objects", 1), ("objects", 2), ("files", 2)])
def test_files_that_a_later_attempt_swept_are_uploaded_anew_before_a_part_names_them(
    tmp_path: Path, kind: str, after: int
) -> None:
    uri = str(tmp_path / "storage") if kind == "files" else f"memory://{uuid.uuid4().hex}"
    finished, finishing = list[str](), threading.Lock()

    def probe(operation: str, path: str) -> None:
        if operation == "upload.finish:before":
            finishing.acquire()
        elif operation == "upload.finish:after":
            finished.append(path)
            if len(finished) == after:
                sweep(uri)
            finishing.release()

    store = open_store(uri, probe=probe)
    persister, slots = JobPersister(store, "ns/job"), [staged(tmp_path, 18, "uid-1", rank) for rank in (0, 1)]
    with pytest.raises(StorageUnavailable, match=r"state-0000.-of-00002-uid-1"):
        persist_18(persister, slots)
    assert [found.step for found in catalog.committed_steps(store, "ns/job")] == [20]
    persist_18(persister, slots)
    assert [found.step for found in catalog.committed_steps(store, "ns/job")] == [18, 20]
    assert len(list(catalog.verify_step(store, "ns/job", 18))) == 2
    assert len(finished) == 2 + after  # what is there still is not uploaded again
    persister.close()


def test_step_of_which_a_streamed_file_was_swept_is_given_up(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "storage"))
    persister, slot = JobPersister(store, "ns/job"), staged(tmp_path, 18, "uid-1", 0)
    file = persister.persist_window(step=18, run="uid-1", world_size=2, slot=slot)
    assert file is not None
    sweep(str(tmp_path / "storage"))
    with pytest.raises(SlotDamaged, match=r"no more of rank 0: .*state-00000-of-00002-uid-1"):
        persist_18(persister, [staged(tmp_path, 18, "uid-1", 1)], [file])
    assert [found.step for found in catalog.committed_steps(store, "ns/job")] == [20]
    persister.close()


@pytest.mark.parametrize("is_seen", [True, False], ids=["who has seen all parts commits it", "the last part comes"])
def test_step_that_somebody_completes_while_it_is_swept_keeps_its_files(tmp_path: Path, is_seen: bool) -> None:
    store, seen = open_store(str(tmp_path)), StepParts(open_store(str(tmp_path)), "ns/job", 18, "uid-1")
    leave(store, 18, "uid-1", ranks=(0,))
    if is_seen:
        leave(store, 18, "uid-1", ranks=(1,))
        seen.look()

    def complete(operation: str, path: str) -> None:
        if (operation, path) != ("delete:after", f"ns/job/{part_path(18, 'uid-1', 0)}"):
            return
        if is_seen:
            assert try_commit(store, "ns/job", 18, "uid-1", seen) is not None
        else:
            leave(store, 18, "uid-1", ranks=(1,))

    finish(store, 20, "uid-2", begin(store, 20, "uid-2"))
    swept = open_store(str(tmp_path), probe=complete)
    catalog.retain(swept, "ns/job", run="uid-2", max_to_keep=5, protected=[])
    assert try_commit(store, "ns/job", 18, "uid-1") is not None
    assert len(list(catalog.verify_step(store, "ns/job", 18))) == 2


def test_parts_of_a_step_that_is_swept_go_before_its_files(tmp_path: Path) -> None:
    leave(open_store(str(tmp_path)), 18, "uid-1", ranks=(0,))
    leave(open_store(str(tmp_path)), 18, "uid-1", ranks=(1,))
    deleted: list[str] = []

    def note(operation: str, path: str) -> None:
        if operation == "delete:before":
            deleted.append(path.rpartition("/")[2])

    store = open_store(str(tmp_path), probe=note)
    finish(store, 20, "uid-2", begin(store, 20, "uid-2"))
    catalog.retain(store, "ns/job", run="uid-2", max_to_keep=5, protected=[])
    assert [name.partition("-")[0] for name in deleted] == ["part", "part", "model", "model"]
    assert left_of(tmp_path, "uid-1") == []
