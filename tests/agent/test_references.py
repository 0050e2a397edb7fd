"""Steps that refer to older ones: committed while those are there, kept with them, refused without them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepfast import catalog
from stepfast.catalog import StepReferred
from stepfast.commit import FileUpload, StepParts, try_commit, write_part
from stepfast.errors import CheckpointDamaged, ReferenceMissing
from stepfast.layout import (
    FileEntry,
    Manifest,
    Part,
    RecordInvalid,
    check_manifest,
    data_path,
    manifest_of,
    parse_manifest,
    parse_part,
    superseded_path,
)
from stepfast.messages import Referable, Unreferable
from stepfast.references import REFERRED, Reference, from_metadata, steps_of, to_text
from stepfast.retention import steps_to_remove
from stepfast.storage import Store, open_store
from stepfast.tensorfile import HeaderPlan, TensorSpec
from stepfast_sidecar.persist import JobPersister

JOB = "default/train"
RUN = "uid1-0"


def part(step: int, *, refers: tuple[int, ...] = (), rank: int = 0, world_size: int = 1, run: str = RUN) -> Part:
    path = data_path(step, run, "state", rank, world_size)
    file = FileEntry(path=path, name="state", rank=rank, size_bytes=0, chunk_bytes=8, checksums=())
    return Part(
        step=step, run=run, node=rank, world_size=world_size, ranks=(rank,), files=(file,), saved_time=1.0,
        persisted_time=2.0, refers=refers,
    )  # fmt: skip


def file_of(step: int, references: Mapping[str, Reference]) -> bytes:
    """A file that holds one tensor and leaves others to older steps."""
    constant = {REFERRED: to_text(references)} if references else {}
    plan = HeaderPlan([TensorSpec(name=f"of{step}", dtype="U8", shape=(5,))], constant=constant, variable_bytes=0)
    tail = plan.tail({})
    assert tail is not None
    return plan.prefix + tail + bytes([step % 256]) * 5


def commit(store: Store, step: int, refers: tuple[int, ...] = (), *, run: str = RUN) -> Manifest:
    """A committed step of one rank, whose file refers to those of older ones."""
    there = {f"of{other}": Reference(path=data_path(other, run, "state", 0, 1), name=f"of{other}") for other in refers}
    data, path = file_of(step, there), data_path(step, run, "state", 0, 1)
    upload = FileUpload(store, JOB, path, name="state", rank=0, size_bytes=len(data))
    upload.put(0, memoryview(data))
    write_part(
        store, JOB,
        Part(
            step=step, run=run, node=0, world_size=1, ranks=(0,), files=(upload.finish(),), saved_time=1.0,
            persisted_time=2.0, refers=refers,
        ),
    )  # fmt: skip
    made = try_commit(store, JOB, step, run)
    assert made is not None
    return made


def committed(store: Store) -> list[int]:
    return [found.step for found in catalog.committed_steps(store, JOB)]


# ---------------------------------------------------------------- records


def test_records_without_references_are_what_they_were() -> None:
    assert b"refers" not in part(5).to_bytes()
    manifest = manifest_of([part(5)])
    assert manifest is not None
    assert b"refers" not in manifest.to_bytes()


def test_manifest_refers_to_what_its_parts_refer_to_whoever_writes_it() -> None:
    parts = [part(9, refers=(2, 7), world_size=2), part(9, refers=(2, 3), rank=1, world_size=2)]
    manifest, other = manifest_of(parts), manifest_of([parse_part(one.to_bytes()) for one in reversed(parts)])
    assert manifest is not None
    assert other is not None
    assert manifest.refers == (2, 3, 7)
    assert manifest.to_bytes() == other.to_bytes()
    assert parse_manifest(manifest.to_bytes()) == manifest


@pytest.mark.parametrize("refers", [(9,), (10,), (3, 2), (2, 2), (-1,), (True,), ("2",)])
def test_record_that_refers_to_no_older_steps_in_order_is_refused(refers: Any) -> None:
    with pytest.raises(RecordInvalid, match="refers"):
        parse_part(part(9, refers=refers).to_bytes())


def test_references_come_back_from_a_header() -> None:
    one, other = data_path(5, RUN, "state", 0, 1), data_path(10, RUN, "state", 0, 1)
    references = {"a": Reference(path=one, name="a"), "b#rows=0:3": Reference(path=one, name="c")}
    references["d"] = Reference(path=other, name="d")
    assert from_metadata({REFERRED: to_text(references)}) == references
    assert steps_of(references.values()) == (5, 10)
    assert from_metadata({}) == {}


@pytest.mark.parametrize(
    "text", ["", "[]", "7", '{"global_step5/other": ["a"]}', '{"../../x": ["a"]}', '{"x": 5}', '{"x": [["a"]]}']
)
def test_references_that_nobody_wrote_are_refused(text: str) -> None:
    with pytest.raises(RecordInvalid):
        from_metadata({REFERRED: text})


# ---------------------------------------------------------------- the commit rule


def test_step_is_committed_only_while_what_it_refers_to_is(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    commit(store, 1)
    commit(store, 2)
    commit(store, 3, (1, 2))
    catalog.remove_step(store, JOB, 2)
    with pytest.raises(ReferenceMissing, match=r"step 4 refers to step 2, .* is not committed") as caught:
        commit(store, 4, (1, 2))
    assert caught.value.missing == (2,)
    assert committed(store) == [1, 3]
    commit(store, 2, run="uid1-1")  # of another history
    with pytest.raises(ReferenceMissing):
        try_commit(store, JOB, 4, RUN)
    (tmp_path / JOB / "global_step1" / "manifest.json").write_bytes(b"{}")
    with pytest.raises(ReferenceMissing, match="step 5 refers to step 1"):
        commit(store, 5, (1,))


def test_step_that_was_committed_stays_so_for_whoever_comes_later(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    commit(store, 1)
    manifest = commit(store, 2, (1,))
    catalog.remove_step(store, JOB, 1)
    late = StepParts(store, JOB, 2, RUN)
    late.look()
    assert try_commit(store, JOB, 2, RUN, late) == manifest


# ---------------------------------------------------------------- what is kept


@st.composite
def chains(draw: st.DrawFn) -> dict[int, tuple[int, ...]]:
    """Committed steps, and which older ones each refers to: full ones, as no step refers to one that refers."""
    steps = draw(st.lists(st.integers(1, 60), unique=True, max_size=14).map(sorted))
    chain: dict[int, tuple[int, ...]] = {}
    for step in steps:
        full = [older for older, refers in chain.items() if not refers]
        chain[step] = tuple(sorted(draw(st.sets(st.sampled_from(full), max_size=3)))) if full else ()
    return chain


@settings(max_examples=300)
@given(chain=chains(), max_to_keep=st.integers(0, 8), protected=st.sets(st.integers(1, 60), max_size=3))
def test_nothing_that_a_kept_step_refers_to_is_removed(
    chain: dict[int, tuple[int, ...]], max_to_keep: int, protected: set[int]
) -> None:
    removed = steps_to_remove(list(chain), max_to_keep=max_to_keep, protected=protected, refers=chain)
    kept = [step for step in chain if step not in removed]

    assert all(other in kept for step in kept for other in chain[step])
    assert protected.intersection(chain) <= set(kept)
    newest = sorted(chain)[-max_to_keep:] if max_to_keep else sorted(chain)
    assert set(newest) <= set(kept)
    # And no more than that.
    wanted = set(newest) | protected
    assert set(kept) == {step for step in chain if step in wanted or any(step in chain.get(o, ()) for o in wanted)}


@settings(max_examples=40)
@given(chain=chains(), max_to_keep=st.integers(1, 5), protected=st.sets(st.integers(1, 60), max_size=2))
def test_every_step_that_retention_leaves_is_whole(
    chain: dict[int, tuple[int, ...]], max_to_keep: int, protected: set[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("chain")
    with closing(open_store(str(folder))) as store:
        made: dict[int, tuple[int, ...]] = {}
        for step, refers in chain.items():
            made[step] = tuple(other for other in refers if other in committed(store))  # as rank 0 decides
            commit(store, step, made[step])
            catalog.retain(store, JOB, run=RUN, max_to_keep=max_to_keep, protected=sorted(protected))
            for kept in committed(store):
                names = {file.path.partition("/")[0] for file in catalog.verify_step(store, JOB, kept)}
                assert names == {f"global_step{other}" for other in (kept, *made[kept])}
    shutil.rmtree(folder)


def test_step_that_others_refer_to_is_not_removed_alone(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    commit(store, 1)
    commit(store, 2, (1,))
    with pytest.raises(StepReferred, match="step 1 is not removed: step 2 refers to it"):
        catalog.remove_committed(store, JOB, 1)
    assert committed(store) == [1, 2]
    catalog.remove_committed(store, JOB, 2)
    catalog.remove_committed(store, JOB, 1)
    assert committed(store) == []


def test_step_without_what_it_refers_to_is_damaged_and_pushes_none_out_that_is_whole(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for step, refers in ((1, ()), (2, ()), (3, (2,)), (4, (2,))):
        commit(store, step, refers)
    (tmp_path / JOB / "global_step2" / "manifest.json").unlink()
    damage = {found.step: found.damage for found in catalog.committed_steps(store, JOB)}
    assert damage[1] is None
    assert all("refers to step 2, not committed by its run" in str(damage[step]) for step in (3, 4))
    assert (catalog.latest_step(store, JOB), catalog.older_step(store, JOB, 4)) == (1, 1)
    assert catalog.retain(store, JOB, run=RUN, max_to_keep=1, protected=[]) == []
    commit(store, 2)
    assert catalog.latest_step(store, JOB) == 4


# ---------------------------------------------------------------- restoring ahead of time


def test_files_to_restore_are_also_those_that_a_step_refers_to(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for step, refers in ((1, ()), (2, ()), (3, (1,))):
        commit(store, step, refers)
    persister = JobPersister(store, JOB)
    try:
        found = persister.files_to_restore(step=None, first_rank=0, ranks=1)
        assert found == [data_path(3, RUN, "state", 0, 1), data_path(1, RUN, "state", 0, 1)]
        assert persister.files_to_restore(step=2, first_rank=0, ranks=1) == [data_path(2, RUN, "state", 0, 1)]
    finally:
        persister.close()


# ---------------------------------------------------------------- rolling back


def test_superseded_step_comes_back_only_after_what_it_refers_to(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    commit(store, 1)
    commit(store, 2)
    commit(store, 3, (2,))
    assert catalog.supersede_after(store, JOB, 1) == [2, 3]
    with pytest.raises(ReferenceMissing, match=r"refers to step 2, .*reinstate that first"):
        catalog.reinstate(store, JOB, 3, RUN)
    catalog.reinstate(store, JOB, 2, RUN)
    assert catalog.reinstate(store, JOB, 3, RUN).refers == (2,)
    assert list(catalog.verify_step(store, JOB, 3))


def test_superseded_step_whose_reference_is_removed_or_damaged_does_not_come_back(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for step, refers in ((1, ()), (2, ()), (3, (1, 2))):
        commit(store, step, refers)
    catalog.supersede_after(store, JOB, 2)
    catalog.retain(store, JOB, run=RUN, max_to_keep=1, protected=[])  # what is rolled back protects nothing
    with pytest.raises(ReferenceMissing, match="refers to step 1,"):
        catalog.reinstate(store, JOB, 3, RUN)
    commit(store, 1)
    (tmp_path / JOB / data_path(2, RUN, "state", 0, 1)).write_bytes(b"gone")
    with pytest.raises(CheckpointDamaged, match="global_step2/"):
        catalog.reinstate(store, JOB, 3, RUN)


def test_rollback_that_is_killed_leaves_no_committed_step_without_what_it_refers_to(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for step, refers in ((1, ()), (2, ()), (3, (2,)), (4, (2,))):
        commit(store, step, refers)

    class Killed(Exception):
        pass

    class Dying:
        """The store, until so many objects were removed."""

        def __init__(self, left: int) -> None:
            self.left = left

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def delete(self, path: str) -> None:
            if not self.left:
                raise Killed
            self.left -= 1
            store.delete(path)

    for left in (0, 1, 1):
        with pytest.raises(Killed):
            catalog.supersede_after(Dying(left), JOB, 1)  # type: ignore[arg-type]  # all but one method are the store's
        for step in committed(store):
            assert list(catalog.verify_step(store, JOB, step))
    assert catalog.supersede_after(store, JOB, 1) == [2]
    assert (tmp_path / JOB / superseded_path(4, RUN)).exists()


# ---------------------------------------------------------------- the agent


def manifest(agent: Any, step: int) -> Manifest:
    return check_manifest(agent.store().read(f"{JOB}/global_step{step}/manifest.json"), step)


def save(peer: Any, step: int, refers: tuple[int, ...] = (), **values: Any) -> None:
    peer.save(step, refers=refers, **values)
    peer.want(step)
    peer.wait_committed(step)


def test_agent_commits_what_the_slots_refer_to(agent: Any) -> None:
    peers = agent.gang(2)
    for peer in peers:
        peer.save(5)
    for peer in peers:
        peer.wait_committed(5)
    for refers, peer in zip([(), (5,)], peers, strict=True):
        peer.save(6, refers=refers)
    for peer in peers:
        peer.wait_committed(6)
    assert manifest(agent, 5).refers == ()
    assert manifest(agent, 6).refers == (5,)


def test_windows_refer_too(new_agent: Callable[..., Any]) -> None:
    agent = new_agent(memory_limit=24 << 20)
    peer = agent.join()
    save(peer, 5)
    save(peer, 6, (5,), data_bytes=40 << 20)
    assert manifest(agent, 6).refers == (5,)


def test_agent_that_was_restarted_between_stage_and_commit_writes_the_same(agent: Any, start_rank: Any) -> None:
    peer = agent.join()
    save(peer, 5)
    peer.save(6, refers=(5,), due=False)  # in memory alone
    peer.die()
    agent.kill()
    agent.start()
    other = agent.join()
    other.want(6)
    other.wait_committed(6)
    assert manifest(agent, 6).refers == (5,)


def test_step_whose_reference_is_gone_is_given_up_and_said_so(agent: Any, eventually: Callable[..., None]) -> None:
    peer = agent.join()
    save(peer, 5)
    shutil.rmtree(agent.storage / JOB / "global_step5")
    peer.save(6, refers=(5,))
    peer.wait_dropped(6)
    assert any("step 6 refers to step 5" in reason for reason in peer.failures())
    assert [message.steps for message in peer.pushed if isinstance(message, Unreferable)] == [(5,)]
    eventually(lambda: not agent.job().pending_steps, "nothing waits for it")
    save(peer, 7)


def test_steps_that_may_be_referred_to_stay_until_they_may_not(agent: Any, eventually: Callable[..., None]) -> None:
    peer = agent.join(max_to_keep=1)
    peer.client.send(Referable(steps=(5,)))
    for step in (5, 6, 7):
        save(peer, step)
    eventually(lambda: committed(agent.store()) == [5, 7], "6 is removed")
    save(peer, 8, (5,))
    peer.client.send(Referable(steps=()))
    save(peer, 9, (5,))
    eventually(lambda: committed(agent.store()) == [5, 9], "8 is removed, and not what 9 refers to")
    save(peer, 10)
    eventually(lambda: committed(agent.store()) == [10], "nothing refers to 5")


def test_what_steps_in_memory_refer_to_is_kept(agent: Any, eventually: Callable[..., None]) -> None:
    peer = agent.join(max_to_keep=1)
    save(peer, 5)
    peer.save(6, refers=(5,), due=False)
    for step in (7, 8):
        save(peer, step)
    eventually(lambda: committed(agent.store()) == [5, 8], "7 is removed, and not what 6 refers to")
    peer.want(6)
    peer.wait_committed(6)


def test_another_runs_step_in_place_of_its_own_is_not_to_be_referred_to(agent: Any) -> None:
    commit(agent.store(), 5, run="uid1-7")
    peer = agent.join()
    peer.save(5)
    peer.wait_committed(5)
    kinds = [type(message).__name__ for message in peer.pushed]
    assert kinds.index("Unreferable") < kinds.index("Committed")
