"""What a GPU of a node has for a rank, by what the node says of itself. Pure.

NVIDIA's GPU feature discovery measures it and labels the nodes. Where it does not run, a product or a machine's size
that is known stands for it. A name tells what a whole GPU has: of a MIG slice, or of a GPU that pods share, the most.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepfast.gpumodels import MODELS, model_called, slice_bytes
from stepfast_operator.podview import NodeView

GPU = "nvidia.com/gpu"
MIG = "nvidia.com/mig-"  # and a profile: what pods ask for where slices of several sizes are on one node
_INSTANCE_TYPE = "node.kubernetes.io/instance-type"
_SHARED = "-SHARED"  # at the end of a product that the device plugin hands to several pods at once

# Azure's sizes: the model, and how many a machine has. With more for pods than that they are slices, or shared.
_AZURE: dict[str, tuple[str, int]] = {
    "standard_nc4as_t4_v3": ("t4", 1),
    "standard_nc8as_t4_v3": ("t4", 1),
    "standard_nc16as_t4_v3": ("t4", 1),
    "standard_nc64as_t4_v3": ("t4", 4),
    "standard_nc6s_v3": ("v100-16gb", 1),
    "standard_nc12s_v3": ("v100-16gb", 2),
    "standard_nc24s_v3": ("v100-16gb", 4),
    "standard_nc24rs_v3": ("v100-16gb", 4),
    "standard_nd40rs_v2": ("v100-32gb", 8),
    "standard_nd96asr_v4": ("a100-40gb", 8),
    "standard_nd96amsr_a100_v4": ("a100-80gb", 8),
    "standard_nc24ads_a100_v4": ("a100-80gb", 1),
    "standard_nc48ads_a100_v4": ("a100-80gb", 2),
    "standard_nc96ads_a100_v4": ("a100-80gb", 4),
    "standard_nc40ads_h100_v5": ("h100-nvl-94gb", 1),
    "standard_nc80adis_h100_v5": ("h100-nvl-94gb", 2),
    "standard_nd96isr_h100_v5": ("h100-80gb", 8),
    "standard_nd96isr_h200_v5": ("h200-141gb", 8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """`is_most`: a rank may get less of it, and nobody says how much. `name`: by which it is known, where nobody has
    measured it.
    """

    size_bytes: int
    is_most: bool = False
    name: str = ""


def device_memory(node: NodeView, resource: str) -> DeviceMemory | None:
    """What is behind one `nvidia.com/gpu`, or one slice of a MIG profile (`nvidia.com/mig-1g.10gb`), of the node; None
    where it does not say.
    """
    product = node.labels.get(f"{resource}.product", "")
    measured, most = _number(node, f"{resource}.memory") << 20, slice_bytes(product)
    is_shared = product.endswith(_SHARED) or _number(node, f"{resource}.replicas") > 1
    if measured and (most is None or measured <= most):
        return DeviceMemory(size_bytes=measured, is_most=is_shared, name=product if is_shared else "")
    if most is not None:  # what was measured, if anything, is the whole GPU that it is a slice of
        return DeviceMemory(size_bytes=most, is_most=True, name=product)
    whole, is_slice, _ = product.removesuffix(_SHARED).partition("-MIG-")
    model = model_called(whole)
    if model is not None:
        return DeviceMemory(size_bytes=model.memory_bytes, is_most=is_shared or bool(is_slice), name=product)
    return _of_machine(node) if resource == GPU else None


def _of_machine(node: NodeView) -> DeviceMemory | None:
    size = node.labels.get(_INSTANCE_TYPE, "")
    model, gpus = _AZURE.get(size.lower(), ("", 0))
    if not model:
        return None
    return DeviceMemory(size_bytes=MODELS[model].memory_bytes, is_most=not 0 < node.gpus <= gpus, name=size)


def _number(node: NodeView, label: str) -> int:
    """0 where the label is no number."""
    text = node.labels.get(label, "")
    return int(text) if text.isdecimal() else 0
