"""Gradients that meet: where a tensor has several uses, autograd adds what comes back from them.

It adds in place where nobody else holds the first one, so that no memory is taken; but never where a mode looks on
(torch/csrc/autograd/input_buffer.cpp). What a recorder shows would then be more than what the step takes without it. So
the recorder does what autograd would have done.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten


class Holders(NamedTuple):
    """How many hold a tensor, in C++ and in Python, and how many its storage."""

    of_tensor: int
    of_object: int
    of_storage: int


def as_without_a_mode(
    func: torch._ops.OpOverload[Any, Any], args: tuple[Any, ...], alone: Holders
) -> torch._ops.OpOverload[Any, Any]:
    """The operation that autograd would have called in place of `func`, had no mode been there. Its arguments are
    those of `func`. To be called in `__torch_dispatch__` itself, with what `holders_of_a_buffer` counts there.
    """
    if func is not _aten.add.Tensor or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return func
    if len(args) != 2 or not all(isinstance(each, torch.Tensor) and each.layout is torch.strided for each in args):
        return func
    if not _aten.is_non_overlapping_and_dense.default(args[0]) or _holders(args[0]) != alone:
        return func
    return _aten.add_.Tensor


@cache
def holders_of_a_buffer() -> Holders:
    """Those of a gradient that autograd alone holds, seen where two meet in a backward pass."""
    found: list[Holders] = []

    class Probe(TorchDispatchMode):
        def __torch_dispatch__(
            self,
            func: torch._ops.OpOverload[Any, Any],
            types: Sequence[type],
            args: tuple[Any, ...] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:
            if func is _aten.add.Tensor and torch._C._current_graph_task_id() != -1:
                found.append(_holders(args[0]))
            return func(*args, **(kwargs or {}))

    with torch.enable_grad(), Probe():
        tensor = torch.ones(1, requires_grad=True) * 2
        (tensor.sin() * tensor.cos()).sum().backward()
    return found[0]


def _holders(tensor: torch.Tensor) -> Holders:
    storage = tensor.untyped_storage()
    return Holders(tensor._use_count(), sys.getrefcount(tensor), torch._C._storage_Use_Count(storage._cdata))
