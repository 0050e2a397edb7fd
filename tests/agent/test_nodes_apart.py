"""Steps whose parts are on several nodes: what an agent does about parts that others owe, or owe no more."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from stepfast import catalog
from stepfast.layout import MANIFEST

if TYPE_CHECKING:
    from faults import HeldStorage

JOB = "default/train"


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


def test_step_is_known_as_incomplete_until_the_storage_lets_wait_for_what_it_holds(
    new_agent: Callable[..., Any], ranks: Any, held_storage: HeldStorage
) -> None:
    held_storage.hold()
    agents = [new_agent(environment=held_storage.environment(name=MANIFEST)) for _ in range(2)]
    here, other = (agent.join(rank=node, world_size=2, node=node) for node, agent in enumerate(agents))
    here.save(1)
    ranks.eventually(lambda: agents[0].job().incomplete_steps == (1,), "another node's part is missed")
    other.save(1)
    ranks.eventually(lambda: agents[0].job().incomplete_steps == (), "it may be there by now")
    assert agents[0].job().pending_steps == (1,)
    held_storage.release()
    here.wait_committed(1)


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


def test_step_counts_as_committed_for_the_run_alone_whose_manifest_it_has(agent: Any, ranks: Any, bench: Any) -> None:
    lonely = agent.join(rank=0, world_size=2, node=0, run="uid1-1")
    lonely.save(5)
    ranks.eventually(lambda: agent.job("uid1-1").pending_bytes == 0, "its part is written")
    lonely.die()
    rank = agent.join(run="uid1-2")
    rank.save(5)
    rank.wait_committed(5)
    ranks.eventually(lambda: not agent.job("uid1-1").pending_steps, "nobody waits for the step any more")
    assert agent.terminate(60) == 0
    rows = bench.history(agent.store(), JOB)
    assert {row["run"]: row["outcome"] for row in rows} == {"uid1-1": "Dropped", "uid1-2": "Committed"}


def test_step_whose_parts_contradict_each_other_is_told_and_given_up(new_agent: Callable[..., Any], ranks: Any) -> None:
    agents = [new_agent("--commit-patience", "2", "--retry-limit", "0.2", "--idle-timeout", "0.3") for _ in range(2)]
    peers = [agent.join(rank=node, world_size=2, node=node) for node, agent in enumerate(agents)]
    for peer, replicated in zip(peers, ("one", "other"), strict=True):
        peer.save(5, replicated=replicated)
    ranks.eventually(lambda: "replicated state differently" in (agents[0].job().persist_error or ""), "it is told")
    peers[0].wait_dropped(5)
    assert "replicated state differently" in peers[0].failures()[0]
    assert (agents[0].job().pending_steps, agents[0].job().persist_error) == ((), None)
    for peer in peers:
        peer.die()
    for agent in agents:
        ranks.eventually(lambda agent=agent: not agent.persisters(), "the job leaves the node")


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


def test_agent_that_restarts_knows_when_what_it_holds_was_committed(new_agent: Callable[..., Any], ranks: Any) -> None:
    """Else a job whose storage has failed for hours would look fresh."""
    agents = [new_agent(), new_agent()]
    peers = [agent.join(rank=node, world_size=2, node=node) for node, agent in enumerate(agents)]
    for peer in peers:
        peer.save(1)
    for peer in peers:
        peer.wait_committed(1)
    time.sleep(1.5)
    restarted = time.time()
    for agent in agents:
        agent.kill()
        agent.start()
    for agent in agents:
        ranks.eventually(lambda agent=agent: agent.job().latest_persisted_step == 1, "it has found its commit")
        assert agent.job().latest_persisted_time < restarted - 1
