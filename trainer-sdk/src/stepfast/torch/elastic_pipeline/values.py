"""What passes between layers, and what a loss is told: a tensor, or several of them in tuples, lists or dicts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

Value = Any  # a tensor, or a nest of them


def mapped(value: Value, change: Callable[[torch.Tensor], Any]) -> Value:
    """The nest with each tensor changed; what is no tensor stays as it is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    return value


def leaves(value: Value) -> list[torch.Tensor]:
    """The nest's tensors, in order."""
    found: list[torch.Tensor] = []
    mapped(value, found.append)
    return found


def rebuilt(template: Value, tensors: Iterable[torch.Tensor]) -> Value:
    """The nest with these tensors in the places of its Nones."""
    left = iter(tensors)

    def fill(node: Value) -> Value:
        if node is None:
            return next(left)
        if isinstance(node, (tuple, list)):
            items = [fill(item) for item in node]
            return type(node)(*items) if hasattr(node, "_fields") else type(node)(items)
        return {key: fill(item) for key, item in node.items()} if isinstance(node, dict) else node

    return fill(template)


def parts(value: Value, sizes: list[int]) -> list[Value]:
    """The samples (first dimension of each tensor) in pieces of these sizes."""
    found = []
    begin = 0
    for size in sizes:
        found.append(mapped(value, operator.itemgetter(slice(begin, begin + size))))
        begin += size
    return found


def samples_in(value: Value) -> int:
    """The first dimension of the first tensor in the nest. Raises ValueError when there is none."""
    if isinstance(value, torch.Tensor) and value.dim():
        return len(value)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    for item in items:
        try:
            return samples_in(item)
        except ValueError:
            continue
    raise ValueError(f"no samples in a {type(value).__name__}: a batch is a tensor, or a nest of tensors")
