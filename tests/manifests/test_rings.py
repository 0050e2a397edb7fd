"""Who mirrors whom in a gang."""

from __future__ import annotations

from stepfast.step import JobKey
from stepfast_operator.document import JSON
from stepfast_operator.rings import MOST_NEIGHBOURS, ring_of

JOB = JobKey(namespace="ml", name="gpt")


def ring(nodes: int, *, without: tuple[int, ...] = ()) -> dict[str, JSON]:
    names = {index: f"n{index}" for index in range(nodes)}
    addresses = {name: f"10.0.0.{index}:9601" for index, name in names.items() if index not in without}
    return ring_of(JOB, "uid-1", names, addresses)


def test_each_node_is_mirrored_by_the_next_and_the_last_by_the_first() -> None:
    entries = ring(3)
    assert {node: entry["neighbours"] for node, entry in entries.items()} == {
        "n0": ["10.0.0.1:9601", "10.0.0.2:9601"],
        "n1": ["10.0.0.2:9601", "10.0.0.0:9601"],
        "n2": ["10.0.0.0:9601", "10.0.0.1:9601"],
    }
    assert entries["n2"] == {
        "namespace": "ml", "name": "gpt", "run": "uid-1", "node": 2, "neighbours": entries["n2"]["neighbours"],
    }  # fmt: skip


def test_agent_that_takes_no_mirrors_is_left_out() -> None:
    entries = ring(3, without=(1,))
    assert {entry["node"]: entry["neighbours"] for entry in entries.values()} == {
        0: ["10.0.0.2:9601"], 2: ["10.0.0.0:9601"],
    }  # fmt: skip


def test_node_alone_has_nobody() -> None:
    assert ring(1)["n0"]["neighbours"] == []


def test_large_gangs_objects_stay_small() -> None:
    entries = ring(100)
    assert all(len(entry["neighbours"]) == MOST_NEIGHBOURS for entry in entries.values())
    assert entries["n99"]["neighbours"][0] == "10.0.0.0:9601"
