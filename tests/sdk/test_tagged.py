"""Steps by tag and name, in one process: what is put is what comes back, whatever happens to it meanwhile."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stepfast import catalog
from stepfast.errors import CheckpointDamaged, CheckpointerOpen, CheckpointNotFound, CheckpointUnsafe, GangError
from stepfast.layout import HISTORIES, job_folder
from stepfast.step import OnBusy
from stepfast.storage import open_store
from stepfast.tags import TagBook
from stepfast.torch.gang import Alone
from stepfast.torch.tagged import Sharing, TaggedCheckpoints

Make = Callable[..., TaggedCheckpoints]


@pytest.fixture
def make(any_bench: Any) -> Iterator[Make]:
    """Checkpoints of one job, each of a run of its own; without and with an agent."""
    with maker(any_bench) as make:
        yield make


@contextmanager
def maker(bench: Any) -> Iterator[Make]:
    made: list[TaggedCheckpoints] = []

    def begin(*, weights_only: bool = False, **changes: Any) -> TaggedCheckpoints:
        for earlier in made:
            earlier.close()
        made.append(
            TaggedCheckpoints(
                sharing=Sharing.THIS_RANK, environment=bench.environment(**changes), weights_only=weights_only
            )
        )
        return made[-1]

    yield begin
    for checkpoints in made:
        checkpoints.close()


def save(checkpoints: TaggedCheckpoints, tag: str, **objects: Any) -> int:
    opened = checkpoints.open(tag)
    for name, item in objects.items():
        opened.put(name, item)
    saved = opened.commit()
    saved.wait()
    return saved.step


def test_objects_come_back_by_tag_and_name(make: Make, assert_same: Any) -> None:
    model = nn.Linear(300, 200)
    objects = {
        "model": model.state_dict(),
        "optim/rank 0.pt": {"lr": 0.1, "moments": [torch.randn(7), None]},
        "args": b"\0\1",
    }
    checkpoints = make()
    save(checkpoints, "global_step500", **objects)
    again = make()
    found = again.find("global_step500")
    assert found is not None
    assert (found.step, again.names(500)) == (500, list(objects))
    for name, item in objects.items():
        assert_same(item, again.load(500, name))


def test_what_is_put_is_saved_as_it_was_then(make: Make) -> None:
    weights, history = torch.ones(1000), [1, 2]
    tied = {"weights": weights, "head": weights[:10], "history": history}
    checkpoints = make()
    opened = checkpoints.open("global_step1")
    opened.put("state", tied)
    weights.zero_()
    history.append(3)
    tied["more"] = 1
    opened.put("state2", {"weights": weights})
    opened.commit()
    loaded = checkpoints.load(1, "state")
    assert (loaded["weights"].sum(), loaded["history"], len(loaded)) == (1000, [1, 2], 3)
    loaded["weights"][0] = 7
    assert loaded["head"][0] == 7  # tied as they were
    assert checkpoints.load(1, "state2")["weights"].sum() == 0


def test_expanded_tensor_takes_no_more_than_it_has(make: Make, any_bench: Any, assert_same: Any) -> None:
    objects = {
        "mask": torch.ones(1).expand(4096, 4096),
        "rows": torch.arange(6.0).reshape(2, 3).expand(4, 2, 3),
        "windows": torch.arange(10.0).unfold(0, 4, 1),
        "lazy": torch.tensor([1 + 2j]).conj().expand(3),
    }
    step = save(make(), "global_step1", x=objects)
    (path,) = any_bench.step_folder(step).glob("*.safetensors")
    assert path.stat().st_size < 1 << 20
    loaded = make().load(step, "x")
    assert_same(objects, loaded)
    assert loaded["mask"].stride() == (0, 0)


def test_object_that_is_put_again_replaces_the_first(make: Make) -> None:
    checkpoints = make()
    opened = checkpoints.open("global_step1")
    opened.put("x", 1)
    opened.put("x", 2)
    opened.commit()
    assert (checkpoints.names(1), checkpoints.load(1, "x")) == (["x"], 2)


def test_committed_tag_takes_nothing_more(make: Make) -> None:
    checkpoints = make()
    opened = checkpoints.open("global_step1")
    opened.put("x", 1)
    first = opened.commit()
    assert opened.commit() is first
    with pytest.raises(ValueError, match="committed"):
        opened.put("y", 2)


def test_newest_step_of_a_tag_is_found(make: Make) -> None:
    checkpoints = make()
    for value in (1, 2, 3):
        save(checkpoints, "last", x=value)
    save(checkpoints, "best", x=9)
    found = checkpoints.find("last")
    assert found is not None
    assert checkpoints.load(found.step, "x") == 3
    assert [step.tag for step in checkpoints.steps()] == ["last", "last", "last", "best"]
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.tag == "best"


@pytest.mark.parametrize("tag", ["", " ", "a\nb", "x" * 300])
def test_tag_that_cannot_be_is_refused(make: Make, tag: str) -> None:
    with pytest.raises(ValueError, match="cannot be a tag"):
        make().open(tag)


def test_name_that_was_never_saved_is_not_found(make: Make) -> None:
    checkpoints = make()
    save(checkpoints, "global_step1", x=1)
    with pytest.raises(CheckpointNotFound, match="holds no 'y'"):
        checkpoints.load(1, "y")
    with pytest.raises(CheckpointNotFound, match="not committed"):
        checkpoints.load(2, "x")
    assert checkpoints.find("global_step2") is None


# ---------------------------------------------------------------- which step a run goes on from


def test_run_that_loads_nothing_begins_a_history_of_its_own(make: Make) -> None:
    save(make(), "global_step500", x=1)
    anew = make()
    save(anew, "global_step3", x=2)
    assert [step.step for step in anew.steps()] == [3]


def test_run_that_loads_an_older_step_leaves_the_newer_behind(make: Make) -> None:
    first = make()
    for step in (1, 2, 3):
        save(first, f"global_step{step}", x=step)
    second = make()
    assert second.load(2, "x") == 2
    assert [step.step for step in second.steps()] == [1, 2, 3]  # until it saves something
    assert save(second, "best", x=9) == 3
    assert [(step.step, step.tag) for step in second.steps()] == [
        (1, "global_step1"), (2, "global_step2"), (3, "best"),
    ]  # fmt: skip


def test_newest_of_the_steps_that_were_loaded_is_what_a_run_goes_on_from(make: Make) -> None:
    first = make()
    for step in (1, 2, 3):
        save(first, f"global_step{step}", x=step)
    second = make()
    second.load(3, "x")
    second.load(1, "x")  # only to compare
    save(second, "global_step4", x=4)
    assert [step.step for step in second.steps()] == [1, 2, 3, 4]


@pytest.mark.parametrize(("named", "found"), [(None, 3), (2, 2), (0, None)], ids=["nothing", "a-step", "from-scratch"])
def test_launcher_names_the_step_to_go_on_from(make: Make, named: int | None, found: int | None) -> None:
    first = make()
    for step in (1, 2, 3):
        save(first, f"global_step{step}", x=step)
    latest = make(resume_step=named).latest()
    assert (latest.step if latest is not None else None) == found


def test_first_save_does_not_wait_for_a_storage_that_is_away(any_bench: Any, until: Any) -> None:
    with maker(any_bench) as make:
        save(make(), "global_step500", x=1)
        anew = make()
        if any_bench.socket is not None:
            until((any_bench.folder / HISTORIES).exists, "the last that an agent writes of a step")
        aside = any_bench.storage / "aside"
        any_bench.folder.rename(aside)
        any_bench.folder.symlink_to(any_bench.folder)  # whatever is to be listed or written there fails
        opened = anew.open("global_step1")
        opened.put("x", 2)
        is_saved = opened.commit().saved
        whole = any_bench.storage / "whole"
        whole.symlink_to(aside)
        whole.replace(any_bench.folder)  # at once: a folder that is not there for a moment has nothing to supersede
        assert is_saved == (any_bench.socket is not None)
        assert [step.step for step in anew.steps()] == ([1] if is_saved else [])
        save(anew, "global_step2", x=3)
        assert [step.step for step in anew.steps()] == ([1, 2] if is_saved else [2])


def test_opening_that_failed_does_not_count(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = make()
    with monkeypatch.context() as patch:
        patch.setattr(Alone, "update", lambda *args: raises(GangError("the store does not answer")))
        with pytest.raises(GangError):
            checkpoints.open("last")
    save(checkpoints, "last", x=1)
    assert checkpoints.load(0, "x") == 1
    book = TagBook.from_json((checkpoints._gang.hear(["tags"]) or [""])[0])
    assert [step.occurrence for step in book.steps] == [1]


def raises(error: Exception) -> Any:
    raise error


# ---------------------------------------------------------------- damage and refusals


def data_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@pytest.fixture
def make_direct(bench: Any) -> Iterator[Make]:
    """The same without an agent, whose memory would have whole what is damaged in the storage."""
    with maker(bench) as make:
        yield make


def test_damaged_step_is_named_and_set_aside_for_the_next_attempt(make_direct: Make, bench: Any) -> None:
    first = make_direct()
    for step in (1, 2):
        save(first, f"global_step{step}", x=torch.ones(100_000))
    first.close()
    (path,) = data_files(bench.step_folder(2))
    damage(bench.step_folder(2))
    second = make_direct()
    with pytest.raises(CheckpointDamaged, match=path.name) as caught:
        second.load(2, "x")
    assert (caught.value.step, caught.value.older_step) == (2, 1)
    latest = make_direct().latest()
    assert latest is not None
    assert latest.step == 1
    store = open_store(bench.storage.as_uri())
    assert [found.step for found in catalog.superseded_steps(store, job_folder(bench.job))] == [2]
    store.close()


def damage(folder: Path) -> None:
    """The last byte of the step's only file is not what it was."""
    (path,) = data_files(folder)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_damaged_old_step_is_set_aside_alone(make: Make, any_bench: Any, tmp_path: Path) -> None:
    first = make()
    save(first, "best", x=torch.ones(100_000))
    for step in (10, 20, 30):
        save(first, f"global_step{step}", x=torch.ones(100_000))
    first.close()
    whole = tmp_path / "whole"
    shutil.copytree(any_bench.step_folder(0), whole)
    for path in any_bench.step_folder(0).glob("part-*"):
        path.write_bytes(b"{}")  # which no memory tier holds
    second = make()
    assert second.load(30, "x").sum() == 100_000  # training goes on from 30
    best = second.find("best")
    assert best is not None
    with pytest.raises(CheckpointDamaged):
        second.load(best.step, "x")  # only to compare
    assert [found.step for found in make().steps()] == [10, 20, 30]
    store = open_store(any_bench.storage.as_uri())
    folder = job_folder(any_bench.job)
    (marked,) = catalog.superseded_steps(store, folder)
    for path in whole.glob("part-*"):
        shutil.copy(path, any_bench.step_folder(0))
    catalog.reinstate(store, folder, marked.step, marked.run)
    store.close()
    assert [found.step for found in make().steps()] == [0, 10, 20, 30]


def test_damaged_step_of_the_run_itself_is_not_found_again(make_direct: Make, bench: Any) -> None:
    checkpoints = make_direct()
    for step in (1, 2, 3):
        save(checkpoints, f"global_step{step}", x=torch.ones(100_000))
    damage(bench.step_folder(2))
    with pytest.raises(CheckpointDamaged):
        checkpoints.load(2, "x")
    assert [found.step for found in checkpoints.steps()] == [1, 3]


def test_step_that_is_set_aside_after_the_ranks_agreed_on_it_is_followed_by_the_next_older_one(
    make_direct: Make, bench: Any
) -> None:
    first = make_direct()
    for step in (1, 2):
        save(first, f"global_step{step}", x=torch.ones(100_000))
    damage(bench.step_folder(2))
    second = make_direct()
    assert second.latest() is not None
    with pytest.raises(CheckpointDamaged):
        second.load(2, "x")
    latest = second.latest()
    assert latest is not None
    assert latest.step == 1
    damage(bench.step_folder(1))
    with pytest.raises(CheckpointDamaged):
        second.load(1, "x")
    with pytest.raises(CheckpointNotFound, match="no older one"):
        second.latest()


AFTER_DAMAGE = """
import sys, torch, torch.distributed as dist
from stepfast.errors import CheckpointDamaged, GangError
from stepfast.torch.tagged import Sharing, TaggedCheckpoints
dist.init_process_group("gloo")
rank, has_read = dist.get_rank(), sys.argv[1] == "read"
checkpoints = TaggedCheckpoints(sharing=Sharing.EVERY_RANK)
if rank == 0 or has_read:
    assert checkpoints.latest().step == 2
if rank == 1 and has_read:
    checkpoints.load(2, "x")
dist.barrier()
if rank == 0:
    with open(sys.argv[2], "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\\1")
    try:
        checkpoints.load(2, "x")
    except CheckpointDamaged as error:
        print("DAMAGED", error.step, flush=True)
dist.barrier()
if rank == 1 - has_read:
    try:
        print(f"LATEST {checkpoints.latest().step}", flush=True)
    except GangError as error:
        print("NOT", error, flush=True)
dist.barrier()
print(f"FROM {checkpoints.latest().step if not has_read else None}", flush=True)
dist.barrier()
"""


@pytest.mark.parametrize("who", ["nobody", "read"])
def test_ranks_never_go_on_from_different_steps_when_one_of_them_sets_a_step_aside(
    launcher: Any, make_direct: Make, who: str
) -> None:
    first = make_direct()
    for step in (1, 2):
        save(first, f"global_step{step}", x=torch.ones(100_000))
    first.close()
    (path,) = data_files(launcher.bench.step_folder(2))
    finished = launcher.run(AFTER_DAMAGE, who, str(path), ranks=2)
    assert finished.code == 0, finished.output
    assert "DAMAGED 2" in finished.output
    if who == "nobody":
        assert "LATEST 1" in finished.output, finished.output
        assert finished.output.count("FROM 1") == 2, finished.output
    else:
        assert "NOT step 2 is gone, and a rank goes on from it" in finished.output, finished.output


class Custom:
    """Travels pickled."""


def test_pickled_object_is_refused_where_weights_alone_may_be_loaded(make: Make) -> None:
    save(make(), "global_step1", plain={"x": torch.ones(3)}, custom=Custom())
    careful = make(weights_only=True)
    assert careful.load(1, "plain")["x"].sum() == 3
    with pytest.raises(CheckpointUnsafe):
        careful.load(1, "custom")
    assert isinstance(make().load(1, "custom"), Custom)


def test_second_one_of_a_run_is_refused(make: Make, any_bench: Any) -> None:
    checkpoints = make()
    with pytest.raises(CheckpointerOpen, match="TaggedCheckpoints"):
        TaggedCheckpoints(sharing=Sharing.THIS_RANK, environment=checkpoints.environment)
    with pytest.raises(CheckpointerOpen, match="TaggedCheckpoints"):
        any_bench.make(checkpoints.environment, state={})


@pytest.mark.parametrize("sharing", list(Sharing))
def test_next_ones_of_a_run_go_on_behind_its_steps(any_bench: Any, sharing: Sharing) -> None:
    with maker(any_bench) as make:
        save(make(), "global_step3", x="an earlier run's")
    environment = any_bench.environment()
    steps: list[int] = []
    for tag in ("a", "c", "a"):
        checkpoints = TaggedCheckpoints(sharing=sharing, environment=environment)
        if not steps:
            assert checkpoints.load(3, "x") == "an earlier run's"
        steps.append(save(checkpoints, tag, x=f"{len(steps) + 1}"))
        found = checkpoints.find(tag)
        assert found is not None
        assert (found.step, checkpoints.load(found.step, "x")) == (steps[-1], f"{len(steps)}")
        checkpoints.close()
    assert steps == [4, 5, 6]
    with maker(any_bench) as make:
        assert [(found.step, found.tag) for found in make().steps()] == [
            (3, "global_step3"), (4, "a"), (5, "c"), (6, "a")
        ]  # fmt: skip


ONE_AFTER_THE_OTHER = """
import sys, time, torch.distributed as dist
from stepfast.torch.tagged import Sharing, TaggedCheckpoints
dist.init_process_group("gloo")
rank = dist.get_rank()
for turn, tag in enumerate(("a", "c", "a")):
    if turn and rank == 0:
        time.sleep(1)  # rank 1 finds what rank 0 has said to those before
    checkpoints = TaggedCheckpoints(sharing=Sharing(sys.argv[1]))
    assert checkpoints.exchange("turn", f"{turn}") == [f"{turn}"] * 2
    opened = checkpoints.open(tag)
    opened.put("x", [turn, rank])
    opened.commit().wait()
    dist.barrier()
    step = checkpoints.find(tag).step
    print(f"SAVED {tag} as {step}: {checkpoints.load(step, 'x') == [turn, rank]}\\n", end="", flush=True)
    dist.barrier()
    checkpoints.close()
"""


@pytest.mark.parametrize("sharing", [Sharing.EVERY_RANK, Sharing.WHOEVER_OPENS])
def test_next_ones_of_several_ranks_go_on_behind_the_runs_steps(launcher: Any, sharing: Sharing) -> None:
    finished = launcher.run(ONE_AFTER_THE_OTHER, sharing, ranks=2, timeout_seconds=120.0)
    assert finished.code == 0, finished.output
    for saved in ("a as 0: True", "c as 1: True", "a as 2: True"):
        assert finished.output.count(f"SAVED {saved}") == 2, finished.output


# ---------------------------------------------------------------- devices


@pytest.mark.parametrize(
    "location",
    [
        None,
        "cpu",
        torch.device("cpu"),
        {"cuda:0": "cpu"},
        lambda storage, device: storage,
        lambda storage, device: None,
    ],
    ids=["own", "text", "device", "table", "function", "function-that-leaves-it"],
)
def test_tensors_go_where_they_are_asked_for(make: Make, location: Any) -> None:
    checkpoints = make()
    save(checkpoints, "global_step1", x={"w": torch.ones(3)})
    assert checkpoints.load(1, "x", location)["w"].device.type == "cpu"


def test_tensors_can_be_loaded_without_their_bytes(make: Make) -> None:
    checkpoints = make()
    save(checkpoints, "global_step1", x={"w": torch.ones(3)})
    assert checkpoints.load(1, "x", "meta")["w"].is_meta


# ---------------------------------------------------------------- memory


def test_tag_is_skipped_when_memory_is_exhausted_and_the_job_says_so(
    bench: Any, start_agent: Any, until: Any, tmp_path: Path
) -> None:
    agent = start_agent(limit_bytes=10 << 20)
    bench.socket = agent.socket
    checkpoints = TaggedCheckpoints(
        sharing=Sharing.THIS_RANK,
        environment=bench.environment(on_busy=OnBusy.SKIP, persist_interval_seconds=0.0),
    )
    try:
        (bench.storage / "local").mkdir(parents=True)
        bench.folder.write_bytes(b"")  # nothing can be persisted
        outcomes = [save_all(checkpoints, step) for step in range(1, 5)]
        assert outcomes[0] is True
        assert False in outcomes
    finally:
        os.unlink(bench.folder)
        checkpoints.close()


def save_all(checkpoints: TaggedCheckpoints, step: int) -> bool:
    opened = checkpoints.open(f"global_step{step}")
    opened.put("x", torch.zeros(4 << 20, dtype=torch.uint8))
    return opened.commit().saved


def test_no_step_is_overtaken_where_all_are_to_be_persisted(bench: Any, start_agent: Any, until: Any) -> None:
    bench.socket = start_agent().socket
    checkpoints = TaggedCheckpoints(sharing=Sharing.THIS_RANK, environment=bench.environment(), persist_all=True)
    for step in range(1, 21):
        opened = checkpoints.open(f"global_step{step}")
        opened.put("x", torch.zeros(4 << 20, dtype=torch.uint8))
        opened.commit()
    checkpoints.close()
    store = open_store(bench.storage.as_uri())
    folder = job_folder(bench.job)
    until(lambda: [s.step for s in catalog.committed_steps(store, folder)] == list(range(1, 21)), "all are committed")
    store.close()


def test_steps_are_listed_while_they_are_removed(any_bench: Any) -> None:
    with maker(any_bench) as make, ThreadPoolExecutor(1) as threads:
        checkpoints = make()
        steps = [save(checkpoints, f"tag{number}", item=number) for number in range(40)]
        removing = threads.submit(lambda: [checkpoints.remove(step) for step in steps[:-1]])
        while not removing.done():
            assert [found.step for found in checkpoints.steps()][-1] == steps[-1]
        removing.result()
        assert [found.step for found in checkpoints.steps()] == steps[-1:]
