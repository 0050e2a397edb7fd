"""Steps in the memory of a second node: real agents, each with an API server of its own, and what is lost with one."""

from __future__ import annotations

import os
import signal
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from eventual import files_in
from stepfast import catalog
from stepfast.layout import data_path
from stepfast.messages import Sharers, Staged
from stepfast.ranks import UNKNOWN, RankSet
from stepfast.slot import CONTROL_BYTES, MAX_SHARERS_BYTES
from stepfast.step import Tier

JOB, RUN = "default/train", "uid1-1"


def gang_of_two(ring: Any, eventually: Callable[..., None]) -> list[Any]:
    """A gang of two nodes with a rank each, which has begun."""
    agents = [ring.add(), ring.add()]
    ring.form(eventually, 0, 1)
    return [agent.join(rank=node, world_size=2, node=node, run=RUN) for node, agent in enumerate(agents)]


def gang_of_two_with_a_mirror(ring: Any, eventually: Callable[..., None]) -> list[Any]:
    """One whose first step is committed, and node 1's held by node 0."""
    peers = gang_of_two(ring, eventually)
    for peer in peers:
        peer.save(1)
    peers[0].wait_committed(1)
    eventually(lambda: mirror_of(ring, 0, 1), "the other node's step is held")
    return peers


def path_of(step: int, rank: int, run: str = RUN) -> str:
    return data_path(step, run, "state", rank, 2)


def mirror_of(ring: Any, member: int, step: int) -> bool:
    """Whether that agent says it holds the step of its only neighbour."""
    return [mirror["step"] for mirror in ring.status(member).get("mirrors", ())] == [step]


def read(fetched: tuple[Any, int]) -> tuple[bytes, str]:
    message, descriptor = fetched
    try:
        return os.pread(descriptor, message.size_bytes, message.offset), message.tier
    finally:
        os.close(descriptor)


def mirror_files(agent: Any) -> list[Path]:
    return files_in(agent.memory_dir, "*/*/mirrors/*/*/*")


def committed(agent: Any) -> list[int]:
    return [found.step for found in catalog.committed_steps(agent.store(), JOB)]


def test_newest_step_of_each_node_is_held_by_the_next_and_no_older_one(
    ring: Any, ranks: Any, eventually: Callable[..., None]
) -> None:
    peers = gang_of_two(ring, eventually)
    for step in (1, 2, 3):
        for peer in peers:
            peer.save(step)
        peers[0].wait_committed(step)
        eventually(lambda s=step: mirror_of(ring, 0, s) and mirror_of(ring, 1, s), "both hold the other's step")
        eventually(lambda: [len(mirror_files(agent)) for agent in ring.agents] == [1, 1], "the older one is let go")
    (file,) = mirror_files(ring.agents[1])
    assert file.read_bytes()[CONTROL_BYTES:][: ranks.RankFile(rank=0, step=3).size_bytes] == (
        ranks.RankFile(rank=0, step=3).bytes()
    )
    eventually(lambda: ring.status(0).get("mirroredStep") == 3, "it is told how far the mirror is")


# ---------------------------------------------------------------- a node is lost


def lose(agent: Any) -> None:
    """Its plug is pulled: nothing of its memory is left."""
    for peer in agent.peers:
        peer.die()
    agent.kill()
    for file in agent.slot_files():
        file.unlink()


def hold_back_persisting(agent: Any) -> Any:
    """From now on the agent stages, and nothing it holds gets to the storage."""
    persister = agent.persister(JOB)
    persister.suspend()
    return persister


@pytest.mark.parametrize("lost", [0, 1], ids=["of-rank-0", "of-another-rank"])
def test_step_that_a_lost_node_alone_had_in_memory_is_committed_by_its_mirror(
    ring: Any, ranks: Any, eventually: Callable[..., None], lost: int
) -> None:
    peers = gang_of_two(ring, eventually)
    living = 1 - lost
    for peer in peers:
        peer.save(1)
    for peer in peers:
        peer.wait_committed(1)
    hold_back_persisting(ring.agents[lost])
    for peer in peers:
        peer.save(2)
    eventually(lambda: mirror_of(ring, living, 2), "the step is held by the other node")
    lose(ring.agents[lost])
    peers[living].die()
    ring.flush(living)
    eventually(lambda: 2 in ring.status(living)["pendingSteps"], "the operator is told to wait")
    eventually(lambda: committed(ring.agents[living]) == [1, 2], "the step is committed")
    eventually(lambda: not ring.status(living)["pendingSteps"], "nobody waits any more")
    store = ring.agents[living].store()
    assert list(catalog.verify_step(store, JOB, 2))
    file = ranks.RankFile(rank=lost, step=2)
    assert store.read(f"{JOB}/{path_of(2, lost)}") == file.bytes()


def test_mirrors_are_told_of_when_nothing_else_of_their_run_is_left(ring: Any, eventually: Callable[..., None]) -> None:
    peers = gang_of_two_with_a_mirror(ring, eventually)
    hold_back_persisting(ring.agents[1])
    for peer in peers:
        peer.save(2)
    eventually(lambda: mirror_of(ring, 0, 2), "the step is held by the other node")
    lose(ring.agents[1])
    peers[0].die()
    eventually(lambda: ring.status(0)["pendingBytes"] == 0, "its own part is written")
    again = ring.agents[0]
    again.kill()
    for file in again.slot_files():
        file.unlink()
    again.start()
    for launch in (1, 2):
        again.join(rank=0, world_size=2, node=0, run=f"{RUN}.{launch}").die()
    persister = hold_back_persisting(again)
    ring.flush(0)
    eventually(
        lambda: [job.pending_steps for job in again.status().jobs if job.run == RUN] == [(2,)],
        "the operator is told to wait",
    )
    persister.resume()
    eventually(lambda: committed(again) == [1, 2], "the step is committed")


def test_node_that_lives_persists_its_own_steps(ring: Any, eventually: Callable[..., None]) -> None:
    peers = gang_of_two(ring, eventually)
    for peer in peers:
        peer.save(1)
    eventually(lambda: mirror_of(ring, 0, 1) and mirror_of(ring, 1, 1), "both are mirrored")
    persister = hold_back_persisting(ring.agents[1])
    for peer in peers:
        peer.save(2)
    eventually(lambda: mirror_of(ring, 0, 2), "the second step is mirrored")
    peers[0].die()
    ring.flush(0)
    heard = "1.5 s: it has been heard since"
    eventually(lambda: ring.status(0)["pendingBytes"] == 0, heard)
    persister.resume()
    peers[1].wait_committed(2)
    assert "is persisted here" not in ring.agents[0].log


def test_lost_nodes_ranks_restore_from_memory_elsewhere(ring: Any, ranks: Any, eventually: Callable[..., None]) -> None:
    peers = gang_of_two_with_a_mirror(ring, eventually)
    lose(ring.agents[1])
    peers[0].die()
    newcomer = ring.add()
    ring.form(eventually, 0, 2, run="uid1-2")
    stayed = ring.agents[0].join(rank=0, world_size=2, node=0, run="uid1-2")
    replaced = newcomer.join(rank=1, world_size=2, node=1, run="uid1-2")
    wanted = [ranks.RankFile(rank=rank, step=1).bytes() for rank in (0, 1)]
    for rank in (0, 1):
        path = path_of(1, rank)
        assert read(stayed.client.fetch(path)) == (wanted[rank], Tier.MEMORY), "its own slot, and its mirror"
        eventually(lambda p=path: read(replaced.client.fetch(p))[1] == Tier.MEMORY, "the gang is known there")
        assert read(replaced.client.fetch(path))[0] == wanted[rank]
        assert read(replaced.client.fetch(path, refresh=True)) == (wanted[rank], Tier.PERSISTENT)


_SLOW_MEMORY = """
import sys

if "stepfast_sidecar" in sys.orig_argv:
    import os, time
    from stepfast_sidecar import neighbours

    def posix_fallocate(descriptor, offset, size_bytes, really=os.posix_fallocate):
        if size_bytes > LARGE:
            time.sleep(3 * SILENCE)
        really(descriptor, offset, size_bytes)

    neighbours._SILENCE_SECONDS = SILENCE
    os.posix_fallocate = posix_fallocate
"""


def test_memory_of_a_large_file_may_take_longer_to_be_made_than_a_connection_is_silent(
    ring: Any, inject: Callable[[str], dict[str, str]], eventually: Callable[..., None]
) -> None:
    large = 8 << 20
    agents = [ring.add(environment=inject(f"LARGE, SILENCE = {large}, 4.0\n{_SLOW_MEMORY}")), ring.add()]
    ring.form(eventually, 0, 1)
    peers = [agent.join(rank=node, world_size=2, node=node, run=RUN) for node, agent in enumerate(agents)]
    peers[0].save(1)
    peers[1].save(1, data_bytes=large)
    peers[0].wait_committed(1)
    eventually(lambda: mirror_of(ring, 0, 1), "the large step is held")


def test_node_that_is_busy_for_a_moment_is_asked_again(ring: Any, ranks: Any, eventually: Callable[..., None]) -> None:
    gang_of_two_with_a_mirror(ring, eventually)
    lose(ring.agents[1])
    newcomer = ring.add()
    ring.form(eventually, 0, 2, run="uid1-2")
    rank = newcomer.join(rank=1, world_size=2, node=1, run="uid1-2")
    eventually(lambda: read(rank.client.fetch(path_of(1, 0)))[1] == Tier.MEMORY, "the gang is known there")
    with ThreadPoolExecutor(1) as thread:
        ring.agents[0].process.send_signal(signal.SIGSTOP)
        try:
            fetching = thread.submit(lambda: read(rank.client.fetch(path_of(1, 1))))
            eventually(lambda: "is asked again" in newcomer.log, "it did not answer in time")
        finally:
            ring.agents[0].process.send_signal(signal.SIGCONT)
        assert fetching.result(30) == (ranks.RankFile(rank=1, step=1).bytes(), Tier.MEMORY)


def test_file_that_no_node_holds_comes_from_the_storage(ring: Any, ranks: Any, eventually: Callable[..., None]) -> None:
    peers = gang_of_two(ring, eventually)
    for step in (1, 2):
        for peer in peers:
            peer.save(step)
        peers[0].wait_committed(step)
    eventually(lambda: mirror_of(ring, 0, 2) and mirror_of(ring, 1, 2), "the newest is mirrored")
    for agent in ring.agents:
        lose(agent)
    newcomer = ring.add()
    ring.form(eventually, 2, 0, run="uid1-2")  # one of its neighbours is not there
    rank = newcomer.join(rank=0, world_size=2, node=0, run="uid1-2")
    assert read(rank.client.fetch(path_of(2, 1))) == (ranks.RankFile(rank=1, step=2).bytes(), Tier.PERSISTENT)


def test_mirrored_step_that_is_given_up_leaves_memory(ring: Any, eventually: Callable[..., None]) -> None:
    """Another node never staged its part of it, and training goes on from an older one."""
    agents = [ring.add("--commit-patience", "1"), ring.add()]
    ring.form(eventually, 0, 1)
    peers = [agent.join(rank=node, world_size=2, node=node, run=RUN) for node, agent in enumerate(agents)]
    peers[1].save(2)
    eventually(lambda: mirror_of(ring, 0, 2), "the step is held by the other node")
    hold_back_persisting(agents[1])
    lose(agents[1])
    peers[0].die()
    ring.flush(0)
    eventually(lambda: "its step 2 is persisted here" in agents[0].log, "it is taken over")
    agents[0].join(rank=0, world_size=2, node=0, run="uid1-2")
    eventually(lambda: "step 2 is given up" in agents[0].log, "nobody completes it any more")
    eventually(lambda: not mirror_files(agents[0]), "its memory is free")
    eventually(lambda: agents[0].status().memory_used_bytes == 0, "nothing of it is counted")
    eventually(lambda: "mirrors" not in ring.status(0), "nor told of")


# ---------------------------------------------------------------- kills

_SLOW = ("--mirror-bandwidth", str(16 << 20))
_LARGE = 64 << 20  # takes seconds at that
_MOST_SAVES = 500


def building(agent: Any) -> list[Path]:
    return [path for path in mirror_files(agent) if path.name.startswith(".")]


def begin_large_mirror(ring: Any, eventually: Callable[..., None]) -> tuple[Any, Any]:
    """Node 1's step of 64 MiB is on its way to node 0; returns the ranks."""
    ring.add()
    ring.add(*_SLOW)
    ring.form(eventually, 0, 1)
    first, second = (
        agent.join(rank=node, world_size=2, node=node, run=RUN, max_to_keep=2)  # of what is large
        for node, agent in enumerate(ring.agents)
    )
    first.save(1)
    second.save(1, data_bytes=_LARGE)
    eventually(lambda: building(ring.agents[0]), "it is on its way")
    return first, second


def test_sender_killed_in_the_middle_leaves_nothing_behind(ring: Any, eventually: Callable[..., None]) -> None:
    begin_large_mirror(ring, eventually)
    lose(ring.agents[1])
    eventually(lambda: not mirror_files(ring.agents[0]), "half of it is let go")
    assert "mirrors" not in ring.status(0)


def test_receiver_killed_in_the_middle_takes_no_half_for_a_whole(
    ring: Any, ranks: Any, eventually: Callable[..., None]
) -> None:
    begin_large_mirror(ring, eventually)
    receiver = ring.agents[0]
    receiver.kill()
    assert building(receiver), "half of it is in memory"
    receiver.start()
    assert not [path for path in mirror_files(receiver) if not path.name.startswith(".")]
    eventually(lambda: mirror_of(ring, 0, 1), "it is sent again")
    (file,) = mirror_files(receiver)
    whole = ranks.RankFile(rank=1, step=1, data_bytes=_LARGE).bytes()
    assert file.read_bytes()[CONTROL_BYTES:][: len(whole)] == whole


def test_mirror_survives_its_agent(ring: Any, ranks: Any, eventually: Callable[..., None]) -> None:
    gang_of_two_with_a_mirror(ring, eventually)
    ring.agents[0].kill()
    lose(ring.agents[1])
    ring.agents[0].start()
    rank = ring.agents[0].join(rank=0, world_size=2, node=0, run="uid1-2")
    assert read(rank.client.fetch(path_of(1, 1))) == (ranks.RankFile(rank=1, step=1).bytes(), Tier.MEMORY)


def test_mirror_of_a_step_of_some_ranks_alone_is_whole_to_the_next_agent(
    ring: Any, eventually: Callable[..., None]
) -> None:
    """Who shares in it was said once it was staged."""
    peers = gang_of_two_with_a_mirror(ring, eventually)
    hold_back_persisting(ring.agents[1])
    peers[1].save(2, sharers=UNKNOWN)
    peers[1].client.send(Sharers(step=2, ranks="1"))
    eventually(lambda: mirror_of(ring, 0, 2), "the step is held by the other node")
    ring.agents[0].kill()
    lose(ring.agents[1])
    ring.agents[0].start()
    ring.flush(0)
    eventually(lambda: committed(ring.agents[0]) == [1, 2], "the step is committed")


def test_next_agent_is_told_who_shares_in_a_step_that_it_holds(ring: Any, eventually: Callable[..., None]) -> None:
    """They are more than a control page can say."""
    agents = [ring.add(), ring.add()]
    ring.form(eventually, 0, 1)
    agents[0].join(rank=0, world_size=2000, node=0, run=RUN)
    rank = agents[1].join(rank=1, world_size=2000, node=1, run=RUN)
    rank.save(1, sharers=UNKNOWN)
    sharers = str(RankSet.of(number * number for number in range(1, 45)))
    rank.client.send(Sharers(step=1, ranks=sharers))
    assert len(sharers) > MAX_SHARERS_BYTES

    def is_whole() -> bool:
        return [mirror.step for job in agents[0].status().jobs for mirror in job.mirrors] == [1]

    eventually(is_whole, "the step is held by the other node")
    agents[0].kill()
    agents[0].start()
    eventually(is_whole, "it is whole there again")


def test_run_that_saves_faster_than_the_network_carries_has_a_mirror_nevertheless(
    ring: Any, eventually: Callable[..., None]
) -> None:
    first, second = begin_large_mirror(ring, eventually)
    step = 1
    while not ring.status(0).get("mirrors"):
        assert step < _MOST_SAVES, "none is ever held"
        step += 1
        first.save(step)
        second.save(step, data_bytes=_LARGE)
        first.wait_committed(step)
    assert step > 3, "more saves than slots"
    eventually(lambda: mirror_of(ring, 0, step), "in the end the newest is held")


# ---------------------------------------------------------------- bounds


def test_mirrors_take_no_more_memory_than_they_may(ring: Any, eventually: Callable[..., None]) -> None:
    ring.add("--mirror-memory", "50000")
    ring.add()
    ring.form(eventually, 0, 1)
    peers = [agent.join(rank=node, world_size=2, node=node, run=RUN) for node, agent in enumerate(ring.agents)]
    for peer in peers:
        peer.save(1)
    peers[0].wait_committed(1)
    eventually(lambda: "50000 that mirrors may take" in ring.status(1).get("mirrorError", ""), "it is told")
    assert mirror_files(ring.agents[0]) == []
    eventually(lambda: mirror_of(ring, 1, 1), "the other way round there is room")


def test_slots_take_the_memory_of_mirrors(ring: Any, eventually: Callable[..., None]) -> None:
    ring.add(memory_limit=4 << 20)
    ring.add()
    ring.form(eventually, 0, 1)
    peers = [agent.join(rank=node, world_size=2, node=node, run=RUN) for node, agent in enumerate(ring.agents)]
    peers[0].save(1)
    peers[1].save(1, data_bytes=1 << 20)
    eventually(lambda: mirror_of(ring, 0, 1), "it is held")
    peers[0].save(2, data_bytes=1 << 20)  # three slots of a MiB each
    peers[1].save(2, data_bytes=1 << 20)
    peers[0].wait_committed(2)
    eventually(lambda: len(ring.agents[0].slot_files()) == 3, "it has all its slots")
    assert ring.agents[0].status().memory_used_bytes <= 4 << 20


# ---------------------------------------------------------------- other jobs' mirrors

_OTHER, _OTHER_RUN = "other/fetches", "uid2-1"
_OTHER_WORLD = 3


def hold_a_mirror_beside_another_job(ring: Any, eventually: Callable[..., None], **settings: Any) -> list[Any]:
    """Agent 2 (started with `settings`) holds a step of agent 0's rank; returns the ranks of another job, one on each
    agent, of which agent 1 mirrors what agent 0 has.
    """
    for more in ({}, {}, settings):
        ring.add(**more)
    ring.form_gangs(eventually, {(JOB, RUN): (0, 2), (_OTHER, _OTHER_RUN): (0, 1, 2)})
    first = ring.agents[0].join(rank=0, world_size=2, node=0, run=RUN)
    ring.agents[2].join(rank=1, world_size=2, node=1, run=RUN)
    first.save(1, data_bytes=1 << 20)
    eventually(lambda: mirror_of(ring, 2, 1), "it is held")
    return [
        agent.join(job=_OTHER, rank=node, world_size=_OTHER_WORLD, node=node, run=_OTHER_RUN)
        for node, agent in enumerate(ring.agents)
    ]


def mirrors_of_the_job(agent: Any) -> list[Path]:
    return files_in(agent.memory_dir, f"{JOB}/mirrors/*/*/*")


def test_rank_that_rewrites_its_control_page_takes_no_memory_from_other_jobs_elsewhere(
    ring: Any, ranks: Any, eventually: Callable[..., None]
) -> None:
    liar, _, asking = hold_a_mirror_beside_another_job(ring, eventually)
    held = mirrors_of_the_job(ring.agents[2])
    neighbour, file = ring.agents[1], ranks.RankFile(rank=0, step=1)
    reserved, descriptor = liar.reserve(1, file.size_bytes)
    try:
        liar.fill(descriptor, file, 0, file.size_bytes)
        honest = liar.record(1, reserved.seq, file.size_bytes)
        liar.write_record(descriptor, honest)
        liar.client.send(Staged(slot=reserved.slot, seq=reserved.seq, stall_seconds=0.0))
        eventually(lambda: mirror_files(neighbour) and not building(neighbour), "another node has it, as it is")
        liar.write_record(descriptor, replace(honest, file_bytes=1 << 44, window_bytes=1 << 44))
    finally:
        os.close(descriptor)
    path = data_path(1, _OTHER_RUN, "state", 0, _OTHER_WORLD)
    assert read(asking.client.fetch(path)) == (file.bytes(), Tier.MEMORY), "from the node that tells the truth"
    assert "no room" not in ring.agents[2].log
    assert mirrors_of_the_job(ring.agents[2]) == held


def test_file_for_which_memory_has_no_room_comes_from_the_storage_and_other_jobs_mirrors_stay(
    ring: Any, ranks: Any, eventually: Callable[..., None]
) -> None:
    peers = hold_a_mirror_beside_another_job(ring, eventually, memory_limit=4 << 20)
    held = mirrors_of_the_job(ring.agents[2])
    large = 3 << 20
    peers[0].save(1, data_bytes=large)
    for peer in peers[1:]:
        peer.save(1)
    peers[2].wait_committed(1)
    path = data_path(1, _OTHER_RUN, "state", 0, _OTHER_WORLD)
    wanted = ranks.RankFile(rank=0, step=1, data_bytes=large).bytes()
    assert read(peers[2].client.fetch(path)) == (wanted, Tier.PERSISTENT)
    assert "no room" in ring.agents[2].log
    assert mirrors_of_the_job(ring.agents[2]) == held


# ---------------------------------------------------------------- who may


def test_nobody_listens_unless_it_is_asked_for(new_agent: Callable[..., Any]) -> None:
    agent = new_agent()
    listening = [c for c in psutil.Process(agent.pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert listening == []
    assert agent.status().mirror_address is None


@pytest.mark.parametrize("wrong", ["authority", "name"])
def test_agent_without_a_certificate_for_agents_is_nobody(
    ring: Any, eventually: Callable[..., None], tmp_path: Path, wrong: str
) -> None:
    other = tmp_path / "other-authority"
    other.mkdir()
    bad = type(ring.authority)(other).issue() if wrong == "authority" else ring.authority.issue("web.example.com")
    ring.add()
    ring.add(credentials=bad)
    ring.form(eventually, 0, 1)
    peers = [agent.join(rank=node, world_size=2, node=node, run=RUN) for node, agent in enumerate(ring.agents)]
    for peer in peers:
        peer.save(1)
    for peer in peers:
        peer.wait_committed(1)
    for member in (0, 1):  # it neither takes from it nor gives to it
        eventually(lambda m=member: ring.status(m).get("mirrorError"), "it is told")
        assert mirror_files(ring.agents[member]) == []


def test_whoever_only_connects_holds_up_nobody(ring: Any, eventually: Callable[..., None]) -> None:
    """A pod that reaches the port, and speaks no TLS, or has no certificate."""
    ring.add()
    strangers = [socket.create_connection(("127.0.0.1", ring.ports[0])) for _ in range(8)]
    try:
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with context.wrap_socket(socket.create_connection(("127.0.0.1", ring.ports[0]))) as bare:
            with pytest.raises(ssl.SSLError, match="certificate required"):
                bare.recv(1)
        ring.add()
        ring.form(eventually, 0, 1)
        peers = [agent.join(rank=node, world_size=2, node=node, run=RUN) for node, agent in enumerate(ring.agents)]
        for peer in peers:
            peer.save(1)
        eventually(lambda: mirror_of(ring, 0, 1), "it is held")
    finally:
        for stranger in strangers:
            stranger.close()


def test_step_of_a_gang_that_the_operator_does_not_name_is_not_taken(
    ring: Any, eventually: Callable[..., None]
) -> None:
    ring.add()
    ring.add()
    ring.form(eventually, 1, 0)
    ring.apis[0].name_gangs()
    peers = [agent.join(rank=1 - node, world_size=2, node=1 - node, run=RUN) for node, agent in enumerate(ring.agents)]
    for peer in peers:
        peer.save(1)
    eventually(lambda: "no gang of uid1-1 is known" in ring.status(1).get("mirrorError", ""), "it is refused")
    assert mirror_files(ring.agents[0]) == []
    ring.form(eventually, 1, 0)
    eventually(lambda: mirror_of(ring, 0, 1), "it is taken once it is named")


def test_agents_that_end_leave_no_connection_and_no_half(ring: Any, eventually: Callable[..., None]) -> None:
    begin_large_mirror(ring, eventually)
    for agent in ring.agents:
        for peer in agent.peers:
            peer.close()
        agent.process.send_signal(signal.SIGTERM)
    for agent in ring.agents:
        assert agent.process.wait(60) == 0, agent.log
