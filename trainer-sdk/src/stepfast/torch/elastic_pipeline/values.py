"""What passes between layers, and what a loss is told: a tensor, or several of them in tuples, lists or dicts."""

from __future__ import annotations

import operator
from collections.abc import Callable
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
