"""Retention on a real store, beside steps that are still on their way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stepfast import catalog
from stepfast.commit import FileUpload, try_commit, write_part
from stepfast.errors import UploadLost
from stepfast.layout import CHUNK_BYTES, Part, data_path
from stepfast.slot import CONTROL_BYTES
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
