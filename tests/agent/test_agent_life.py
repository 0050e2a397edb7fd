"""The life of an agent process: what it adopts and survives, how it ends, what it takes when idle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from stepfast import catalog
from stepfast.errors import ProtocolError, StorageUnavailable
from stepfast.nodeclient import NodeClient
from stepfast.protocol import Expect, Progress, Staged
from stepfast.slot import SlotState
from stepfast.step import JobKey

JOB = "default/train"


def test_gang_of_two_saves_and_the_step_is_committed(agent: Any, ranks: Any) -> None:
    first, second = agent.gang(2)
    first.save(5)
    assert agent.job().latest_persisted_step is None
    second.save(5)
    first.wait_committed(5)
    second.wait_committed(5)
    assert [file.rank for file in catalog.verify_step(agent.store(), JOB, 5)] == [0, 1]


def test_second_agent_on_the_same_memory_folder_is_refused(agent: Any) -> None:
    command = [sys.executable, "-m", "stepfast_sidecar", "--socket", str(agent.folder / "b.sock"), "--node", "other"]
    command += ["--memory-dir", str(agent.memory_dir), "--memory-limit", "1000000"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert (refused.returncode, "another agent's" in refused.stderr) == (1, True), refused.stderr
    rank = agent.join()
    rank.save(1)
    rank.wait_committed(1)


def test_steps_that_another_node_never_completes_hold_up_neither_later_attempts_nor_the_end(
    new_agent: Callable[..., Any], ranks: Any
) -> None:
    agent = new_agent("--commit-patience", "0.5")
    lonely = agent.join(rank=0, world_size=2, node=0, run="uid1-0")
    for step in range(1, 7):
        lonely.save(step)
        ranks.eventually(lambda s=step: s in agent.job("uid1-0").pending_steps, "its part is written")
    lonely.die()
    rank = agent.join(run="uid1-1")
    rank.save(7)
    rank.wait_committed(7)
    ranks.eventually(lambda: not agent.job("uid1-0").pending_steps, "the steps are given up")
    assert agent.terminate(60) == 0  # half of what a flush may take
    assert [found.step for found in catalog.committed_steps(agent.store(), JOB)] == [7]


def test_step_that_lacks_another_nodes_part_keeps_neither_the_agent_nor_memory(
    new_agent: Callable[..., Any], ranks: Any
) -> None:
    agent = new_agent("--idle-timeout", "0.3")
    lonely = agent.join(rank=0, world_size=2, node=0, job="default/gone")
    lonely.save(1)
    ranks.eventually(lambda: agent.job(job="default/gone").pending_steps, "its part is written")
    lonely.die()
    ranks.eventually(lambda: not agent.persisters(), "the job that is gone leaves")
    assert agent.slot_files() == []
    rank = agent.join(rank=0, world_size=2, node=0)
    rank.save(1)
    ranks.eventually(lambda: agent.job().pending_steps, "its part is written")
    assert agent.terminate(60) == 0  # half of what a flush may take


@pytest.mark.parametrize("later", ["uid1-3.1", "uid2-1"], ids=["restarted-in-place", "made-anew"])
def test_newest_run_is_the_one_that_came_last_whatever_its_attempt(agent: Any, ranks: Any, later: str) -> None:
    earlier = agent.join(run="uid1-3", max_to_keep=2)
    earlier.save(1)
    earlier.wait_committed(1)
    earlier.die()
    rank = agent.join(run=later, max_to_keep=2)
    for step in (2, 3, 4):
        rank.save(step)
        rank.wait_committed(step)

    def steps() -> list[int]:
        return [found.step for found in catalog.committed_steps(agent.store(), JOB)]

    ranks.eventually(lambda: steps() == [3, 4], "what is not to be kept is removed")
    assert agent.job(later).latest_persisted_step == 4


@pytest.mark.parametrize("later", ["uid1-1.1", "uid1-2"], ids=["restarted-in-place", "rolled-back"])
def test_newest_step_is_not_given_up_however_long_another_node_takes(
    new_agent: Callable[..., Any], ranks: Any, later: str
) -> None:
    agent, other = new_agent("--commit-patience", "0.2"), new_agent()
    earlier = agent.join(run="uid1-1")
    earlier.save(100)
    earlier.wait_committed(100)
    earlier.die()
    here = agent.join(rank=0, world_size=2, node=0, run=later)
    here.save(30)
    ranks.eventually(lambda: agent.job(later).pending_bytes == 0, "its part is written")
    time.sleep(1.5)  # several times the patience, and several looks
    other.join(rank=1, world_size=2, node=1, run=later).save(30)
    here.wait_committed(30)
    assert here.dropped() == []


def test_step_that_one_node_persisted_and_another_dropped_as_decided_is_pending_no_more(
    new_agent: Callable[..., Any], ranks: Any
) -> None:
    agent, other = new_agent(), new_agent()
    here = agent.join(rank=0, world_size=2, node=0)
    here.save(1)
    ranks.eventually(lambda: agent.job().pending_bytes == 0, "its part is written")
    here.save(2)
    here.save(3, drop=(1,))
    ranks.eventually(lambda: agent.job().pending_steps == (2, 3), "nobody waits for the step that was given up")
    other.join(rank=1, world_size=2, node=1).save(3)
    here.wait_committed(3)
    assert 1 not in agent.job().pending_steps


def test_memory_of_a_job_that_is_gone_and_whose_storage_fails_goes_to_the_living(
    new_agent: Callable[..., Any], ranks: Any, tmp_path: Path
) -> None:
    agent = new_agent("--idle-timeout", "0.3", memory_limit=50 << 20)
    blocked = tmp_path / "blocked"
    blocked.write_text("in the place of the storage")
    gone = agent.join(job="default/gone", storage_uri=blocked.as_uri())
    gone.save(1, data_bytes=40 << 20)
    ranks.eventually(lambda: agent.job(job="default/gone").persist_error, "its storage fails")
    gone.die()
    rank = agent.join()
    rank.save(1, data_bytes=40 << 20)
    rank.wait_committed(1)
    assert [path.parts[-3] for path in agent.slot_files()] == ["train"]
    assert "default/gone: given up unpersisted" in agent.log


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


def test_who_asks_late_is_told_what_became_of_a_step(agent: Any) -> None:
    rank = agent.join()
    rank.save(1)
    rank.wait_committed(1)
    for step in (2, 3, 4, 5):
        rank.save(step, due=False)
    late = agent.join()
    for step in (1, 2, 5):
        late.want(step)
    late.wait_committed(1)
    late.wait_dropped(2)
    late.wait_committed(5)


def test_file_that_was_streamed_is_not_lost_with_the_persister(new_agent: Callable[..., Any], ranks: Any) -> None:
    agent = new_agent(memory_limit=40 << 20)
    first, second = agent.gang(2)
    first.save(5, data_bytes=30 << 20)  # larger than its share: nothing but the storage has all of it
    ranks.eventually(lambda: any(agent.storage.rglob("state-00000-*.safetensors")), "the file is stored")

    def is_told() -> bool:
        first.client.send(Expect(size_bytes=1))  # slots that nothing is in are made anew, small
        return agent.used_bytes() < 1 << 20

    ranks.eventually(is_told, "the agent knows, so that nothing is in the slots")
    os.kill(agent.persisters()[JOB], signal.SIGKILL)
    second.save(5)
    first.wait_committed(5)
    assert [file.rank for file in catalog.verify_step(agent.store(), JOB, 5)] == [0, 1]


def test_windows_that_go_with_the_persister_are_told_and_not_waited_for(
    new_agent: Callable[..., Any], ranks: Any
) -> None:
    agent = new_agent(memory_limit=18 << 20)
    rank, file = agent.join(), ranks.RankFile(rank=0, step=2, data_bytes=20 << 20)
    begin, _ = rank.stage_window(2, file, 0)
    begin, _ = rank.stage_window(2, file, begin)
    ranks.eventually(lambda: list(agent.storage.rglob("*.tmp")), "the file is on its way")
    # The slot of one of these is free again: its window is stored.
    _, descriptor = rank.reserve(2, file.size_bytes, window_begin=begin)
    os.close(descriptor)
    os.kill(agent.persisters()[JOB], signal.SIGSTOP)
    assert rank.stage_window(2, file, begin)[0] == file.size_bytes
    os.kill(agent.persisters()[JOB], signal.SIGKILL)
    rank.wait_dropped(2)
    rank.save(3, data_bytes=20 << 20)
    rank.wait_committed(3)
    assert len(list(catalog.verify_step(agent.store(), JOB, 3))) == 1
    assert agent.job().pending_steps == ()


def test_file_is_begun_again_when_earlier_windows_went_with_the_persister(
    new_agent: Callable[..., Any], ranks: Any
) -> None:
    agent = new_agent(memory_limit=18 << 20)
    rank, file = agent.join(), ranks.RankFile(rank=0, step=2, data_bytes=20 << 20)
    begin, _ = rank.stage_window(2, file, 0)
    ranks.eventually(lambda: list(agent.storage.rglob("*.tmp")), "the file is on its way")
    os.kill(agent.persisters()[JOB], signal.SIGKILL)
    ranks.eventually(lambda: "died with status" in agent.log, "the agent knows")
    with pytest.raises(StorageUnavailable, match="begin again"):
        rank.stage_window(2, file, begin)
    rank.save(2, file=file)
    rank.wait_committed(2)
    assert rank.dropped() == []


@pytest.mark.parametrize("due", [True, False], ids=["due", "memory-only"])
def test_agent_killed_after_staging_commits_the_step_once_restarted(agent: Any, ranks: Any, due: bool) -> None:
    first, second = agent.gang(2)
    second.save(5, due=due)
    first.save(5, due=due)
    agent.kill()
    agent.start()
    ranks.eventually(lambda: catalog.latest_step(agent.store(), JOB) == 5, "the step is committed")
    assert len(list(catalog.verify_step(agent.store(), JOB, 5))) == 2


def test_step_of_which_one_rank_staged_nothing_is_never_persisted_after_a_restart(
    agent: Any, eventually: Callable[..., None]
) -> None:
    first, _ = agent.gang(2)
    first.save(5)
    agent.kill()
    agent.start()
    # The part of half a node would be taken for the whole node's for ever.
    assert agent.terminate() == 0
    assert list(agent.storage.rglob("part-*")) == []


def test_rank_that_copies_while_the_agent_restarts_loses_nothing(agent: Any, ranks: Any) -> None:
    rank = agent.join()
    rank.save(1)
    rank.wait_committed(1)
    file = ranks.RankFile(rank=0, step=2)
    reserved, descriptor = rank.reserve(2, file.size_bytes)
    rank.write_record(descriptor, rank.record(2, reserved.seq, file.size_bytes, state=SlotState.WRITING))
    agent.kill()
    agent.start()
    rank.fill(descriptor, file, 0, file.size_bytes)
    rank.write_record(descriptor, rank.record(2, reserved.seq, file.size_bytes))
    os.close(descriptor)
    back = agent.join()
    back.client.send(Staged(slot=reserved.slot, seq=reserved.seq, stall_seconds=0.0))
    back.wait_committed(2)
    assert (
        agent.storage / JOB / f"global_step2/state-00000-of-00001-{ranks.RUN}.safetensors"
    ).read_bytes() == file.bytes()


def test_rank_offers_again_what_is_persisted_and_stays_connected(agent: Any) -> None:
    rank = agent.join()
    staged = rank.save(1)
    rank.wait_committed(1)
    agent.kill()
    agent.start()
    back = agent.join()
    back.client.send(staged)
    back.save(2)
    back.wait_committed(2)
    assert not back.lost.is_set()


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


def test_persister_killed_with_a_step_in_hand_is_started_again_and_the_step_is_committed(agent: Any) -> None:
    first, second = agent.gang(2)
    first.save(1)
    second.save(1)
    first.wait_committed(1)
    (persister,) = agent.persisters().values()
    os.kill(persister, signal.SIGSTOP)
    first.save(2)
    second.save(2)
    os.kill(persister, signal.SIGKILL)
    first.wait_committed(2)
    assert agent.job().persist_error is None


def test_persister_killed_between_two_windows_has_the_rank_begin_again(new_agent: Any, ranks: Any) -> None:
    agent = new_agent(memory_limit=20_000_000)
    rank = agent.join()
    file = ranks.RankFile(rank=0, step=1, data_bytes=30_000_000)
    rank.client.steps()  # starts the persister
    (persister,) = agent.persisters().values()
    os.kill(persister, signal.SIGSTOP)
    reserved, descriptor = rank.reserve(1, file.size_bytes)
    rank.fill(descriptor, file, 0, reserved.capacity_bytes)
    rank.write_record(descriptor, rank.record(1, reserved.seq, file.size_bytes, window_bytes=reserved.capacity_bytes))
    os.close(descriptor)
    rank.client.send(Staged(slot=reserved.slot, seq=reserved.seq, stall_seconds=0.0))
    rank.client.send(Progress(step=1, time=time.time(), metrics={}))
    ranks.eventually(lambda: agent.job().ranks[0].global_step == 1, "the agent has taken the window in before it")
    os.kill(persister, signal.SIGKILL)
    ranks.eventually(lambda: agent.job().persist_error, "the loss was noticed")
    with pytest.raises(Exception, match="begin again"):
        rank.reserve(1, file.size_bytes, window_begin=reserved.capacity_bytes)
    rank.save(1, file=file)
    rank.wait_committed(1)


def test_sigterm_persists_all_that_is_staged_and_leaves_nothing_behind(new_agent: Any) -> None:
    agent = new_agent("--remove-memory")
    first, second = agent.gang(2)
    first.save(3, due=False)
    second.save(3, due=False)
    first.die()
    second.close()
    assert agent.terminate() == 0
    assert catalog.latest_step(agent.store(), JOB) == 3
    assert not agent.memory_dir.exists()
    assert not os.path.exists(agent.socket)
    assert not any(
        "stepfast_sidecar.persister" in (process.info["cmdline"] or [])
        and agent.storage_uri in " ".join(process.info["cmdline"])
        for process in psutil.process_iter(["cmdline"])
    )
    assert [path.name for path in agent.storage.rglob(".*")] == []


def test_agent_that_ends_under_living_ranks_leaves_them_their_memory(new_agent: Any) -> None:
    agent = new_agent("--remove-memory")
    rank = agent.join()
    staged = rank.save(1)
    rank.wait_committed(1)
    assert agent.terminate() == 0
    agent.start()
    back = agent.join()
    back.client.send(staged)
    back.save(2)
    back.wait_committed(2)
    assert not back.lost.is_set()


def test_agent_that_cannot_persist_what_is_staged_says_so_by_its_exit_status(new_agent: Any) -> None:
    agent = new_agent("--remove-memory", "--flush-timeout", "0.5", "--storage-deadline", "0.2", "--retry-limit", "0.2")
    agent.storage.rmdir() if agent.storage.exists() else None
    agent.storage.write_text("in the place of the storage")
    rank = agent.join()
    rank.save(3)
    assert agent.terminate() == 3
    assert agent.slot_files()
    agent.storage.unlink()
    agent.options = ("--remove-memory",)
    assert agent.start().terminate() == 0
    assert catalog.latest_step(agent.store(), JOB) == 3
    assert not agent.memory_dir.exists()


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


def test_rank_that_dies_while_its_slots_are_made_leaves_no_slot_behind(new_agent: Any, ranks: Any) -> None:
    limit = 1 << 30
    agent = new_agent(memory_limit=limit)
    for attempt in range(6):
        rank = agent.join(run=f"uid1-{attempt}")
        rank.client.send(Expect(size_bytes=300 << 20))
        ranks.eventually(lambda: list(agent.memory_dir.rglob("*slot-*")), "the first slot is being made")
        rank.die()
    last = agent.join(run="uid1-9")
    last.save(1, data_bytes=1_000_000)
    last.wait_committed(1)
    ranks.eventually(lambda: len(agent.slot_files()) <= 3, "only the living rank's slots are there")
    assert agent.used_bytes() <= limit


def test_idle_agent_takes_little_memory_and_almost_no_time(agent: Any) -> None:
    rank = agent.join()
    rank.save(1)
    rank.wait_committed(1)
    processes = [psutil.Process(pid) for pid in (agent.pid, *agent.persisters().values())]

    def busy_seconds() -> float:
        return sum(times.user + times.system for times in (process.cpu_times() for process in processes))

    before, begin = busy_seconds(), time.monotonic()
    threading.Event().wait(5.0)  # what is measured is time itself
    assert (busy_seconds() - before) / (time.monotonic() - begin) < 0.01
    assert sum(process.memory_full_info().uss for process in processes) < 60_000_000


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
    assert [path.parts[-3] for path in agent.slot_files()] == ["other"] * 3
    again = agent.join(run="uid1-1")
    again.save(2)
    again.wait_committed(2)
    assert again.client.steps() == (1, 2)
    assert not other.lost.is_set()


def test_two_hundred_connections_leave_no_descriptor_open(agent: Any, ranks: Any) -> None:
    rank = agent.join()
    rank.save(1)
    rank.wait_committed(1)
    rank.close()
    agent.status()
    ranks.eventually(lambda: agent.descriptors() <= 20, "only the agent's own descriptors are open")
    before = agent.descriptors()
    for count in range(200):
        if count % 2:
            NodeClient(agent.socket).status()
            continue
        peer = ranks.RankPeer(agent.socket, agent.hello(run="uid1-1"))
        if count % 4:
            peer.client.fetch("global_step1/manifest.json")
        peer.save(count + 2, due=False)
        peer.close() if count % 8 else peer.die()
    ranks.eventually(lambda: agent.descriptors() <= before, "all descriptors are given back")


def test_persister_serves_a_supervisor_of_any_process_id_and_ends_without_its_own(tmp_path: Path) -> None:
    # In a container the agent is process 1: that is no sign of its death.
    command = [
        sys.executable,
        "-m",
        "stepfast_sidecar.persister",
        f"--storage-uri={tmp_path}",
        "--folder",
        "a/b",
    ]
    asked = json.dumps({"id": 1, "command": "steps", "values": {}})
    ours = [*command, "--supervisor", str(os.getpid())]
    served = subprocess.run(ours, input=asked, capture_output=True, text=True, timeout=90, check=True)
    assert json.loads(served.stdout) == {"id": 1, "ok": True, "values": {"steps": []}}
    orphan = subprocess.run(
        [*command, "--supervisor", "1"], input=asked, capture_output=True, text=True, timeout=90, check=False
    )
    assert (orphan.returncode, orphan.stdout) == (1, "")


def test_rank_is_told_why_when_it_speaks_another_version(agent: Any, ranks: Any) -> None:
    greeting = agent.hello()
    object.__setattr__(greeting, "version", 99)
    with pytest.raises(ProtocolError, match="99"):
        ranks.RankPeer(agent.socket, greeting)
    assert agent.status().job(JobKey.parse(JOB), ranks.RUN) is None
