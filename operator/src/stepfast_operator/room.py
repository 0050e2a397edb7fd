"""The memory that a gang is to find in the cluster, out of its spec and of what is known of nodes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from stepfast.errors import SpecError
from stepfast.gpumodels import slice_bytes
from stepfast_operator.document import JSON
from stepfast_operator.gpumemory import GPU, MIG, device_memory
from stepfast_operator.manifests import gpus_per_node, processes_per_node, resources_of
from stepfast_operator.observed import NodeMemory, Room
from stepfast_operator.placement import placement_of
from stepfast_operator.podview import NodeReport, NodeView
from stepfast_operator.quantities import parse_quantity
from stepfast_operator.spec import TrainingSpec


def room_of(
    spec: TrainingSpec,
    nodes: Iterable[NodeView],
    report_of: Callable[[str], NodeReport | None],
    *,
    size: int | None = None,
) -> Room:
    """What the job's ranks find on the nodes that its pods may run on. `size`: how many of them its gang has, if not
    `numNodes`. Raises SpecError, as `processes_per_node` does.
    """
    placement, ranks, limits = placement_of(spec), processes_per_node(spec), resources_of(spec).get("limits") or {}
    profiles = [name for name in limits if name.startswith(MIG)]
    # Labels are of NVIDIA's GPUs: beside them a cluster may have others.
    asked = [name for name in (GPU, *profiles) if gpus_per_node(spec, (name,))]
    slices = [size for size in map(slice_bytes, asked) if size is not None]
    return Room(
        world_size=(size or spec.trainer.num_nodes) * ranks,
        ranks=ranks,
        gpus=gpus_per_node(spec) + gpus_per_node(spec, profiles),
        limit_bytes=_size(limits.get("memory")),
        slice_bytes=min(slices, default=None),
        nodes=[_memory_of(node, asked, report_of(node.name)) for node in nodes if placement.admits(node)],
    )


def _memory_of(node: NodeView, asked: Sequence[str], report: NodeReport | None) -> NodeMemory:
    """Of GPUs, the smallest of those that the pods ask for."""
    devices = [found for found in (device_memory(node, name) for name in asked) if found is not None]
    device = min(devices, key=lambda found: found.size_bytes, default=None)
    return NodeMemory(
        name=node.name,
        device_bytes=device.size_bytes if device is not None else None,
        is_device_most=device is not None and device.is_most,
        device_name=device.name if device is not None else "",
        memory_bytes=node.allocatable_bytes,
        slot_bytes=report.memory_limit_bytes if report is not None else None,
    )


def _size(amount: JSON) -> int | None:
    """A limit; None where there is none. One that is no size is the API server's to refuse, with the pods."""
    try:
        return None if amount is None else parse_quantity(amount, "")
    except SpecError:
        return None
