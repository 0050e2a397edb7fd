"""Which step a pointer means: the one that it names, of this job, and no other that has its number."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stepfast.environment import read_environment
from stepfast.errors import CheckpointNotFound, StorageError
from stepfast.integrations.pointers import Pointers, Scope, path_of, tag_of
from stepfast.step import is_tag
from stepfast.storage.local import LocalStore
from stepfast.torch.sources import CommittedStep
from stepfast.torch.tagged import Sharing, TaggedCheckpoints

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
