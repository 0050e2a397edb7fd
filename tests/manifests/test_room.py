"""The memory that a gang finds in the cluster: which nodes count, and what they say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from stepfast.errors import SpecError
from stepfast.nodestatus import NodeStatus, to_document
from stepfast_operator.document import JSON, decode
from stepfast_operator.observed import NodeMemory, Room
from stepfast_operator.podview import NodeReport, node_of, report_of
from stepfast_operator.room import room_of
from stepfast_operator.spec import TrainingSpec

MIB = 1 << 20
LABEL = "nvidia.com/gpu.memory"
GPU = {"nvidia.com/gpu": 2}


def node(name: str, memory: Any = "1Gi", **labels: str) -> JSON:
    return {
        "metadata": {"name": name, "labels": {key.replace("__", "/"): value for key, value in labels.items()}},
        "status": {"allocatable": {"memory": memory}, "conditions": [{"type": "Ready", "status": "True"}]},
    }


def gpu_node(name: str, mib: str, **labels: str) -> JSON:
    document = node(name, **labels)
    document["metadata"]["labels"][LABEL] = mib
    return document


def find(
    *nodes: JSON, limits: Mapping[str, Any] | None = None, slots: Mapping[str, int] | None = None, **spec: Any
) -> Room:
    trainer = {"command": ["torchrun", "t.py"], "numNodes": 3, "resourcesPerNode": {"limits": limits or {}}}
    read = decode(TrainingSpec, {"trainer": trainer, **spec}, "spec")
    return room_of(read, map(node_of, nodes), lambda name: report(name, (slots or {}).get(name)))


def report(name: str, limit_bytes: int | None) -> NodeReport | None:
    if limit_bytes is None:
        return None
    status = to_document(NodeStatus(node=name, memory_limit_bytes=limit_bytes, memory_used_bytes=0, jobs=()))
    return report_of({"metadata": {"name": name, "uid": name}, "status": status})


def test_nodes_say_what_they_have() -> None:
    room = find(gpu_node("a", "15360"), node("b", "2000Ki"), limits={**GPU, "memory": "3Gi"}, slots={"b": 7})
    assert (room.world_size, room.ranks, room.gpus, room.limit_bytes) == (6, 2, 2, 3 << 30)
    assert room.nodes == [
        NodeMemory(name="a", device_bytes=15360 * MIB, memory_bytes=1 << 30),
        NodeMemory(name="b", memory_bytes=2000 << 10, slot_bytes=7),
    ]


def test_only_nodes_that_the_pods_may_run_on_count() -> None:
    nodes = [gpu_node("a", "1", pool="x"), gpu_node("b", "2", pool="y"), gpu_node("c", "3")]
    template = {"spec": {"nodeSelector": {"pool": "y", LABEL: "2"}}}
    assert [found.name for found in find(*nodes, limits=GPU, template=template).nodes] == ["b"]
    assert [found.name for found in find(*nodes, limits=GPU, template={"spec": {"nodeSelector": None}}).nodes] == [
        "a",
        "b",
        "c",
    ]


def test_nodes_that_the_pods_do_not_tolerate_or_that_are_cordoned_do_not_count() -> None:
    tainted, cordoned, free = (gpu_node(name, "1") for name in "abc")
    tainted["spec"] = {"taints": [{"key": "team", "value": "vision", "effect": "NoSchedule"}]}
    cordoned["spec"] = {"unschedulable": True}
    nodes = (tainted, cordoned, free)
    assert [found.name for found in find(*nodes, limits=GPU).nodes] == ["c"]
    template = {"spec": {"tolerations": [{"key": "team", "operator": "Exists"}]}}
    assert [found.name for found in find(*nodes, limits=GPU, template=template).nodes] == ["a", "c"]


def test_label_of_nvidias_gpus_says_nothing_of_others() -> None:
    room = find(gpu_node("a", "15360"), limits={"amd.com/gpu": 1})
    assert (room.gpus, room.nodes[0].device_bytes) == (1, None)


def test_ranks_without_gpus_are_as_many_as_the_spec_says() -> None:
    room = find(gpu_node("a", "15360"), trainer={"command": ["t"], "numNodes": 2, "numProcPerNode": 4})
    assert (room.world_size, room.ranks, room.gpus, room.limit_bytes) == (8, 4, 0, None)
    assert room.nodes[0].device_bytes is None


@pytest.mark.parametrize("mib", ["", "0", "many", "-5", "1.5", "²"])
def test_label_that_is_no_size_says_nothing(mib: str) -> None:
    assert find(gpu_node("a", mib), limits=GPU).nodes[0].device_bytes is None


def test_node_that_says_nothing_is_there_all_the_same() -> None:
    bare = {"metadata": {"name": "a"}}
    assert find(bare, limits=GPU, slots={"a": 0}).nodes == [NodeMemory(name="a")]
    assert find(node("a", "1500m"), limits=GPU).nodes == [NodeMemory(name="a")]


def test_number_of_gpus_that_is_none_names_its_field() -> None:
    with pytest.raises(SpecError, match=r"spec\.trainer\.resourcesPerNode\.limits\.nvidia\.com/gpu"):
        find(node("a"), limits={"nvidia.com/gpu": "1.5"})
