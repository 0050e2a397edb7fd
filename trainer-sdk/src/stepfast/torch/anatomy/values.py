"""Values that a step may ask for: those of whole numbers and booleans which follow from its shapes.

Masks and positions are made of ones, ranges and what a batch of real tensors holds, and models ask about them: is any
word masked, do positions run on? Fake tensors have forgotten. So what is small and known is computed beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

_aten = torch.ops.aten
_LIMIT_BYTES = 16 << 20
_UNINITIALISED = frozenset({_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted, _aten.new_empty})
# What these make does not depend on the values of what they are given.
_BY_SHAPE = frozenset(
    {_aten.ones_like, _aten.zeros_like, _aten.full_like, _aten.new_ones, _aten.new_zeros, _aten.new_full}
)


class KnownValues:
    """Follows operations on fake tensors. `of` says the value of a tensor, None where it is not known."""

    def __init__(self) -> None:
        self._values = WeakIdKeyDictionary()  # FakeTensor -> Tensor
        self._lost = WeakIdKeyDictionary()  # storages into which something unknown was written

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor.is_floating_point() or tensor.is_complex() or tensor.layout is not torch.strided:
            return None
        if not isinstance(tensor, FakeTensor):
            return tensor if tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() <= _LIMIT_BYTES else None
        return None if tensor.untyped_storage() in self._lost else self._values.get(tensor)

    def follow(
        self, func: torch._ops.OpOverload[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """`result` is what the operation returned on fake tensors."""
        made = tree_leaves(result)
        if not made or not all(map(_may_be_known, made)) or not self._compute(func, args, kwargs, made):
            self._lose(func, args, kwargs)

    def _compute(
        self, func: torch._ops.OpOverload[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], made: list[Any]
    ) -> bool:
        packet = func.overloadpacket
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if func.namespace != "aten" or is_random or packet in _UNINITIALISED:
            return False
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        values = {id(each): _blank(each) if packet in _BY_SHAPE else self.of(each) for each in given}
        if any(value is None for value in values.values()):
            return False
        with unset_fake_temporarily(), torch.no_grad():
            real_args, real_kwargs = tree_map_only(torch.Tensor, lambda each: values[id(each)], (args, dict(kwargs)))
            try:
                results = tree_leaves(func(*real_args, **real_kwargs))
            except (RuntimeError, TypeError, IndexError):  # a kernel that real tensors do not have
                return False
        self._values.update(zip(made, results, strict=True))
        return True

    def _lose(self, func: torch._ops.OpOverload[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """What an unknown operation may have written is no longer known."""
        if not func._schema.is_mutable and func.namespace != "c10d":  # whose operations write without saying so
            return
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, FakeTensor) and leaf in self._values:
                self._lost[leaf.untyped_storage()] = True


def _may_be_known(leaf: Any) -> bool:
    return (
        isinstance(leaf, FakeTensor)
        and not leaf.is_floating_point()
        and not leaf.is_complex()
        and leaf.layout is torch.strided
        and leaf.untyped_storage().nbytes() <= _LIMIT_BYTES
    )


def _blank(tensor: torch.Tensor) -> torch.Tensor | None:
    """Of the same shape; None where that is large."""
    if tensor.numel() * tensor.element_size() > _LIMIT_BYTES:
        return None
    with unset_fake_temporarily():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
