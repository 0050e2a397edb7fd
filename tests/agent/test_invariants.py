"""The invariants of the design, each by its name, on real agent processes and real storage."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import deserialize

from eventual import files_in
from stepfast import catalog
from stepfast.commit import try_commit
from stepfast.errors import CheckpointDamaged
from stepfast.layout import manifest_of, parse_part

JOB = "default/train"


def _folder(agent: Any, step: int) -> Path:
    found: Path = agent.storage / JOB / f"global_step{step}"
    return found


def test_i1_step_without_manifest_is_not_listed_and_parts_of_two_runs_are_never_mixed(
    agent: Any, new_agent: Callable[..., Any], ranks: Any
) -> None:
    # Node 0 persists its part in the first attempt, node 1 in the second: together they cover all ranks.
    first = agent.join(rank=0, world_size=2, node=0, run="uid1-0")
    other = new_agent().join(rank=1, world_size=2, node=1, run="uid1-1")
    first.save(5)
    other.save(5)
    ranks.eventually(lambda: len(files_in(_folder(agent, 5), "part-*.json")) == 2, "both parts are written")
    store = agent.store()
    assert try_commit(store, JOB, 5, "uid1-0") is None
    assert try_commit(store, JOB, 5, "uid1-1") is None
    assert catalog.committed_steps(store, JOB) == []
    assert first.client.steps() == ()


def test_i1_slots_of_a_rolled_back_run_are_never_part_of_the_next_run(agent: Any, ranks: Any) -> None:
    old = agent.join(run="uid1-0")
    old.save(50, data_bytes=50_000)
    old.wait_committed(50)
    old.close()
    catalog.supersede_after(agent.store(), JOB, 40)
    new = agent.join(run="uid1-1", resume_step=40)
    new.save(50, data_bytes=60_000)
    new.wait_committed(50)
    (file,) = catalog.verify_step(agent.store(), JOB, 50)
    assert "uid1-1" in file.path
    assert file.size_bytes == ranks.RankFile(rank=0, step=50, data_bytes=60_000).size_bytes


def test_i2_another_node_commits_when_the_agent_of_rank_0_is_killed_after_its_part(
    new_agent: Callable[..., Any], ranks: Any
) -> None:
    leader, follower = new_agent(), new_agent()
    leader.join(rank=0, world_size=2, node=0).save(5)
    ranks.eventually(lambda: files_in(_folder(leader, 5), "part-00000-*"), "rank 0's part is written")
    leader.kill()
    rank = follower.join(rank=1, world_size=2, node=1)
    rank.save(5)
    rank.wait_committed(5)
    parts = [parse_part(path.read_bytes()) for path in _folder(leader, 5).glob("part-*")]
    expected = manifest_of(parts)
    assert expected is not None
    # Whoever writes it writes these bytes.
    assert (_folder(leader, 5) / "manifest.json").read_bytes() == expected.to_bytes()


def test_i3_bytes_in_the_slot_are_the_bytes_of_the_file_and_open_with_safetensors(agent: Any, ranks: Any) -> None:
    rank = agent.join()
    rank.save(5)
    rank.wait_committed(5)
    (path,) = _folder(agent, 5).glob("*.safetensors")
    stored = path.read_bytes()
    fetched, descriptor = rank.client.fetch(f"global_step5/{path.name}")
    try:
        assert (fetched.tier, fetched.offset % 4096) == ("Memory", 0)
        assert os.pread(descriptor, fetched.size_bytes, fetched.offset) == stored
    finally:
        os.close(descriptor)
    file = ranks.RankFile(rank=0, step=5)
    assert stored == file.bytes()
    tensors = dict(deserialize(stored))
    assert bytes(tensors["weights"]["data"]) == file.read(len(file.header) + 16, file.size_bytes)


def test_i4_staged_step_survives_the_death_of_its_rank_and_of_the_agent(
    agent: Any, start_rank: Any, ranks: Any
) -> None:
    rank = start_rank(agent, steps=[5], due=False)
    agent.kill()
    rank.kill()
    assert catalog.latest_step(agent.store(), JOB) is None
    agent.start()
    ranks.eventually(lambda: catalog.latest_step(agent.store(), JOB) == 5, "the step is committed")
    assert len(list(catalog.verify_step(agent.store(), JOB, 5))) == 1


@pytest.mark.parametrize("agent_dies", [False, True], ids=["agent-lives", "agent-dies-too"])
def test_i4_step_before_survives_a_rank_that_is_killed_in_the_middle_of_a_copy(
    agent: Any, start_rank: Any, ranks: Any, agent_dies: bool
) -> None:
    rank = start_rank(agent, steps=[5], half_written=6, due=False)
    rank.kill()
    if agent_dies:
        agent.kill()
        agent.start()
    ranks.eventually(lambda: catalog.latest_step(agent.store(), JOB) == 5, "the step is committed")
    assert agent.terminate() == 0
    assert not _folder(agent, 6).exists()


@pytest.mark.parametrize(
    ("kind", "damage"),
    [(kind, damage) for kind in ("state", "part") for damage in ("flipped", "cut", "missing")]
    + [("manifest", "flipped"), ("manifest", "cut")],  # without its manifest there is no such step: I1
)
def test_i5_damage_names_the_file_and_the_older_step(agent: Any, kind: str, damage: str) -> None:
    rank = agent.join()
    for step in (5, 6):
        rank.save(step)
        rank.wait_committed(step)
    (path,) = _folder(agent, 6).glob(f"{kind}*")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flipped" else data[: len(data) // 2])
    with pytest.raises(CheckpointDamaged) as caught:
        list(catalog.verify_step(agent.store(), JOB, 6))
    assert path.name in str(caught.value)
    assert (caught.value.step, caught.value.older_step) == (6, 5)
    assert len(list(catalog.verify_step(agent.store(), JOB, 5))) == 1


def test_i6_saving_does_not_wait_for_storage_that_never_answers(agent: Any, ranks: Any) -> None:
    rank = agent.join()
    rank.save(1)
    rank.wait_committed(1)
    persister = agent.persisters()[JOB]
    os.kill(persister, signal.SIGSTOP)
    for step in (2, 3):
        rank.save(step)
    assert 2 not in rank.committed()
    os.kill(persister, signal.SIGCONT)
    rank.wait_committed(3)


def test_i6_saving_does_not_wait_for_storage_that_cannot_be_reached(agent: Any, ranks: Any) -> None:
    agent.storage.write_text("a file where the folder belongs")
    rank = agent.join()
    slowest = 0.0
    for step in (1, 2):
        begin = time.monotonic()
        rank.save(step)
        slowest = max(slowest, time.monotonic() - begin)
    ranks.eventually(rank.failures, "the rank is told")
    begin = time.monotonic()
    rank.save(3, drop=(1,))
    assert max(slowest, time.monotonic() - begin) < 5
    ranks.eventually(lambda: agent.job().persist_error, "the status says why")
    waiting = threading.Thread(target=rank.save, args=(4,))  # three steps that are due fill three slots
    waiting.start()
    agent.storage.unlink()
    rank.wait_committed(3, 40)
    waiting.join(20)
    rank.wait_committed(4)


def test_i7_step_that_the_gang_gives_up_is_dropped_whole_and_once(agent: Any, ranks: Any) -> None:
    agent.storage.write_text("a file where the folder belongs")
    gang = agent.gang(2)
    for step in (1, 2):
        for rank in gang:
            rank.save(step)
    ranks.eventually(gang[0].failures, "persisting fails")
    for rank in gang:
        rank.save(3, drop=(1,))
    for rank in gang:
        rank.wait_dropped(1)
    agent.storage.unlink()
    for rank in gang:
        rank.wait_committed(3, 40)
        rank.wait_committed(2, 40)
        assert rank.dropped() == [1]
    assert agent.job().saves.dropped == 1
    assert [found.step for found in catalog.committed_steps(agent.store(), JOB)] == [2, 3]
