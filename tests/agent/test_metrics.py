"""What a real agent counts while ranks save, restore and die, as its Prometheus endpoint shows it."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families


def samples(port: int) -> dict[str, float]:
    """Each sample by name and labels, as `name{label=value}`."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found = {}
    for family in families:
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def flushes(port: int) -> dict[str, float]:
    """How many were measured, by their causes."""
    name = "stepfast_checkpoint_flush_duration_seconds_count{cause="
    found = {each.removeprefix(name).rstrip("}"): value for each, value in samples(port).items() if name in each}
    return {cause: value for cause, value in found.items() if value}


@pytest.fixture
def agent(new_agent: Callable[..., Any], free_port: int) -> Any:
    """One that shows its metrics on `free_port`."""
    return new_agent("--metrics-port", str(free_port))


def test_save_is_counted_from_its_stall_to_its_commit(agent: Any, free_port: int) -> None:
    rank = agent.join()
    rank.save(1)
    rank.wait_committed(1)
    found = samples(free_port)
    prefix = "stepfast_checkpoint"
    for name in ("stall_seconds_count", "persist_duration_seconds_count", "commits_total"):
        assert found[f"{prefix}_{name}"] == 1, name
    assert found[f"{prefix}_stage_bytes_total"] == found[f"{prefix}_persist_bytes_total"] > 0
    assert found[f"{prefix}_memory_used_bytes"] > 0
    assert found[f"{prefix}_memory_limit_bytes"] == agent.memory_limit
    assert found[f"{prefix}_persist_lag_seconds"] == 0


def test_flush_after_a_ranks_death_is_measured_and_says_why(agent: Any, ranks: Any, free_port: int) -> None:
    rank = agent.join()
    rank.save(1, due=False)
    rank.die()
    ranks.eventually(lambda: flushes(free_port), "the flush is measured")
    assert agent.job().latest_persisted_step == 1
    assert flushes(free_port) == {"RankDied": 1}


def test_flush_with_nothing_to_do_is_none(agent: Any, ranks: Any, free_port: int) -> None:
    rank = agent.join()
    rank.save(1)
    rank.wait_committed(1)
    rank.die()
    ranks.eventually(lambda: not any(each.alive for each in agent.job().ranks), "the agent knows")
    assert flushes(free_port) == {}
