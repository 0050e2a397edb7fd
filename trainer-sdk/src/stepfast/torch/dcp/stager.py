"""A copy of a sharded state in host memory, in one pass over memory that is warm."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from stepfast.errors import StateUnsupported
from stepfast.torch.dtypes import PLAIN_TENSORS
from stepfast.torch.garbage import garbage_kept

_MOST_FREE = 2  # sets of buffers: more than two saves are never under way together
_MOST_WATCHED = 4

_storage_use_count = torch._C._storage_Use_Count  # torch has no public one


@dataclass(slots=True, kw_only=True)
class _Buffers:
    """Host memory for the tensors of one state, and the leaves that stand on it: None where the state's own does."""

    layout: Any
    tensors: list[torch.Tensor]
    leaves: list[Any]
    unheld: list[int] = field(default_factory=list)  # how often all of it is held while nobody else holds any

    def holds(self) -> list[int]:
        """How often each tensor is held as an object, and its memory by tensors: views of it hold the latter alone."""
        objects = [thing for leaf in self.leaves for thing in _objects(leaf)]
        return [
            *(_storage_use_count(tensor.untyped_storage()._cdata) for tensor in self.tensors),
            *(sys.getrefcount(thing) for thing in (*objects, *self.tensors)),
        ]


class StepfastStager(AsyncStager):
    """Stages for `dcp.async_save`: what it returned for one save is memory for the next, once nobody holds any of it.

    Tensors are plain ones, DTensors and ShardedTensors, of which each rank's own part is copied.
    """

    _synchronize_after_execute = False  # when stage() returns, all is copied

    def __init__(self) -> None:
        self._made: list[_Buffers] = []  # what is held among it is no memory for the next
        self._lock = Lock()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | Future[dict[str, Any]]:
        """The state with tensors of its own in host memory. Raises StateUnsupported."""
        with garbage_kept():
            leaves, structure = pytree.tree_flatten(state_dict)
            parts = [_parts(leaf) for leaf in leaves]
            sources = [part for of_leaf in parts for part in of_leaf or ()]
            layout = (structure, [_look(leaf, of_leaf) for leaf, of_leaf in zip(leaves, parts, strict=True)])
            buffers = self._take(layout)
            if buffers is None:
                buffers = _make(layout, leaves, parts)
                buffers.holds()  # the first look at a storage makes an object of it
                buffers.unheld = buffers.holds()
            _copy(sources, buffers.tensors)
            staged = [
                copy.deepcopy(leaf) if of_leaf is None else own
                for leaf, of_leaf, own in zip(leaves, parts, buffers.leaves, strict=True)
            ]
            with self._lock:
                self._made.append(buffers)
            state: dict[str, Any] = pytree.tree_unflatten(staged, structure)
            return state

    def synchronize_staging(self) -> None:
        """There is nothing left to wait for."""

    def close(self) -> None:
        """Lets go of the memory that is free."""
        with self._lock:
            self._made.clear()

    def _take(self, layout: Any) -> _Buffers | None:
        with self._lock:
            free = [buffers for buffers in self._made if buffers.holds() == buffers.unheld]
            fitting = next((buffers for buffers in free if buffers.layout == layout), None)
            kept = [buffers for buffers in free if buffers is not fitting][-_MOST_FREE:]
            # What is held is its holder's, and watched for him to let go, up to that many.
            held = [buffers for buffers in self._made if all(buffers is not other for other in free)][-_MOST_WATCHED:]
            self._made = kept + held
            return fitting


def _parts(leaf: Any) -> list[torch.Tensor] | None:
    """This rank's parts of a tensor; None for what is none."""
    if isinstance(leaf, DTensor):
        return [_local(leaf)]
    if isinstance(leaf, ShardedTensor):
        return [shard.tensor.detach() for shard in leaf.local_shards()]
    if not isinstance(leaf, torch.Tensor):
        return None
    if type(leaf) not in PLAIN_TENSORS or leaf.layout is not torch.strided:
        raise StateUnsupported(f"a tensor of type {type(leaf).__name__} ({leaf.layout}) cannot be staged")
    return [leaf.detach()]


def _local(tensor: DTensor) -> torch.Tensor:
    local: torch.Tensor = tensor._local_tensor.detach()
    return local


def _look(leaf: Any, parts: Sequence[torch.Tensor] | None) -> Any:
    """Equal for two leaves exactly when one's memory fits the other."""
    if parts is None:
        return None
    forms = [(part.shape, part.dtype, part.device.type) for part in parts]
    if isinstance(leaf, DTensor):
        return forms, leaf.device_mesh, leaf.placements, leaf.shape, leaf.stride()
    if isinstance(leaf, ShardedTensor):
        return forms, id(leaf._process_group), repr(leaf.metadata())
    return forms, leaf.requires_grad


def _make(layout: Any, leaves: Sequence[Any], parts: Sequence[list[torch.Tensor] | None]) -> _Buffers:
    tensors: list[torch.Tensor] = []
    own: list[Any] = []
    for leaf, of_leaf in zip(leaves, parts, strict=True):
        if of_leaf is None:
            own.append(None)
            continue
        made = [_empty(part) for part in of_leaf]
        tensors += made
        own.append(_stand_in(leaf, made))
    return _Buffers(layout=layout, tensors=tensors, leaves=own)


def _objects(leaf: Any) -> list[Any]:
    """What can be held of a leaf that stands on buffers."""
    if isinstance(leaf, DTensor):
        return [leaf, leaf._local_tensor]
    if isinstance(leaf, ShardedTensor):
        return [leaf, *leaf.local_shards()]
    return [] if leaf is None else [leaf]


def _empty(part: torch.Tensor) -> torch.Tensor:
    return torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=part.is_cuda)


def _stand_in(leaf: Any, parts: Sequence[torch.Tensor]) -> Any:
    """What the planner takes for the leaf, on these parts."""
    if isinstance(leaf, DTensor):
        # Planners ask for the local part and where it belongs, never for a computation on the mesh's device.
        return DTensor.from_local(
            parts[0], leaf.device_mesh, leaf.placements, run_check=False, shape=leaf.shape, stride=leaf.stride()
        )
    if isinstance(leaf, ShardedTensor):
        shards = [Shard(part, shard.metadata) for part, shard in zip(parts, leaf.local_shards(), strict=True)]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, leaf.metadata(), process_group=leaf._process_group, init_rrefs=False
        )
    return parts[0]


def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    if not sources:
        return
    with torch.no_grad():
        torch._foreach_copy_(targets, sources, non_blocking=True)
    if any(source.is_cuda for source in sources):
        torch.cuda.synchronize()


__all__ = ["StepfastStager"]
