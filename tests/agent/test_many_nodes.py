"""What a commit asks of the storage when a gang has many nodes: each part is read once, and not by everybody."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from stepfast.commit import FileUpload, StepParts, try_commit, write_part
from stepfast.layout import Part, data_path, manifest_of
from stepfast.storage import Store, open_store
from stepfast_sidecar.commits import longest_pause_seconds, turn_seconds

FOLDER, STEP, RUN, NODES = "ns/job", 5, "uid-1", 4


class Counting:
    """A store that counts what is read."""

    def __init__(self, store: Store) -> None:
        self.store, self.reads = store, Counter[str]()

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)

    def read(self, path: str) -> bytes:
        self.reads[path.rpartition("/")[2]] += 1
        return self.store.read(path)


@pytest.fixture
def store(tmp_path: Path) -> Counting:
    return Counting(open_store(tmp_path.as_uri()))


def write_file(store: Counting, node: int) -> Part:
    path = data_path(STEP, RUN, "state", node, NODES)
    upload = FileUpload(store, FOLDER, path, name="state", rank=node, size_bytes=3)  # type: ignore[arg-type]  # counts
    upload.put(0, memoryview(b"abc"))
    return Part(
        step=STEP, run=RUN, node=node, world_size=NODES, ranks=(node,), files=(upload.finish(),),
        saved_time=1.0 + node, persisted_time=2.0 + node,
    )  # fmt: skip


def commit(store: Counting, parts: StepParts | None = None, *, is_eager: bool = True) -> bool:
    return try_commit(store, FOLDER, STEP, RUN, parts, is_eager=is_eager) is not None  # type: ignore[arg-type]


def test_leader_reads_each_part_once_however_often_it_looks(store: Counting) -> None:
    seen = StepParts(store, FOLDER, STEP, RUN)  # type: ignore[arg-type]  # counts
    written = []
    for node in range(NODES):
        assert not commit(store, seen)
        part = write_file(store, node)
        written.append(part)
        write_part(store, FOLDER, part)  # type: ignore[arg-type]  # counts
    assert commit(store, seen)
    assert {name: count for name, count in store.reads.items() if name.startswith("part-")} == {
        part.path.rpartition("/")[2]: 1 for part in written
    }
    manifest = manifest_of(written)
    assert manifest is not None
    assert store.store.read(f"{FOLDER}/global_step5/manifest.json") == manifest.to_bytes()


def test_others_read_nothing_while_a_file_is_missing(store: Counting) -> None:
    for node in range(NODES - 1):
        write_part(store, FOLDER, write_file(store, node))  # type: ignore[arg-type]  # counts
    assert not commit(store, is_eager=False)
    assert not any(name.startswith("part-") for name in store.reads)
    last = write_file(store, NODES - 1)
    assert not commit(store, is_eager=False)
    write_part(store, FOLDER, last)  # type: ignore[arg-type]  # counts
    assert commit(store, is_eager=False)


def test_who_wrote_all_parts_commits_without_looking_and_never_over_another_manifest(store: Counting) -> None:
    seen = StepParts(store, FOLDER, STEP, RUN)  # type: ignore[arg-type]  # counts
    for node in range(NODES):
        assert not commit(store, seen)
        store.reads.clear()
        written = write_part(store, FOLDER, write_file(store, node))  # type: ignore[arg-type]  # counts
        assert written is not None
        seen.note(written)
    assert write_part(store, FOLDER, write_file(store, 0)) is None  # type: ignore[arg-type]  # a part stays
    assert commit(store, seen)
    assert not store.reads

    committed = store.store.read(f"{FOLDER}/global_step5/manifest.json")
    assert commit(store, seen)
    assert store.store.read(f"{FOLDER}/global_step5/manifest.json") == committed


@pytest.mark.parametrize(
    ("node", "seconds"), [(0, 5.0), (1, 5.0), (2, 10.0), (3, 10.0), (4, 20.0), (31, 80.0), (9999, 600.0)]
)
def test_agents_take_their_turn_a_few_at_a_time(node: int, seconds: float) -> None:
    assert turn_seconds(node) == seconds


def test_few_enough_ask_for_the_manifest_at_once() -> None:
    assert longest_pause_seconds(2, leads=False) == longest_pause_seconds(10_000, leads=True) == 2.0
    assert longest_pause_seconds(10_000, leads=False) == 10.0
