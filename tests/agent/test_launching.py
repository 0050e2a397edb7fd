"""What a launcher announces is a hint: it costs no job anything, whatever it says and however often."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepfast.client import connect
from stepfast.messages import VERSION, Launching
from stepfast.protocol import ANSWER_LIMIT, Decoder, encode


def _launching(agent: Any, **values: Any) -> Launching:
    usual = {"job": "default/train", "run": "uid1-1", "storage_uri": agent.storage_uri, "first_rank": 0, "ranks": 1}
    return Launching(**{"version": VERSION, "resume_step": None, **usual, **values})


def _announce(path: str, launching: Launching) -> list[Any]:
    """Says it, and reads until the agent has ended the connection."""
    with connect(path, 30) as sock:
        sock.sendall(encode(launching))
        decoder, answers = Decoder(ANSWER_LIMIT), []
        while data := sock.recv(1 << 16):
            answers += list(decoder.feed(data))
        return answers


def _tier(rank: Any, step: int) -> str:
    """Where the rank's file of its first attempt is read from."""
    fetched, descriptor = rank.client.fetch(f"global_step{step}/state-00000-of-00001-uid1-0.safetensors", refresh=False)
    os.close(descriptor)
    return str(fetched.tier)


@pytest.mark.parametrize("resume_step", [None, 0, 1], ids=["newest", "none", "fixed"])
def test_announcement_of_another_storage_leaves_the_job_its_memory(
    agent: Any, ranks: Any, tmp_path: Path, resume_step: int | None
) -> None:
    rank = agent.join()
    rank.save(1)
    rank.wait_committed(1)
    rank.close()
    ranks.eventually(lambda: not agent.job().ranks[0].alive, "between two attempts nobody lives")
    slots, persisters = agent.slot_files(), agent.persisters()
    elsewhere = (tmp_path / "of-the-environment").as_uri()
    assert _announce(agent.socket, _launching(agent, storage_uri=elsewhere, resume_step=resume_step)) == []
    assert slots
    assert agent.slot_files() == slots
    assert agent.persisters() == persisters
    back = agent.join(run="uid1-1")
    assert _tier(back, 1) == "Memory"
    assert _announce(agent.socket, _launching(agent, storage_uri=elsewhere)) == []  # nor is it refused meanwhile
    assert _tier(back, 1) == "Memory"


def test_announcement_with_other_credentials_leaves_the_job_its_own(
    node_agent: Callable[..., Any], kubelet: Any, new_pod: Any
) -> None:
    agent, job = node_agent(), "team-a/train"
    rank = agent.join(socket=kubelet.publish(new_pod()), job=job)
    rank.save(1)
    rank.wait_committed(1)
    persisters = agent.persisters()
    other = kubelet.publish(new_pod(run="uid1-1", secrets={"AWS_ACCESS_KEY_ID": "other", "AWS_SECRET_ACCESS_KEY": "x"}))
    assert _announce(other, _launching(agent, job=job)) == []
    assert "other credentials" not in agent.log
    rank.save(2)
    rank.wait_committed(2)
    assert agent.persisters() == persisters


def test_rank_with_another_storage_than_announced_is_taken_in(agent: Any, tmp_path: Path) -> None:
    assert _announce(agent.socket, _launching(agent, storage_uri=(tmp_path / "of-the-environment").as_uri())) == []
    rank = agent.join(run="uid1-1")
    rank.save(1)
    rank.wait_committed(1)
