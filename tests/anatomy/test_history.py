"""CUDA's history, in the form in which torch.cuda.memory._snapshot gives it, and what it is read as."""

from __future__ import annotations

from typing import Any

import pytest

from stepfast.torch.anatomy.devices import device_called
from stepfast.torch.anatomy.history import MemoryChange, cuda_changes, cuda_reserved

MIB = 1 << 20


def entry(action: str, address: int, size: int, time_us: int) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": time_us, "frames": []}


def snapshot(*entries: dict[str, Any], total: int, device: int = 0) -> dict[str, Any]:
    """One device's history among those of all, and its segments at the end."""
    segment = {"device": device, "address": 0, "total_size": total, "allocated_size": 0, "stream": 0, "blocks": []}
    traces: list[list[dict[str, Any]]] = [[] for _ in range(device + 1)]
    traces[device] = list(entries)
    return {"segments": [segment], "device_traces": traces}


def test_memory_is_given_back_when_no_stream_works_on_it_any_more() -> None:
    history = snapshot(
        entry("segment_alloc", 4096, 2 * MIB, 9),
        entry("alloc", 4096, 512, 10),
        entry("free_requested", 4096, 512, 11),
        entry("free_completed", 4096, 512, 15),
        total=2 * MIB,
    )
    assert cuda_changes(history, 0) == [MemoryChange(10_000, 4096, 512), MemoryChange(15_000, 4096, -512)]


def test_what_was_reserved_before_the_history_began_counts() -> None:
    history = snapshot(
        entry("segment_alloc", 0, 20 * MIB, 10),
        entry("segment_free", 0, 2 * MIB, 20),
        entry("segment_map", 0, 4 * MIB, 30),
        entry("segment_unmap", 0, 1 * MIB, 40),
        total=25 * MIB,
    )
    assert [total // MIB for _, total in cuda_reserved(history, 0)] == [4, 24, 22, 26, 25]
    assert [time for time, _ in cuda_reserved(history, 0)] == [10_000, 10_000, 20_000, 30_000, 40_000]


def test_other_devices_do_not_count() -> None:
    history = snapshot(entry("alloc", 4096, 512, 10), total=2 * MIB, device=1)
    assert cuda_changes(history, 0) == []
    assert len(cuda_changes(history, 1)) == 1
    assert cuda_reserved(history, 0) == [(0, 0)]
    assert cuda_changes(history, 7) == []


@pytest.mark.parametrize(
    ("name", "gibibytes", "known"),
    [
        ("Tesla V100-SXM2-16GB", 16, "v100-16gb"),
        ("Tesla V100-SXM2-32GB", 32, "v100-32gb"),
        ("Tesla T4", 15, "t4"),
        ("NVIDIA A10", 22, "a10"),
        ("NVIDIA L4", 22, "l4"),
        ("NVIDIA L40S", 45, "l40s"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx-4090"),
        ("NVIDIA A100-SXM4-40GB", 40, "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", 80, "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", 80, "h100-80gb"),
        ("NVIDIA H100 PCIe", 80, "h100-pcie-80gb"),
        ("NVIDIA H100 NVL", 93, "h100-nvl-94gb"),
        ("NVIDIA H200", 140, "h200-141gb"),
        ("NVIDIA B200", 179, "b200-180gb"),
    ],
)
def test_a_device_is_known_by_the_drivers_name_for_it(name: str, gibibytes: int, known: str) -> None:
    assert device_called(name, gibibytes << 30).name == known


@pytest.mark.parametrize(
    ("name", "mebibytes"),
    [
        ("NVIDIA A10G", 23028),
        ("NVIDIA A10-4Q", 4096),
        ("NVIDIA A10-24Q", 24576),
        ("NVIDIA L40", 46068),
        ("NVIDIA H200 NVL", 143771),
        ("NVIDIA GH200 480GB", 97871),
        ("NVIDIA GeForce RTX 4090 D", 24564),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376),
        ("Tesla V100S-PCIE-32GB", 32510),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9728),
        ("NVIDIA A100-SXM4-80GB MIG 7g.80gb", 80640),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40448),
        ("NVIDIA A100-SXM4-80GB", 9728),
        ("NVIDIA H100 PCIe", 95830),
        ("NVIDIA A100-SXM4-40GB", 81920),
        ("Tesla T4", 8192),
    ],
)
def test_a_device_is_not_taken_for_another_whose_name_is_within_its_own(name: str, mebibytes: int) -> None:
    device = device_called(name, mebibytes << 20)
    assert (device.name, device.memory_bytes) == (name, mebibytes << 20)


def test_a_device_that_nobody_knows_keeps_its_name_and_its_memory() -> None:
    device = device_called("Future Accelerator 9000", 500 << 30)
    assert (device.name, device.memory_bytes, device.is_cuda) == ("Future Accelerator 9000", 500 << 30, True)
