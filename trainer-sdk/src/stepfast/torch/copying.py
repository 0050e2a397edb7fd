"""Objects apart from what they were: copied so that nobody's later changes reach them, or moved to another device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from stepfast.torch import sharing
from stepfast.torch.dtypes import as_movable
from stepfast.torch.state import collect, describe, encode_value, rebuild

MapLocation: TypeAlias = "torch.device | str | Mapping[str, str] | Callable[[Any, str], Any] | None"
"""As `torch.load` takes it: a device, devices by the names of those that tensors came from, a function of a storage in
host memory and the name of its device, or None: each tensor's own device where there is one, else the host."""


def copied(item: Any) -> Any:
    """The nest, with tensors of its own in host memory: those that share memory share it there, too.

    Raises StateUnsupported for what cannot be saved.
    """
    collected = collect(item)
    structure, names = describe(item, "", collected.objects)
    found = sharing.find_sharing(collected.tensors, names)
    bases = {index: _copy_of(found.source(index, collected.tensors)) for index in range(len(found.bases))}
    tensors = sharing.materialise(found, bases, {}, device_of=lambda device: "cpu")
    return rebuild(structure, tensors, [encode_value(value) for value in collected.values], weights_only=False)


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return as_movable(tensor).to("cpu", copy=True).view(tensor.dtype)


def device_of(location: MapLocation) -> Callable[[str], str]:
    """The device that a tensor goes to which was saved from the one of that name."""
    if location is None:
        return sharing.own_device
    if isinstance(location, str | torch.device):
        target = str(location)
        return lambda device: target
    if isinstance(location, Mapping):
        targets = {str(torch.device(key)): str(value) for key, value in location.items()}
        return lambda device: targets.get(device) or targets.get(f"{device}:0") or sharing.own_device(device)

    def ask(device: str) -> str:
        storage = torch.empty(0, dtype=torch.uint8).untyped_storage()
        found = location(storage, device if device == "cpu" else f"{device}:0")
        return sharing.own_device(device) if found is None else str(found.device)

    return ask
