"""The memory that a gang is to find in the cluster, out of its spec and of what is known of nodes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stepfast.errors import SpecError
from stepfast_operator.document import JSON
from stepfast_operator.manifests import gpus_per_node, processes_per_node, resources_of
from stepfast_operator.observed import NodeMemory, Room
from stepfast_operator.placement import placement_of
from stepfast_operator.podview import NodeReport, NodeView
from stepfast_operator.quantities import parse_quantity
from stepfast_operator.spec import TrainingSpec

GPU_MEMORY = "nvidia.com/gpu.memory"  # a label of NVIDIA's GPU feature discovery: MiB of each GPU of the node
_NVIDIA = "nvidia.com/gpu"


def room_of(spec: TrainingSpec, nodes: Iterable[NodeView], report_of: Callable[[str], NodeReport | None]) -> Room:
    """What the job's ranks find on the nodes that its pods may run on. Raises SpecError, as `processes_per_node`
    does.
    """
    placement = placement_of(spec)
    ranks, limits = processes_per_node(spec), resources_of(spec).get("limits") or {}
    # The label is of NVIDIA's GPUs: beside them a cluster may have others.
    is_nvidia = bool(gpus_per_node(spec, (_NVIDIA,)))
    return Room(
        world_size=spec.trainer.num_nodes * ranks,
        ranks=ranks,
        gpus=gpus_per_node(spec),
        limit_bytes=_size(limits.get("memory")),
        nodes=[
            NodeMemory(
                name=node.name,
                device_bytes=_gpu_memory(node) if is_nvidia else None,
                memory_bytes=node.allocatable_bytes,
                slot_bytes=_slots(report_of(node.name)),
            )
            for node in nodes
            if placement.admits(node)
        ],
    )


def _gpu_memory(node: NodeView) -> int | None:
    text = node.labels.get(GPU_MEMORY, "")
    return int(text) << 20 if text.isdecimal() and int(text) > 0 else None


def _slots(report: NodeReport | None) -> int | None:
    return report.memory_limit_bytes if report is not None else None


def _size(amount: JSON) -> int | None:
    """A limit; None where there is none. One that is no size is the API server's to refuse, with the pods."""
    try:
        return None if amount is None else parse_quantity(amount, "")
    except SpecError:
        return None
