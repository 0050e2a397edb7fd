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

from eventual import files_in
from stepfast import catalog
from stepfast.errors import ProtocolError, StorageUnavailable
from stepfast.messages import Expect, GaveUp, Progress, Staged
from stepfast.nodeclient import NodeClient
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


def test_every_launch_that_has_something_left_to_persist_is_told_of(agent: Any, ranks: Any) -> None:
    agent.storage.write_text("a file where the folder belongs")
    rank = agent.join(run="uid1-0")
    rank.save(50)
    ranks.eventually(rank.failures, "persisting fails")
    rank.die()
    for launch in (1, 2, 3):
        agent.join(run=f"uid1-0.{launch}").die()
    runs = [job.run for job in agent.status().jobs]
    assert runs == ["uid1-0", "uid1-0.2", "uid1-0.3"]
    assert agent.job("uid1-0").pending_steps == (50,)
    agent.storage.unlink()
    ranks.eventually(lambda: [job.run for job in agent.status().jobs] == runs[1:], "nothing of it is left", 90)
    assert [found.step for found in catalog.committed_steps(agent.store(), JOB)] == [50]


@pytest.mark.parametrize("end", ["close", "die"])
def test_run_that_goes_on_is_flushed_no_more(agent: Any, ranks: Any, end: str) -> None:
    first = agent.gang(2)
    for rank in first:
        rank.save(1)
    for rank in first:
        rank.wait_committed(1)
        getattr(rank, end)()
    ranks.eventually(lambda: not any(rank.alive for rank in agent.job().ranks), "the agent knows")
    again = agent.gang(2)
    for step, due in ((2, False), (3, True)):
        for rank in again:
            rank.save(step, due=due)
    again[0].wait_committed(3)
    assert agent.job().pending_steps == ()
    assert [found.step for found in catalog.committed_steps(agent.store(), JOB)] == [1, 3]


@pytest.mark.parametrize("data_bytes", [100_000, 30 << 20], ids=["whole", "in windows"])
def test_step_that_is_saved_again_once_it_is_committed_is_waited_for_by_nobody(
    new_agent: Callable[..., Any], ranks: Any, data_bytes: int
) -> None:
    agent = new_agent(memory_limit=20 << 20)
    rank = agent.join()
    rank.save(7, data_bytes=data_bytes)
    rank.wait_committed(7)
    rank.close()
    (path,) = (agent.storage / JOB / "global_step7").glob("*.safetensors")
    stored = path.stat()
    again = agent.join()
    again.save(7, data_bytes=data_bytes)
    again.wait_committed(7)
    assert agent.job().pending_steps == ()
    assert path.stat().st_ino == stored.st_ino, "a file that a manifest names is not written again"
    agent.kill()
    agent.start()
    ranks.eventually(lambda: not any(job.pending_steps for job in agent.status().jobs), "nothing is waited for")


def test_rank_with_one_slot_saves_on_after_it_saved_a_committed_step_again(new_agent: Callable[..., Any]) -> None:
    agent = new_agent(memory_limit=12 << 20)
    rank = agent.join()
    for _ in range(2):
        rank.save(7, data_bytes=9 << 20)
        rank.wait_committed(7)
    assert len(agent.slot_files()) == 1
    rank.save(8, data_bytes=9 << 20)
    rank.wait_committed(8)


def test_file_that_was_streamed_is_not_lost_with_the_persister(new_agent: Callable[..., Any], ranks: Any) -> None:
    agent = new_agent(memory_limit=40 << 20)
    first, second = agent.gang(2)
    first.save(5, data_bytes=30 << 20)  # larger than its share: nothing but the storage has all of it
    ranks.eventually(lambda: files_in(agent.storage, "**/state-00000-*.safetensors"), "the file is stored")

    def is_told() -> bool:
        first.client.send(Expect(size_bytes=1))  # slots that nothing is in are made anew, small
        return agent.used_bytes() < 1 << 20

    ranks.eventually(is_told, "the agent knows, so that nothing is in the slots")
    os.kill(agent.persisters()[JOB], signal.SIGKILL)
    second.save(5)
    first.wait_committed(5)
    assert [file.rank for file in catalog.verify_step(agent.store(), JOB, 5)] == [0, 1]


def test_file_that_was_streamed_is_not_lost_with_a_newer_step(new_agent: Callable[..., Any], ranks: Any) -> None:
    agent = new_agent(memory_limit=40 << 20)
    first, second = agent.gang(2)
    first.save(5, data_bytes=30 << 20)  # larger than its share: nothing but the storage has all of it
    ranks.eventually(lambda: files_in(agent.storage, "**/state-00000-*.safetensors"), "the file is stored")
    first.client.send(GaveUp(step=6))
    first.wait_dropped(6)
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
    ranks.eventually(lambda: files_in(agent.storage, "**/*.tmp"), "the file is on its way")
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
    ranks.eventually(lambda: files_in(agent.storage, "**/*.tmp"), "the file is on its way")
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


# Starts an agent, says which process that is, and waits.
STARTER = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); sys.stdin.read()"


def test_agent_whose_starter_is_dead_removes_the_memory_once_the_last_rank_has_ended(
    new_agent: Any, ranks: Any
) -> None:
    agent = new_agent("--remove-memory")
    assert agent.terminate() == 0
    command = [sys.executable, "-c", STARTER, *agent.command]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as starter:
        assert starter.stdout is not None
        orphan = psutil.Process(int(starter.stdout.readline()))
        try:
            ranks.eventually(lambda: os.path.exists(agent.socket), "the agent serves")
            rank = agent.join()
            rank.save(1)
            rank.wait_committed(1)
            starter.kill()
            starter.wait()
            orphan.send_signal(signal.SIGTERM)
            dying = threading.Timer(1.0, rank.die)  # as one with much memory takes
            dying.start()
            orphan.wait(60)
            dying.join()
        finally:
            if orphan.is_running():
                orphan.kill()
            starter.kill()
    assert not agent.memory_dir.exists()


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
