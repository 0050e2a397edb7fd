"""Retention on a real store, beside steps that are still on their way."""

from __future__ import annotations

from pathlib import Path

from stepfast import catalog
from stepfast.commit import FileUpload, try_commit, write_part
from stepfast.layout import Part, data_path
from stepfast.storage import Store, open_store
from stepfast_sidecar.persist import JobPersister


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
