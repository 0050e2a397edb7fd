"""Which step a pointer means: the one that it names, of this job, and no other that has its number."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stepfast import catalog
from stepfast.environment import read_environment
from stepfast.errors import CheckpointNotFound, StorageError
from stepfast.integrations.pointers import Pointers, Scope, path_of, tag_of
from stepfast.step import is_tag
from stepfast.storage.local import LocalStore
from stepfast.torch.sources import CommittedStep
from stepfast.torch.tagged import Sharing, TaggedCheckpoints
from stepfast.torch.writer import Saved

Begin = Callable[..., Pointers]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """The pointers of a job, each time in a process of its own, as it were; the test runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    made: list[TaggedCheckpoints] = []

    def again(job: str = "local/this", storage: str = "storage") -> Pointers:
        for earlier in made:
            earlier.close()
        environment = read_environment({"STEPFAST_JOB": job, "STEPFAST_STORAGE_URI": storage})
        made.append(TaggedCheckpoints(sharing=Sharing.THIS_RANK, environment=environment, persist_all=True))
        return Pointers(made[-1])

    yield again
    for checkpoints in made:
        checkpoints.close()


def save(pointers: Pointers, path: str, step: int | None = None) -> int:
    """Saves it as a step whose tag is the path."""
    opened = pointers.checkpoints.open(path, step=step)
    opened.put("model", torch.ones(2))
    pointers.point(path, opened.step, path)
    opened.commit().wait()
    return opened.step


@pytest.mark.parametrize(
    ("job", "storage"), [("local/other", "storage"), ("local/this", "elsewhere")], ids=["job", "storage"]
)
def test_pointer_of_another_job_is_refused_and_says_whose_it_is(begin: Begin, job: str, storage: str) -> None:
    save(begin(job, storage), "theirs", 100)
    pointers = begin()
    save(pointers, "ours", 100)
    with pytest.raises(CheckpointNotFound, match=f"theirs stands for step 100 .* {job} .*/{storage}.*export"):
        pointers.find("theirs", "theirs")
    found = pointers.find("ours", "ours")
    assert found is not None
    assert found.tag == "ours"


def test_pointer_whose_step_was_lost_does_not_mean_the_step_that_has_its_number_now(begin: Begin) -> None:
    pointers = begin()
    step = save(pointers, "kept")
    pointers.point("lost", step, "lost")
    assert pointers.find("lost", "lost") is None
    newer = save(pointers, "lost")
    pointers.point("lost", step, "lost")
    found = pointers.find("lost", "lost")
    assert found is not None
    assert found.step == newer


def test_removing_a_pointer_of_another_job_leaves_this_jobs_step_of_that_number(begin: Begin) -> None:
    save(begin("local/other"), "theirs", 100)
    pointers = begin()
    save(pointers, "ours", 100)
    pointers.remove("theirs", "theirs")
    pointers.finish()
    assert not os.path.exists("theirs")
    assert [found.tag for found in pointers.checkpoints.steps()] == ["ours"]


def test_removed_checkpoint_is_not_found_while_its_step_is_still_there(begin: Begin, monkeypatch: Any) -> None:
    pointers = begin()
    save(pointers, "one")
    save(pointers, "two")
    may_go, remove = threading.Event(), pointers.checkpoints.remove
    monkeypatch.setattr(pointers.checkpoints, "remove", lambda step: may_go.wait(60) and remove(step))
    pointers.remove("one", "one")
    assert [found.tag for found in pointers.checkpoints.steps()] == ["one", "two"]
    assert pointers.find("one", "one") is None
    may_go.set()
    pointers.finish()
    assert [found.tag for found in pointers.checkpoints.steps()] == ["two"]


def test_step_that_the_storage_does_not_let_go_is_removed_with_the_next(begin: Begin, monkeypatch: Any) -> None:
    pointers = begin()
    for path in ("one", "two"):
        opened = pointers.checkpoints.open(path)
        pointers.point(path, opened.step, path)
        pointers.committed(opened.commit())
    delete, answers = LocalStore.delete, [StorageError("not now")]

    def refuse_once(store: LocalStore, path: str) -> None:
        if answers:
            raise answers.pop()
        delete(store, path)

    monkeypatch.setattr(LocalStore, "delete", refuse_once)
    pointers.remove("one", "one")
    pointers.finish()
    assert not answers
    assert [found.tag for found in pointers.checkpoints.steps()] == ["two"]


def commit(pointers: Pointers, path: str) -> Saved:
    """As an integration does, up to the commit."""
    opened = pointers.checkpoints.open(path)
    opened.put("model", torch.ones(2))
    pointers.point(path, opened.step, path)
    saved = opened.commit()
    pointers.committed(saved)
    return saved


def kept(pointers: Pointers) -> list[str]:
    """The tags of the steps that stay."""
    pointers.sweep()
    pointers.finish()
    return [found.tag for found in pointers.checkpoints.steps()]


def test_step_goes_when_the_framework_removes_its_pointer_and_not_when_somebody_else_does(begin: Begin) -> None:
    pointers = begin()
    for path in ("one", "two", "three"):
        commit(pointers, path)
    shutil.rmtree("one")
    assert kept(pointers) == ["one", "two", "three"]
    with pointers.watching():
        shutil.rmtree("two")
    assert kept(pointers) == ["one", "three"]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_pointers_that_cannot_be_read_keep_their_steps(begin: Begin, monkeypatch: Any, number: int) -> None:
    pointers = begin()
    for path in ("one", "two"):
        commit(pointers, path)

    def fail(*_: Any, **__: Any) -> str:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", fail)
        assert kept(pointers) == ["one", "two"]
        with pytest.raises(OSError, match=os.strerror(number)):
            pointers.find("one", "one")
    with monkeypatch.context() as patch, pointers.watching():
        patch.setattr(Path, "lstat", fail)
    assert kept(pointers) == ["one", "two"]


def test_a_folder_that_is_gone_as_a_whole_keeps_its_steps(begin: Begin) -> None:
    pointers = begin()
    for path in ("out/one", "out/two"):
        commit(pointers, path)
    with pointers.watching():
        shutil.rmtree("out")
    assert kept(pointers) == ["out/one", "out/two"]


def test_step_goes_when_the_script_removes_its_folder_and_not_when_files_or_the_disk_go(begin: Begin) -> None:
    pointers = begin()
    for path in ("out/one", "out/two", "out/three"):
        commit(pointers, path)
    Path("out/one/stepfast.json").unlink()
    pointers.look()
    for path in ("out/one", "out/two", "out/three"):
        shutil.rmtree(path)
    pointers.look()
    commit(pointers, "out/four")
    assert kept(pointers) == ["out/one", "out/four"]
    os.rename("out", "away")
    os.mkdir("out")  # as where it was mounted on
    pointers.look()
    commit(pointers, "out/five")
    pointers.look()
    assert kept(pointers) == ["out/one", "out/four", "out/five"]


@pytest.mark.parametrize("newer", ["two", "one"], ids=["another-path", "the-same-path"])
def test_step_whose_follower_could_not_be_saved_stays_until_one_is(begin: Begin, monkeypatch: Any, newer: str) -> None:
    save(begin(), "one")
    pointers = begin()
    pointers.make_again(lambda found: Path(found.tag), ())
    begun = pointers.checkpoints.latest()
    assert begun is not None
    pointers.checkpoints.load(begun.step, "model")

    def fail(*_: Any, **__: Any) -> list[int]:
        raise StorageError("not now")

    with monkeypatch.context() as patch:
        patch.setattr(catalog, "supersede_after", fail)
        assert not commit(pointers, newer).saved
    with pointers.watching():
        if newer != "one":
            shutil.rmtree("one")
    assert kept(pointers) == ["one"]
    assert pointers.find("one", "one") is not None
    assert commit(pointers, newer).saved
    assert kept(pointers) == [newer]


def test_pointers_of_another_storage_are_not_taken_for_lost_ones(begin: Begin) -> None:
    save(begin(storage="elsewhere"), "theirs", 100)
    pointers = begin()
    save(pointers, "ours", 7)
    begin().make_again(lambda found: Path(found.tag), [Path("theirs"), Path("ours")])
    assert os.path.exists("theirs/stepfast.json")


@pytest.mark.parametrize(
    "path", ["a.ckpt", "folder/a.ckpt", "checkpoint-4", "../folder/a", "f" * 300 + "/a", "f" * 300 + "/" + "a" * 300]
)
def test_every_path_has_a_tag_of_its_own_that_leads_back_to_it(path: str) -> None:
    tag = tag_of(path)
    assert is_tag(tag)
    others = ["other/a", "b", "f" * 301 + "/a", "f" * 300 + "/b"]
    assert tag not in map(tag_of, others)
    folder, name = os.path.split(path)
    if len(path) < 300:
        assert os.path.normpath(path_of(tag) or "") == path
    if len(name) < 300:
        assert path_of(tag, folder=folder) == Path(path)
    assert path_of(tag, folder="elsewhere") is None


def named(*tags: str) -> list[CommittedStep]:
    return [
        CommittedStep(step=number, size_bytes=1, saved_time=1, committed_time=1, tag=tag)
        for number, tag in enumerate(tags)
    ]


@pytest.mark.parametrize(
    ("tags", "folder", "own"),
    [
        (["one/checkpoint-2", "two/checkpoint-2", "one/last", "one"], "one", [0]),
        (["one/two/checkpoint-2", "two/checkpoint-2"], "two", [1]),
        (["checkpoint-2", "checkpoint-4", "last"], "one", [0, 1]),
        (["checkpoint-2", "one/checkpoint-4"], "one", [0, 1]),
        (["checkpoint-2", "one/checkpoint-4"], "two", []),
        (["./checkpoint-2"], "one", []),
        (["./checkpoint-2"], ".", [0]),
        (["checkpoint_2", "one/checkpoint_4"], "one", []),
    ],
    ids=["two", "nested", "old", "old-and-new", "old-of-two", "here", "in-here", "accelerate"],
)
def test_a_trainer_has_the_numbered_steps_of_its_folder(tags: list[str], folder: str, own: list[int]) -> None:
    found = Scope(Path(folder), "checkpoint-").own(named(*tags))
    assert [step.step for step, _ in found] == own
    assert all(path.parent == Path(folder) for _, path in found)
