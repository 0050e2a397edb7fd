"""Who shares in a step when nobody has said it: found out from what the ranks of a real gang do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import HashStore

from stepfast import catalog
from stepfast.errors import GangError, StorageUnavailable
from stepfast.layout import job_folder
from stepfast.storage import open_store
from stepfast.tags import TaggedStep
from stepfast.torch import attendance
from stepfast.torch.attendance import Attendance
from stepfast.torch.gang import StoreGang

# Trains with DDP; `who` says which ranks save, `when` each rank's place.
SCRIPT = """
import json, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from stepfast.errors import GangError
from stepfast.torch.tagged import Sharing, TaggedCheckpoints
who, steps = json.loads(sys.argv[1]), 4
dist.init_process_group("gloo")
rank = dist.get_rank()
checkpoints = TaggedCheckpoints(sharing=Sharing.WHOEVER_OPENS)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
def save(step):
    opened = checkpoints.open(f"global_step{step}")
    opened.put("rank", rank)
    opened.commit()
for step in range(1, steps + 1):
    model(torch.ones(2, 4)).sum().backward()
    if rank in who[str(step)]:
        save(step)
if len(sys.argv) > 2:
    try:
        if rank == 0:
            save(9)
        dist.barrier(); dist.barrier()
        while rank == 1 and checkpoints._sharers._attendance._next_index < 5: pass
        while rank == 1 and checkpoints._sharers._attendance._questions: pass
        if rank == 1:
            save(9)
    except GangError as error:
        print(error, flush=True)
    dist.barrier()
found = checkpoints.latest() if rank in who[str(steps)] else None
checkpoints.close()
dist.destroy_process_group()
"""

EVERY = {step: [0, 1, 2] for step in (1, 2, 3, 4)}
FIRST = {step: [0] for step in (1, 2, 3, 4)}
LAST = {step: [2] for step in (1, 2, 3, 4)}
MIXED = {1: [0, 1, 2], 2: [0], 3: [1, 2], 4: [0, 1, 2]}


@pytest.mark.parametrize(
    "who", [EVERY, FIRST, LAST, MIXED], ids=["every-rank", "rank-0", "rank-2", "now-these-now-those"]
)
@pytest.mark.parametrize("with_agent", [True, False], ids=["agent", "no-agent"])
def test_step_is_whole_with_the_ranks_that_saved_it(
    launcher: Any, start_agent: Any, who: dict[int, list[int]], with_agent: bool
) -> None:
    agent = start_agent() if with_agent else None
    finished = launcher.run(SCRIPT, json.dumps(who), ranks=3, agent=agent)
    assert finished.code == 0, finished.output
    store = open_store(launcher.bench.storage.as_uri())
    folder = job_folder(launcher.bench.job)
    found = {
        step: sorted(file.rank for file in catalog.verify_step(store, folder, step))
        for step in (committed.step for committed in catalog.committed_steps(store, folder))
    }
    store.close()
    assert found == who


GO_BACK = """
import torch.distributed as dist
import stepfast.nebula as nm
dist.init_process_group("gloo")
rank = dist.get_rank()
nm.init(persistent_time_interval=0)
dist.barrier()
for step in (1, 2, 3):
    if rank == 0:
        nm.Checkpoint(f"global_step{step}", 1).save("x", step)
        nm.Checkpoint("best", 1).save("x", step)
    dist.barrier()
    latest, got = nm.get_latest_checkpoint(), nm.get_checkpoint(f"global_step{step}")
    seen = [None, None]
    dist.all_gather_object(seen, (latest and latest.load("x"), latest and latest.tag, got and got.tag))
    if rank == 0:
        print("SEEN", step, seen == [(step, "best", f"global_step{step}")] * 2, seen, flush=True)
    dist.barrier()
"""


@pytest.mark.parametrize("with_agent", [True, False], ids=["agent", "no-agent"])
def test_ranks_that_go_back_to_the_latest_go_back_to_the_same(
    launcher: Any, start_agent: Any, with_agent: bool
) -> None:
    finished = launcher.run(GO_BACK, ranks=2, agent=start_agent() if with_agent else None)
    assert finished.code == 0, finished.output
    assert [f"SEEN {step} True" in finished.output for step in (1, 2, 3)] == [True] * 3, finished.output


ASK_BEFORE = """
import time, torch.distributed as dist
from stepfast.torch.tagged import Sharing, TaggedCheckpoints
dist.init_process_group("gloo")
rank = dist.get_rank()
checkpoints = TaggedCheckpoints(sharing=Sharing.WHOEVER_OPENS)
for step in (1, 2, 3):
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)  # rank 0 has saved by now, and waits for this rank's share
        checkpoints.latest()
    opened = checkpoints.open(f"global_step{step}")
    opened.put("rank", rank)
    opened.commit()
dist.barrier()
print(f"LATEST {checkpoints.latest().step}", flush=True)
dist.barrier()
"""


def test_rank_that_asks_for_the_latest_before_it_saves_keeps_nobody_waiting(launcher: Any) -> None:
    finished = launcher.run(ASK_BEFORE, ranks=2, timeout_seconds=100.0)
    assert finished.code == 0, finished.output
    assert finished.output.count("LATEST 3") == 2, finished.output


def test_rank_that_comes_too_late_for_a_step_is_told_so(launcher: Any, start_agent: Any) -> None:
    finished = launcher.run(SCRIPT, json.dumps(FIRST), "late", ranks=2, agent=start_agent())
    assert finished.code == 0, finished.output
    assert "rank 1 opens 'global_step9' behind a collective operation" in finished.output
    store = open_store(launcher.bench.storage.as_uri())
    folder = job_folder(launcher.bench.job)
    assert [file.rank for file in catalog.verify_step(store, folder, 9)] == [0]
    store.close()


# ---------------------------------------------------------------- ranks of one process


class Rank:
    """A rank's attendance, at a place that the test says, and what became of its steps."""

    def __init__(self, store: HashStore, rank: int, world_size: int = 2) -> None:
        self.rank, self.place = rank, {"world": 0}
        self.shared: dict[int, str] = {}
        self.given_up: dict[int, str] = {}
        gang = StoreGang(store, rank=rank, world_size=world_size)
        self.attendance = Attendance(
            gang, lambda step, ranks: self.shared.update({step: str(ranks)}), self._gave_up, here=lambda: self.place
        )

    def _gave_up(self, step: int, reason: str) -> None:
        self.given_up[step] = reason

    def go_on(self, group: str = "world") -> None:
        self.place = {**self.place, group: self.place.get(group, 0) + 1}

    def save(self, agreed: TaggedStep) -> None:
        self.attendance.open(agreed)
        self.attendance.put(agreed)
        self.attendance.commit(agreed)


def agreed_on(number: int, *, tag: str = "", opener: int = 0, occurrence: int = 1) -> TaggedStep:
    return TaggedStep(
        number=number, tag=tag or f"tag{number}", occurrence=occurrence, opener=opener, step=number + 100, save=True,
        due=True,
    )  # fmt: skip


@pytest.fixture
def ranks() -> Iterator[Callable[..., list[Rank]]]:
    """`ranks(2)`: so many of a gang; `ranks(2, absent=1)`: without the last."""
    made: list[Rank] = []

    def begin(count: int, absent: int = 0) -> list[Rank]:
        store = HashStore()
        made.extend(Rank(store, rank, count) for rank in range(count - absent))
        return made

    yield begin
    for rank in made:
        rank.attendance.close(0.0)


def test_rank_that_is_beyond_in_any_common_group_has_no_share(ranks: Any, until: Any) -> None:
    first, second, third = ranks(3)
    for rank in (first, second):
        rank.place = {"world": 1, "pair": 5, "own": 9 - rank.rank}
    third.place = {"world": 1, "pair of others": 2}
    first.save(agreed_on(0))
    second.go_on("pair")
    third.go_on("world")
    until(lambda: first.shared, "the others' answers")
    assert first.shared == {100: "0"}


def test_rank_in_no_common_group_is_waited_for(ranks: Any, until: Any, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(attendance, "_PATIENCE_SECONDS", 0.1)
    first, second = ranks(2)
    first.place, second.place = {"one": 1}, {"other": 7}
    first.save(agreed_on(0))
    until(lambda: "rank 1 has neither saved it nor gone on" in caplog.text, "a warning")
    assert "let these ranks go on to a collective operation in which rank 0 takes part" in caplog.text
    with pytest.raises(StorageUnavailable, match=r"'tag0' \(step 100\) was not committed within 0 s: rank 1 has neith"):
        first.attendance.wait(100, 0.1)
    second.save(agreed_on(0))
    until(lambda: first.shared and second.shared, "both ranks' step")
    assert first.shared == second.shared == {100: "0-1"}
    assert caplog.text.count("neither saved it") == 1


def test_step_is_given_up_by_all_when_a_rank_has_not_answered_in_the_end(ranks: Any, until: Any) -> None:
    first, second = ranks(2)
    first.save(agreed_on(0))
    first.attendance.close(0.1)
    assert "rank 1 has neither saved it nor gone on" in first.given_up[100]
    second.save(agreed_on(0))
    until(lambda: second.given_up, "what became of the step")
    assert (first.shared, second.shared) == ({}, {})


def test_step_is_given_up_by_all_when_a_rank_that_saved_it_has_ended_before_the_first(ranks: Any, until: Any) -> None:
    first, second = ranks(2)
    first.attendance.open(agreed_on(0))
    second.save(agreed_on(0))
    second.attendance.close(0.1)
    assert "has not said by then whose it is" in second.given_up[100]
    first.attendance.commit(agreed_on(0))
    until(lambda: first.given_up, "what became of the step")
    assert (first.shared, second.shared) == ({}, {})


def test_rank_that_ended_without_saving_has_no_share(ranks: Any, until: Any) -> None:
    first, second = ranks(2)
    second.attendance.close()
    first.save(agreed_on(0))
    until(lambda: first.shared, "the step")
    assert first.shared == {100: "0"}


def test_rank_that_failed_before_it_came_to_its_save_is_not_taken_for_one_without_a_share(ranks: Any) -> None:
    first, second = ranks(2)
    second.attendance.close(0.1, is_silent=True)
    first.save(agreed_on(0))
    first.attendance.close(0.2)
    assert (first.shared, list(first.given_up)) == ({}, [100])


def test_rank_that_never_came_is_not_waited_for_for_ever(ranks: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(attendance, "_ABSENT_SECONDS", 0.1)
    (first,) = ranks(2, absent=1)
    first.save(agreed_on(0))
    first.attendance.wait(100, 60.0)
    first.save(agreed_on(1))
    first.attendance.close()
    assert first.shared == {100: "0", 101: "0"}


@pytest.mark.parametrize("failed", [0, 1])
def test_step_that_a_rank_could_not_save_is_given_up_by_all(ranks: Any, until: Any, failed: int) -> None:
    both = ranks(2)
    for rank in both:
        rank.attendance.open(agreed_on(0))
    both[1 - failed].attendance.commit(agreed_on(0))
    both[failed].attendance.fail(agreed_on(0), "StateUnsupported: a lambda")
    both[1 - failed].attendance.wait(100, 60.0)
    assert both[1 - failed].given_up == {100: f"rank {failed}: StateUnsupported: a lambda"}
    for rank in both:
        rank.save(agreed_on(1))
    until(lambda: all(rank.shared for rank in both), "the next step")
    assert [rank.shared for rank in both] == [{101: "0-1"}] * 2


def test_rank_that_opens_a_tag_behind_its_place_is_told_so_at_once(ranks: Any) -> None:
    first, second = ranks(2)
    first.save(agreed_on(0, tag="last"))
    second.go_on()
    with pytest.raises(GangError, match=r"again and again on the same ranks every time"):
        second.attendance.open(agreed_on(0, tag="last"))


@pytest.mark.parametrize("ahead", [0, 1])
def test_step_that_ranks_saved_at_different_places_is_given_up(ranks: Any, until: Any, ahead: int) -> None:
    both = ranks(2)
    both[ahead].go_on()
    for rank in both:
        rank.attendance.open(agreed_on(0, tag="last"))
        rank.attendance.put(agreed_on(0, tag="last"))
    both[1].attendance.commit(agreed_on(0, tag="last"))
    both[0].go_on()
    both[0].attendance.commit(agreed_on(0, tag="last"))  # with its next one
    until(lambda: both[0].given_up and both[1].given_up, "what became of the step")
    assert "at another place" in both[0].given_up[100]


def test_tag_that_the_book_has_forgotten_is_not_taken_for_the_one_that_was_asked_about(ranks: Any, until: Any) -> None:
    first, second = ranks(2)
    first.save(agreed_on(0))
    until(lambda: second.attendance._questions, "the question")
    with pytest.raises(GangError, match="more than 16 tags ago"):
        second.attendance.open(agreed_on(17, tag="tag0", opener=1))


def test_steps_are_given_up_when_the_thread_fails(ranks: Any, until: Any, monkeypatch: Any, caplog: Any) -> None:
    first, second = ranks(2)

    def fail(step: int, sharers: object) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(first.attendance, "_on_sharers", fail)
    second.save(agreed_on(0))
    first.save(agreed_on(0))
    until(lambda: first.given_up, "the failure")
    assert first.given_up == {100: "RuntimeError: unforeseen"}
    first.save(agreed_on(1))
    assert first.given_up[101] == "RuntimeError: unforeseen"
    assert "has failed" in caplog.text


# ---------------------------------------------------------------- scripts for Nebula

NEBULA = """
import faulthandler, sys, torch, torch.distributed as dist
import stepfast.nebula as nm
faulthandler.dump_traceback_later(100, exit=True)
dist.init_process_group("gloo")
rank = dist.get_rank()
"""


def committed(launcher: Any) -> dict[int, list[int]]:
    """The ranks of each committed step."""
    store = open_store(launcher.bench.storage.as_uri())
    folder = job_folder(launcher.bench.job)
    steps = [found.step for found in catalog.committed_steps(store, folder)]
    found = {step: sorted(file.rank for file in catalog.verify_step(store, folder, step)) for step in steps}
    store.close()
    return found


def test_rank_0s_save_is_flushed_where_training_uses_another_group(launcher: Any, start_agent: Any) -> None:
    finished = launcher.run(
        NEBULA
        + """
nm.init(persistent_time_interval=0)
group = dist.new_group([0, 1])
dist.barrier()
if rank == 0:
    nm.Checkpoint("global_step1", 1).save("x", 1)
    nm.flush_persistence()
    print("FLUSHED", flush=True)
dist.all_reduce(torch.ones(1), group=group)
""",
        ranks=2,
        agent=start_agent(),
    )
    assert finished.code == 0, finished.output
    assert "FLUSHED" in finished.output
    assert committed(launcher) == {1: [0]}


def test_flush_returns_where_rank_0_alone_makes_checkpoints(launcher: Any, start_agent: Any) -> None:
    finished = launcher.run(
        NEBULA
        + """
if rank == 0:
    nm.init(persistent_time_interval=0)
    nm.Checkpoint("global_step1", 1).save("x", 1)
    nm.flush_persistence()
dist.barrier()
""",
        ranks=2,
        agent=start_agent(),
    )
    assert finished.code == 0, finished.output
    assert committed(launcher) == {1: [0]}


def test_rank_that_could_not_save_keeps_no_other_waiting(launcher: Any, start_agent: Any) -> None:
    finished = launcher.run(
        NEBULA
        + """
from stepfast.errors import CheckpointNotFound, StateUnsupported
nm.init(persistent_time_interval=0)
dist.barrier()
try:
    nm.Checkpoint("global_step1", 1).save("x", (lambda: 1) if rank == 0 else 1)
except StateUnsupported:
    pass  # training is worth more than this checkpoint
try:
    nm.flush_persistence()
except CheckpointNotFound as error:
    print(error, flush=True)
dist.barrier()
nm.Checkpoint("global_step2", 1).save("x", 1)
dist.barrier()
""",
        ranks=2,
        agent=start_agent(),
    )
    assert finished.code == 0, finished.output
    assert "step 1 is given up by all ranks: rank 0: StateUnsupported: an object of type function" in finished.output
    assert committed(launcher) == {2: [0, 1]}
