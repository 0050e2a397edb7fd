"""Steps that some ranks of a gang alone have files in: whole with theirs, never before it is known whose these are."""

from __future__ import annotations

from typing import Any

import pytest

from stepfast import catalog
from stepfast.commit import read_manifest
from stepfast.messages import Sharers
from stepfast.ranks import UNKNOWN

JOB = "default/train"


def test_step_of_one_rank_is_committed_without_the_others(agent: Any, ranks: Any) -> None:
    first, _ = agent.gang(2)
    first.save(5, sharers="0")
    first.wait_committed(5)
    manifest, parts = catalog.open_step(agent.store(), JOB, 5)
    assert [part.ranks for part in manifest.parts] == [(0, 1)]
    assert [file.rank for part in parts for file in part.files] == [0]
    assert [file.rank for file in catalog.verify_step(agent.store(), JOB, 5)] == [0]


def test_step_of_a_rank_whose_gang_never_said_hello_is_committed(agent: Any, ranks: Any) -> None:
    alone = agent.join(rank=1, local_rank=1, world_size=3, local_world_size=3)
    alone.save(5, sharers="1")
    alone.wait_committed(5)
    assert [part.ranks for part in catalog.open_step(agent.store(), JOB, 5)[0].parts] == [(0, 1, 2)]


def test_step_waits_for_every_rank_that_shares_in_it(agent: Any, ranks: Any) -> None:
    first, second, third = agent.gang(3)
    first.save(5, sharers="0,2")
    second.save(6, sharers="1")
    second.wait_committed(6)
    assert read_manifest(agent.store(), JOB, 5) is None
    third.save(5, sharers="0,2")
    first.wait_committed(5)
    assert [file.rank for file in catalog.verify_step(agent.store(), JOB, 5)] == [0, 2]


def test_step_of_nobody_knows_whom_is_persisted_once_that_is_said(agent: Any, ranks: Any) -> None:
    first, second = agent.gang(2)
    first.save(5, sharers=UNKNOWN)
    second.save(6, sharers="1")
    second.wait_committed(6)
    assert read_manifest(agent.store(), JOB, 5) is None
    first.client.send(Sharers(step=5, ranks="0"))
    first.wait_committed(5)


@pytest.mark.parametrize("order", ["said-before-staged", "said-after-staged"])
def test_all_ranks_may_turn_out_to_share_in_a_step(agent: Any, ranks: Any, order: str) -> None:
    first, second = agent.gang(2)
    first.save(5, sharers=UNKNOWN)
    if order == "said-before-staged":
        first.client.send(Sharers(step=5, ranks="0-1"))
    second.save(5, sharers=UNKNOWN)
    second.client.send(Sharers(step=5, ranks="0-1"))
    first.wait_committed(5)
    assert [file.rank for file in catalog.verify_step(agent.store(), JOB, 5)] == [0, 1]


def test_step_of_nobody_knows_whom_is_not_committed_when_its_ranks_die(agent: Any, ranks: Any, eventually: Any) -> None:
    first, second = agent.gang(2)
    first.save(4, sharers="0")
    first.wait_committed(4)
    first.save(5, sharers=UNKNOWN)
    first.die()
    second.die()
    after = agent.join(run="uid1-1")
    after.save(6)
    after.wait_committed(6)
    assert [found.step for found in catalog.committed_steps(agent.store(), JOB)] == [4, 6]


def test_rank_that_was_copying_when_the_agent_was_killed_is_waited_for(agent: Any, ranks: Any) -> None:
    first, second = agent.gang(3)[:2]
    file = ranks.RankFile(rank=1, step=5)
    reserved, descriptor = second.reserve(5, file.size_bytes)
    second.write_record(descriptor, second.record(5, reserved.seq, file.size_bytes, state="writing", sharers="0-1"))
    first.save(5, sharers="0-1")
    agent.kill()
    agent.start()
    first = agent.join(rank=0, world_size=3, local_world_size=3)
    first.save(6, sharers="0")
    first.wait_committed(6)
    assert read_manifest(agent.store(), JOB, 5) is None
    second = agent.join(rank=1, local_rank=1, world_size=3, local_world_size=3)
    second.save(5, sharers="0-1")
    second.wait_committed(5)
    assert [file.rank for file in catalog.verify_step(agent.store(), JOB, 5)] == [0, 1]


def test_tag_of_a_step_stands_in_its_manifest(agent: Any, ranks: Any) -> None:
    rank = agent.join()
    rank.save(5, tag="epoch=3 – best")
    rank.wait_committed(5)
    manifest = read_manifest(agent.store(), JOB, 5)
    assert manifest is not None
    assert manifest.tag == "epoch=3 – best"


@pytest.mark.parametrize("said", ["1", "0-5"], ids=["of-others", "beyond-the-gang"])
def test_rank_that_says_what_cannot_be_is_cut_off(agent: Any, ranks: Any, said: str) -> None:
    first, second = agent.gang(2)
    first.client.send(Sharers(step=5, ranks=said))
    first.wait_lost()
    second.save(6, sharers="1")
    second.wait_committed(6)
