"""Values that a model or a step may ask for: those that follow from shapes.

Masks and positions are made of ones, ranges and the words of a batch, and models ask about them: is any word masked, do
positions run on? When they are made they ask for the rate of each layer's dropout. Fake tensors have forgotten. So what
is small and known is computed beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

_aten = torch.ops.aten
_LIMIT_BYTES = 16 << 20  # of whole numbers and booleans: a mask of 4,096 words by as many
_FLOAT_LIMIT_BYTES = 64 << 10  # of others: weights and states begin as zeros and ones, and shall take no memory
_UNINITIALISED = frozenset({_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted, _aten.new_empty})
# Stand-ins for data. What a step draws for itself (whether to leave out a layer) stays unknown, so that the question is
# answered alike each time.
_DRAWN = frozenset({_aten.randint, _aten.randperm})
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
        if not isinstance(tensor, FakeTensor):
            return tensor if _is_small(tensor) and tensor.device.type == "cpu" else None
        if tensor.layout is not torch.strided:
            return None
        return None if tensor.untyped_storage() in self._lost else self._values.get(tensor)

    def shaped_by_values(
        self, func: torch._ops.OpOverload[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """The result, on fake tensors, of an operation whose result has a size by the values that it is given, as
        nonzero's; None where these are not known.
        """
        results = self._computed(func, args, kwargs)
        mode = active_fake_mode()
        if results is None or mode is None:
            return None
        made = tree_map_only(torch.Tensor, mode.from_tensor, results)
        self._values.update(zip(tree_leaves(made), tree_leaves(results), strict=True))
        return made

    def follow(
        self, func: torch._ops.OpOverload[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """`result` is what the operation returned on fake tensors."""
        made = tree_leaves(result)
        if made and all(map(_may_be_known, made)):
            results = self._computed(func, args, kwargs)
            if results is not None:
                self._values.update(zip(made, tree_leaves(results), strict=True))
                return
        self._lose(func, args, kwargs)

    def _computed(self, func: torch._ops.OpOverload[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the operation returns on real tensors; None where these are not known, or it is not to be known."""
        packet = func.overloadpacket
        is_random = torch.Tag.nondeterministic_seeded in func.tags and packet not in _DRAWN
        if func.namespace != "aten" or is_random or packet in _UNINITIALISED:
            return None
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func._schema.is_mutable and not all(isinstance(each, FakeTensor) for each in given):
            return None  # into a tensor of the caller's nothing is written
        values = {id(each): _blank(each) if packet in _BY_SHAPE else self.of(each) for each in given}
        if any(value is None for value in values.values()):
            return None
        with unset_fake_temporarily(), torch.no_grad():
            real_args, real_kwargs = tree_map_only(torch.Tensor, lambda each: values[id(each)], (args, dict(kwargs)))
            try:
                return func(*real_args, **real_kwargs)
            except (RuntimeError, TypeError, IndexError):  # a kernel that real tensors do not have
                return None

    def _lose(self, func: torch._ops.OpOverload[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """What an unknown operation may have written is no longer known."""
        if not func._schema.is_mutable and func.namespace != "c10d":  # whose operations write without saying so
            return
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, FakeTensor) and leaf.layout is torch.strided:
                self._lost[leaf.untyped_storage()] = True


def _may_be_known(leaf: Any) -> bool:
    return isinstance(leaf, FakeTensor) and _is_small(leaf)


def _is_small(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    is_float = tensor.is_floating_point() or tensor.is_complex()
    return tensor.untyped_storage().nbytes() <= (_FLOAT_LIMIT_BYTES if is_float else _LIMIT_BYTES)


def _blank(tensor: torch.Tensor) -> torch.Tensor | None:
    """Of the same shape; None where that is large."""
    if tensor.numel() * tensor.element_size() > _LIMIT_BYTES:
        return None
    with unset_fake_temporarily():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
