"""What a GPU of a node has, by the node's labels: sure, the most that it may be, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from stepfast_operator.document import decode
from stepfast_operator.observed import NodeMemory, Room
from stepfast_operator.podview import node_of
from stepfast_operator.room import room_of
from stepfast_operator.spec import TrainingSpec

MIB = 1 << 20
GIB = 1 << 30
GPU = "nvidia.com/gpu"
SIZE = "node.kubernetes.io/instance-type"
MIG = "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"


def find(labels: Mapping[str, str], *, gpus: int | str | None = None, limits: Mapping[str, Any] | None = None) -> Room:
    """What a job that asks for that (for a GPU, unless told) finds on one node."""
    status = {} if gpus is None else {"allocatable": {GPU: gpus}}
    node = node_of({"metadata": {"name": "node-a", "labels": labels}, "status": status})
    trainer = {"command": ["t"], "resourcesPerNode": {"limits": {GPU: 1} if limits is None else limits}}
    return room_of(decode(TrainingSpec, {"trainer": trainer}, "spec"), [node], lambda _: None)


def sure(size_bytes: int, name: str = "") -> NodeMemory:
    return NodeMemory(name="node-a", device_bytes=size_bytes, device_name=name)


def most(size_bytes: int, name: str) -> NodeMemory:
    return NodeMemory(name="node-a", device_bytes=size_bytes, is_device_most=True, device_name=name)


NOTHING = NodeMemory(name="node-a")


def labels(product: str | None = None, memory: int | str | None = None, **others: str) -> dict[str, str]:
    told = {f"{GPU}.product": product, f"{GPU}.memory": None if memory is None else str(memory)}
    told |= {f"{GPU}.{name}": value for name, value in others.items()}
    return {name: value for name, value in told.items() if value is not None}


LABELS: dict[str, tuple[dict[str, str], NodeMemory]] = {
    "measured": (labels("NVIDIA-A100-SXM4-80GB", 81920), sure(81920 * MIB)),
    "measured goes before the product": (labels("NVIDIA-A100-SXM4-80GB", 81251), sure(81251 * MIB)),
    "measured, of a product that nobody knows": (labels("NVIDIA-GB10", 120000), sure(120000 * MIB)),
    "measured, without a product": (labels(memory=15360), sure(15360 * MIB)),
    "nothing": ({}, NOTHING),
    "product": (labels("NVIDIA-A100-80GB-PCIe"), sure(80 * GIB, "NVIDIA-A100-80GB-PCIe")),
    "product of Hopper": (labels("NVIDIA-H100-80GB-HBM3"), sure(81559 * MIB, "NVIDIA-H100-80GB-HBM3")),
    "product whose name begins another's": (labels("NVIDIA-H100-NVL"), sure(95830 * MIB, "NVIDIA-H100-NVL")),
    "product of an older driver": (labels("Tesla-T4"), sure(15360 * MIB, "Tesla-T4")),
    "product that nobody knows": (labels("NVIDIA-A10G"), NOTHING),
    "part of a product's name": (labels("NVIDIA-A10-4Q"), NOTHING),
    "slice, measured": (labels(MIG, 9728), sure(9728 * MIB)),
    "slice by its name": (labels(MIG), most(10 * GIB, MIG)),
    "slice whose label is the whole GPU's": (labels(MIG, 81920), most(10 * GIB, MIG)),
    "slice with media engines": (labels(f"{MIG}.me"), most(10 * GIB, f"{MIG}.me")),
    "slice of a GPU that nobody knows": (labels("NVIDIA-X-MIG-2g.24gb"), most(24 * GIB, "NVIDIA-X-MIG-2g.24gb")),
    "compute slice": (
        labels("NVIDIA-A100-SXM4-40GB-MIG-1c.3g.20gb"),
        most(20 * GIB, "NVIDIA-A100-SXM4-40GB-MIG-1c.3g.20gb"),
    ),
    "slices of several sizes": (
        labels("NVIDIA-A100-SXM4-80GB-MIG-INVALID", 0),
        most(80 * GIB, "NVIDIA-A100-SXM4-80GB-MIG-INVALID"),
    ),
    "slices of several sizes of a GPU that nobody knows": (labels("NVIDIA-X-MIG-INVALID", 0), NOTHING),
    "shared": (labels("Tesla-T4-SHARED", 15360), most(15360 * MIB, "Tesla-T4-SHARED")),
    "shared, and not measured": (labels("Tesla-T4-SHARED"), most(15360 * MIB, "Tesla-T4-SHARED")),
    "shared by its replicas": (labels("Tesla-T4", 15360, replicas="4"), most(15360 * MIB, "Tesla-T4")),
    "not shared": (labels("Tesla-T4", 15360, replicas="1"), sure(15360 * MIB)),
    "slice that is shared": (labels(f"{MIG}-SHARED", 9728), most(9728 * MIB, f"{MIG}-SHARED")),
}


@pytest.mark.parametrize(("told", "expected"), LABELS.values(), ids=LABELS)
def test_labels_of_feature_discovery_say_what_a_gpu_has(told: dict[str, str], expected: NodeMemory) -> None:
    assert find(told).nodes == [expected]


SIZES: dict[str, tuple[str, int | str | None, NodeMemory]] = {
    "H100": ("Standard_ND96isr_H100_v5", 8, sure(81559 * MIB, "Standard_ND96isr_H100_v5")),
    "in small letters": ("standard_nd96isr_h100_v5", "8", sure(81559 * MIB, "standard_nd96isr_h100_v5")),
    "one of its GPUs has failed": ("Standard_ND96isr_H100_v5", 7, sure(81559 * MIB, "Standard_ND96isr_H100_v5")),
    "as slices": ("Standard_ND96amsr_A100_v4", 56, most(80 * GIB, "Standard_ND96amsr_A100_v4")),
    "no device plugin yet": ("Standard_NC24ads_A100_v4", None, most(80 * GIB, "Standard_NC24ads_A100_v4")),
    "as slices of several sizes": ("Standard_NC24ads_A100_v4", 0, most(80 * GIB, "Standard_NC24ads_A100_v4")),
    "NVL": ("Standard_NC80adis_H100_v5", 2, sure(95830 * MIB, "Standard_NC80adis_H100_v5")),
    "T4": ("Standard_NC64as_T4_v3", 4, sure(15360 * MIB, "Standard_NC64as_T4_v3")),
    "a sixth of an A10": ("Standard_NV6ads_A10_v5", 1, NOTHING),
    "of another cloud": ("p4d.24xlarge", 8, NOTHING),
    "without GPUs": ("Standard_D8s_v5", None, NOTHING),
}


@pytest.mark.parametrize(("size", "gpus", "expected"), SIZES.values(), ids=SIZES)
def test_size_of_a_machine_says_it_where_no_label_does(size: str, gpus: int | str | None, expected: NodeMemory) -> None:
    assert find({SIZE: size}, gpus=gpus).nodes == [expected]


def test_labels_of_gpus_go_before_the_size_of_the_machine() -> None:
    size = {SIZE: "Standard_ND96amsr_A100_v4"}
    assert find({**size, **labels(MIG, 9728)}, gpus=8).nodes == [sure(9728 * MIB)]
    assert find({**size, **labels("Tesla-T4")}, gpus=8).nodes == [sure(15360 * MIB, "Tesla-T4")]


def test_job_that_asks_for_a_mig_profile_gets_its_slices() -> None:
    mixed = {**labels("NVIDIA-A100-SXM4-80GB", 81920), "nvidia.com/mig-1g.10gb.memory": "9728"}
    room = find(mixed, limits={"nvidia.com/mig-1g.10gb": 2})
    assert (room.ranks, room.gpus, room.slice_bytes) == (1, 2, 10 * GIB)
    assert room.nodes == [sure(9728 * MIB)], "the whole GPU's label is another resource's"


def test_mig_profile_that_no_node_has_measured_is_known_by_its_name() -> None:
    room = find(labels("NVIDIA-A100-SXM4-80GB", 81920), limits={"nvidia.com/mig-3g.40gb": 1})
    assert (room.gpus, room.slice_bytes, room.nodes) == (1, 40 * GIB, [NOTHING])


def test_of_several_profiles_the_smallest_counts() -> None:
    mixed = {"nvidia.com/mig-1g.10gb.memory": "9728", "nvidia.com/mig-2g.20gb.memory": "19968"}
    room = find(mixed, limits={"nvidia.com/mig-2g.20gb": 1, "nvidia.com/mig-1g.10gb": 1, "nvidia.com/mig-3g.40gb": 0})
    assert (room.gpus, room.slice_bytes, room.nodes) == (2, 10 * GIB, [sure(9728 * MIB)])
