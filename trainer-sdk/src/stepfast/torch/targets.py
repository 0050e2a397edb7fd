"""Which of the caller's own tensors take a step's bytes, so that a restore copies them once.

A tensor does when it is sure that nothing else would be written to it: it stands in the caller's object where it stood
in the one that was saved, looks alike, lies in this process's memory without gaps, and overlaps no other that does.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stepfast.torch.dtypes import PLAIN_TENSORS, parse_dtype
from stepfast.torch.sharing import Base, Flags, Sharing, is_plain
from stepfast.torch.state import Json, decode_value

_LARGE_BYTES = 4 << 20  # from here on new memory is asked for in huge pages


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnState:
    """An object's state as it is before a restore, its tensors the object's own.

    `keeps_flags`: a restore leaves it to the object whether its tensors are parameters that want gradients.
    """

    state: Any
    keeps_flags: bool


def choose(
    structure: Json, sharing: Sharing, own: Mapping[str, OwnState], pickled: Collection[int] = ()
) -> dict[int, torch.Tensor]:
    """The caller's tensor for each saved base, by its index, where there is one that can take its bytes.

    `structure` is that of the whole state: a dict with an object a name. `pickled`: the bases that pickled objects are
    put together of, before any tensor of the caller's is touched.
    """
    candidates: dict[int, tuple[torch.Tensor, bool]] = {}
    for name, child in structure[1]:
        known = own.get(name)
        if known is not None:
            candidates |= {index: (tensor, known.keeps_flags) for index, tensor in _meet(child, known.state)}
    chosen = {}
    for index, place in enumerate(sharing.places):
        if not isinstance(place, int) or index not in candidates or place in pickled:
            continue
        tensor, keeps_flags = candidates[index]
        if _takes(tensor, sharing.bases[place], None if keeps_flags else sharing.flags[index]):
            chosen[place] = tensor
    return _without_overlaps(chosen)


def empty(base: Base) -> torch.Tensor:
    """New memory for a base: laid out as it was, in huge pages where it is large, which are there ten times as fast."""
    dtype = parse_dtype(base.dtype)
    size = math.prod(base.shape) * dtype.itemsize
    if size < _LARGE_BYTES:
        flat = torch.empty(math.prod(base.shape), dtype=dtype)
    else:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        flat = torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
    return flat.as_strided(base.shape, base.stride) if base.stride is not None else flat.view(base.shape)


def _meet(structure: Json, state: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """The saved tensors (by index) that have a tensor at the same place in the state."""
    left = [(structure, state)]
    while left:
        (tag, content), node = left.pop()
        if tag == "t":
            if isinstance(node, torch.Tensor):
                yield content, node
        elif tag in ("list", "tuple"):
            if _is_list(node) and len(node) == len(content):
                left += zip(content, node, strict=True)
        elif isinstance(content, list) and tag != "p" and isinstance(node, dict):
            keys = [(key if type(key) is str else _key(key), child) for key, child in content]
            left += [(child, node[key]) for key, child in keys if key in node]


def _is_list(state: Any) -> bool:
    return isinstance(state, list | tuple)


def _key(key: Json) -> Any:
    """A key that can be looked up; None, which no tensor is found under that is not there, for a pickled one."""
    return None if isinstance(key, list) and key[0] == "pickle" else decode_value(key, weights_only=True)


def _takes(tensor: torch.Tensor, base: Base, flags: Flags | None) -> bool:
    if type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
        return False
    if not tensor.is_cpu or not is_plain(tensor):
        return False
    if tensor.shape != base.shape or tensor.dtype is not parse_dtype(base.dtype):
        return False
    if flags is not None and (
        not tensor.is_leaf
        or (type(tensor) is torch.nn.Parameter) is not flags.is_parameter
        or tensor.requires_grad is not flags.requires_grad
    ):
        return False
    return tensor.is_contiguous() if base.stride is None else tensor.stride() == base.stride


def _without_overlaps(chosen: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    spans = sorted((begin := tensor.data_ptr(), begin + tensor.nbytes, base) for base, tensor in chosen.items())
    overlapping, reached, last = set(), 0, None
    for begin, end, base in spans:
        if begin < reached and begin < end:
            overlapping |= {base, last}
        if end > reached:
            reached, last = end, base
    return {base: tensor for base, tensor in chosen.items() if base not in overlapping}
