"""The agent's memory: slots stay within the limit, and come back from ranks and jobs that are gone."""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from eventual import files_in
from stepfast.messages import Expect
from stepfast.slot import CONTROL_BYTES, SlotState

JOB = "default/train"


def save_where_storage_fails(agent: Any, folder: Path) -> Any:
    """A rank of the job default/gone, with a save of 40 MiB that cannot be persisted."""
    blocked = folder / "blocked"
    blocked.write_text("in the place of the storage")
    rank = agent.join(job="default/gone", storage_uri=blocked.as_uri())
    rank.save(1, data_bytes=40 << 20)
    return rank


def test_memory_of_a_job_that_is_gone_and_whose_storage_fails_goes_to_the_living(
    new_agent: Callable[..., Any], ranks: Any, tmp_path: Path
) -> None:
    agent = new_agent("--idle-timeout", "0.3", memory_limit=50 << 20)
    gone = save_where_storage_fails(agent, tmp_path)
    ranks.eventually(lambda: agent.job(job="default/gone").persist_error, "its storage fails")
    gone.die()
    rank = agent.join()
    rank.save(1, data_bytes=40 << 20)
    rank.wait_committed(1)
    assert [path.parts[-3] for path in agent.slot_files()] == ["train"]
    assert "default/gone: given up unpersisted" in agent.log


def test_a_job_that_is_given_up_tries_nothing_again_while_its_persister_ends(
    new_agent: Callable[..., Any], ranks: Any, tmp_path: Path
) -> None:
    agent = new_agent("--idle-timeout", "0.3", memory_limit=50 << 20)
    gone = save_where_storage_fails(agent, tmp_path)
    ranks.eventually(lambda: agent.log.count("was not persisted") >= 3, "the next attempt is two seconds away")
    persister = psutil.Process(agent.persisters()["default/gone"])
    persister.suspend()  # so that it has to be ended by force, which takes longer
    gone.die()
    rank = agent.join()
    rank.save(1, data_bytes=40 << 20)
    rank.wait_committed(1)
    persister.wait(20)  # the agent's log is read after this


@pytest.mark.parametrize("grows", [False, True], ids=["one-slot", "state-that-grows"])
def test_save_that_finds_no_slot_has_what_is_in_its_way_persisted(new_agent: Callable[..., Any], grows: bool) -> None:
    # Neither is due: without the waiting save they would stay in memory alone.
    agent = new_agent(memory_limit=50 << 20)
    rank, size = agent.join(), (20 if grows else 30) << 20
    rank.save(1, data_bytes=size, due=False)
    rank.save(2, data_bytes=size, due=False)
    rank.save(3, data_bytes=30 << 20, due=False)
    rank.wait_committed(2)
    rank.want(3)
    rank.wait_committed(3)


def test_slots_that_were_being_written_serve_again_after_a_restart(agent: Any, ranks: Any) -> None:
    rank = agent.join()
    for step in (1, 2, 3):
        rank.save(step)
        rank.wait_committed(step)
    reserved, descriptor = rank.reserve(4, 50_000)
    rank.write_record(descriptor, rank.record(4, reserved.seq, 50_000, state=SlotState.WRITING))
    os.close(descriptor)
    agent.kill()
    agent.start()
    back = agent.join()
    for step in (5, 6, 7, 8):
        back.save(step)
        back.wait_committed(step)


def test_ranks_killed_in_the_middle_of_copies_do_not_cost_later_attempts_their_slots(agent: Any) -> None:
    for attempt in range(5):
        first, second = agent.gang(2, run=f"uid1-{attempt}")
        base = attempt * 100
        for step in (base + 1, base + 2, base + 3):
            first.save(step)
            second.save(step)
            first.wait_committed(step)
        first.save(base + 50)  # the second rank dies before it stages this
        second.die()
        first.die()
    (rank,) = [agent.join(run="uid1-9", world_size=2, local_world_size=2)]
    held = set()
    for step in (901, 902, 903):
        reserved, descriptor = rank.reserve(step, 150_000)
        os.close(descriptor)
        held.add(reserved.slots)
        rank.save(step, due=False)
    assert held == {3}
    assert len(agent.job(run="uid1-9").ranks) == 1


def test_four_ranks_of_a_quarter_gigabyte_stay_within_two_hundred_megabytes(new_agent: Any, ranks: Any) -> None:
    agent = new_agent(memory_limit=200_000_000)
    gang = agent.gang(4)
    most: list[int] = []
    over = threading.Event()

    def sample() -> None:
        while not over.wait(0.005):
            most.append(agent.used_bytes())

    sampler = threading.Thread(target=sample)
    savers = [threading.Thread(target=rank.save, args=(7,), kwargs={"data_bytes": 256 << 20}) for rank in gang]
    sampler.start()
    try:
        for thread in savers:
            thread.start()
        for thread in savers:
            thread.join(120)
        gang[0].wait_committed(7, 60)
    finally:
        over.set()
        sampler.join()
    assert 0 < max(most) <= 200_000_000
    files = sorted((agent.storage / JOB / "global_step7").glob("*.safetensors"))
    assert len(files) == 4
    with files[2].open("rb") as stored:
        expected = ranks.RankFile(rank=2, step=7, data_bytes=256 << 20)
        for begin in (0, 100 << 20, 250 << 20):
            stored.seek(begin)
            assert stored.read(1 << 20) == expected.read(begin, begin + (1 << 20))


def test_two_jobs_together_stay_within_the_limit(new_agent: Any) -> None:
    limit = 60_000_000
    agent = new_agent(memory_limit=limit)
    first = agent.join()
    other = agent.join(job="default/other", run="uid2-0")
    for step in (1, 2, 3):
        first.save(step, data_bytes=15_000_000)
        first.wait_committed(step)
        assert agent.used_bytes() <= limit
    other.save(1, data_bytes=15_000_000)
    other.wait_committed(1)
    assert agent.used_bytes() <= limit


def test_fewer_and_other_ranks_of_a_later_attempt_stay_within_the_limit(new_agent: Any) -> None:
    limit = 100_000_000
    agent = new_agent(memory_limit=limit)
    gang = agent.gang(4)
    for rank in gang:
        rank.save(1, data_bytes=8_000_000)
    gang[0].wait_committed(1)
    for rank in gang:
        rank.close()
    (alone,) = agent.gang(1, run="uid1-1")
    for step in (2, 3, 4):
        alone.save(step, data_bytes=30_000_000)
        alone.wait_committed(step)
        assert agent.used_bytes() <= limit


def test_slots_that_are_removed_leave_no_memory_behind_although_they_were_persisted(
    new_agent: Callable[..., Any], ranks: Any, tmpfs: Callable[[str], Path]
) -> None:
    agent = new_agent(memory_limit=1 << 30)
    agent.kill()
    shutil.rmtree(agent.memory_dir)
    agent.memory_dir = tmpfs("size=1g")
    agent.start()
    rank = agent.join()
    for step in (1, 2, 3):
        rank.save(step, data_bytes=50_000_000)
        rank.wait_committed(step)
    before = {path.name for path in agent.slot_files()}
    rank.client.send(Expect(size_bytes=5_000_000))
    ranks.eventually(lambda: not before & {path.name for path in agent.slot_files()}, "the slots are of another size")
    ranks.eventually(lambda: len(agent.slot_files()) == 3, "there are three")

    def used_bytes() -> int:
        found = os.statvfs(agent.memory_dir)
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    ranks.eventually(lambda: used_bytes() < 3 * 5_000_000 + (2 << 20), "nothing else is left")


def _leave(agent: Any, ranks: Any, rank: Any) -> None:
    rank.close()
    ranks.eventually(lambda: not agent.job().ranks[0].alive, "it has left")


def test_slot_is_freed_whoever_maps_it_and_the_agent_does_not(new_agent: Callable[..., Any], ranks: Any) -> None:
    agent = new_agent(memory_limit=300 << 20)
    gone = agent.join()
    gone.client.steps()  # its persister runs, and is not to inherit the limit below
    reserved, descriptor = gone.reserve(1, 256 << 20)
    with mmap.mmap(descriptor, CONTROL_BYTES + reserved.capacity_bytes) as mapped:
        mapped[-1] = 7
        _leave(agent, ranks, gone)
        # From now on a map of the slot does not fit into what the agent may have.
        most = psutil.Process(agent.pid).memory_info().vms + (192 << 20)
        resource.prlimit(agent.pid, resource.RLIMIT_AS, (most, most))
        _, beside = agent.join(run="uid1-1", rank=1, world_size=2).reserve(1, 100 << 20)
        os.close(beside)
        assert os.fstat(descriptor).st_blocks == 0
        assert mapped[-1] == 0
    os.close(descriptor)
    assert "slot-" not in Path(f"/proc/{agent.pid}/maps").read_text()


@pytest.mark.parametrize("size", [0, CONTROL_BYTES + 1], ids=["empty", "cut"])
def test_slot_that_its_rank_cut_short_is_freed_all_the_same(
    new_agent: Callable[..., Any], ranks: Any, size: int
) -> None:
    agent = new_agent(memory_limit=50 << 20)
    gone = agent.join()
    _, descriptor = gone.reserve(1, 30 << 20)
    os.ftruncate(descriptor, size)
    _leave(agent, ranks, gone)
    _, beside = agent.join(run="uid1-1", rank=1, world_size=2).reserve(1, 30 << 20)
    os.close(beside)
    assert os.fstat(descriptor).st_blocks == 0
    os.close(descriptor)
    assert [path.parent.name for path in agent.slot_files()] == ["00001"]


def test_rank_that_dies_while_its_slots_are_made_leaves_no_slot_behind(new_agent: Any, ranks: Any) -> None:
    limit = 1 << 30
    agent = new_agent(memory_limit=limit)
    for attempt in range(6):
        rank = agent.join(run=f"uid1-{attempt}")
        rank.client.send(Expect(size_bytes=300 << 20))
        ranks.eventually(lambda: files_in(agent.memory_dir, "**/*slot-*"), "the first slot is being made")
        rank.die()
    last = agent.join(run="uid1-9")
    last.save(1, data_bytes=1_000_000)
    last.wait_committed(1)
    ranks.eventually(lambda: len(agent.slot_files()) <= 3, "only the living rank's slots are there")
    assert agent.used_bytes() <= limit


def test_process_ends_long_before_the_memory_and_is_there_again_for_whoever_comes_back(
    new_agent: Callable[..., Any], ranks: Any
) -> None:
    agent = new_agent("--idle-timeout", "15")
    rank = agent.join()
    rank.save(1)
    rank.wait_committed(1)
    [living] = agent.persisters().values()
    rank.close()
    ranks.eventually(lambda: not agent.persisters(), "nobody needs it")
    assert len(agent.slot_files()) == 3
    again = agent.join(run="uid1-1")
    again.save(2)
    again.wait_committed(2)
    assert again.client.steps() == (1, 2)
    assert living not in agent.persisters().values()
    assert "died" not in agent.log


def test_job_that_nobody_runs_any_more_leaves_neither_memory_nor_a_process(
    new_agent: Callable[..., Any], ranks: Any
) -> None:
    agent = new_agent("--idle-timeout", "0.3")
    rank = agent.join()
    rank.save(1)
    rank.wait_committed(1)
    other = agent.join(job="default/other", run="other-0")
    other.save(1)
    other.wait_committed(1)
    rank.close()
    ranks.eventually(lambda: list(agent.persisters()) == ["default/other"], "its persister ends")
    ranks.eventually(lambda: [path.parts[-3] for path in agent.slot_files()] == ["other"] * 3, "its memory is free")
    again = agent.join(run="uid1-1")
    again.save(2)
    again.wait_committed(2)
    assert again.client.steps() == (1, 2)
    assert not other.lost.is_set()
