"""The objects of a Checkpointer: taking their states out, putting them back, and which of them all ranks share."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn.parallel import DistributedDataParallel

from stepfast.errors import CheckpointMismatch
from stepfast.torch.state import Collected, collect

RNG = "rng"
_RESERVED = (RNG,)


class ObjectSet:
    """Named objects. Raises TypeError or ValueError for what can be neither saved nor restored."""

    def __init__(self, objects: Mapping[str, Any], replicated: Sequence[str]) -> None:
        for name, item in objects.items():
            if name in _RESERVED:
                raise ValueError(f"the name {name!r} is taken by the random generators")
            if not _has_state(item) and not isinstance(item, dict):
                raise TypeError(
                    f"{name} is a {type(item).__name__}: it needs state_dict() and load_state_dict(), or to be a dict"
                )
        unknown = sorted(set(replicated) - set(objects))
        if unknown:
            raise ValueError(f"replicated names {', '.join(unknown)}, which is not among the objects")
        self._objects = dict(objects)
        self._declared = frozenset(replicated)
        wrapped = [name for name, item in objects.items() if _is_equal_on_all_ranks(item)]
        self.replicated_names = sorted({*replicated, *wrapped})

    def state(self) -> dict[str, Any]:
        """Each object's state by its name. What DDP wraps is saved as what it wraps."""
        return {
            name: _unwrapped(item).state_dict() if _has_state(item) else item for name, item in self._objects.items()
        }

    def replicated_tensors(self, root: Mapping[str, Any], collected: Collected) -> list[bool]:
        """For each collected tensor of the root, in order, whether all ranks have the same.

        Of a DDP-wrapped module these are the parameters that DDP keeps equal; its buffers are each rank's own between
        two forward passes.
        """
        flags: list[bool] = []
        for name, state in root.items():
            item = self._objects.get(name)
            count = len(collect(state).tensors)
            if name in self._declared:
                flags += [True] * count
            elif _is_ddp(item) and name in self.replicated_names:
                flags += _parameter_flags(item, state)
            else:
                flags += [False] * count
        if len(flags) != len(collected.tensors):
            raise AssertionError("the state changed while it was described")
        return flags

    def load(self, states: Mapping[str, Any], *, step: int) -> None:
        """Puts the states into the objects. Raises CheckpointMismatch when an object has none."""
        missing = sorted(set(self._objects) - set(states))
        if missing:
            raise CheckpointMismatch(
                f"step {step} holds {', '.join(sorted(states)) or 'nothing'}, but not {', '.join(missing)}"
            )
        for name, item in self._objects.items():
            if _has_state(item):
                try:
                    _unwrapped(item).load_state_dict(states[name])
                except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
                    raise CheckpointMismatch(f"{name} does not take the state of step {step}: {error}") from error
            elif isinstance(states[name], dict):
                _update_in_place(item, states[name])
            else:
                kind = type(states[name]).__name__
                raise CheckpointMismatch(f"{name} is a dict and does not take the {kind} of step {step}")


def _has_state(item: Any) -> bool:
    return callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))


def _is_ddp(item: Any) -> TypeGuard[DistributedDataParallel]:
    return isinstance(item, DistributedDataParallel)


def _is_equal_on_all_ranks(item: Any) -> bool:
    """Whether DDP keeps the module equal on every rank of the job: over all of them, and at every step."""
    if not _is_ddp(item) or dist.get_world_size(item.process_group) != dist.get_world_size():
        return False
    # Under post-local SGD the replicas drift apart between two averagings. DDP keeps its hooks to itself.
    return not any(isinstance(state, PostLocalSGDState) for _, state in getattr(item, "_comm_hooks", ()))


def _unwrapped(item: Any) -> Any:
    return item.module if _is_ddp(item) else item


def _parameter_flags(model: DistributedDataParallel, state: Mapping[str, Any]) -> list[bool]:
    parameters = {name for name, _ in model.module.named_parameters(remove_duplicate=False)}
    parameters -= set(model.parameters_to_ignore)
    flags: list[bool] = []
    for key, value in state.items():
        flags += [key in parameters] * len(collect(value).tensors)
    return flags


def _update_in_place(target: MutableMapping[Any, Any], state: Mapping[Any, Any]) -> None:
    """The dict becomes the state; tensors that fit stay the caller's own and take the values."""
    for key in [key for key in target if key not in state]:
        del target[key]
    for key, value in state.items():
        target[key] = _taken(target.get(key), value)


def _taken(known: Any, value: Any) -> Any:
    """What stands for the value: what was there, holding it now, if it can; an optimizer may refer to it."""
    if isinstance(known, torch.Tensor) and isinstance(value, torch.Tensor) and _fits(known, value):
        with torch.no_grad():
            known.copy_(value)
        return known
    if type(known) is dict and type(value) is dict:
        _update_in_place(known, value)
        return known
    if type(known) is list and type(value) is list:
        known[:] = [*map(_taken, known, value), *value[len(known) :]]
        return known
    return value


def _fits(known: torch.Tensor, value: torch.Tensor) -> bool:
    is_alike = type(known) is type(value) and known.shape == value.shape and known.dtype == value.dtype
    return is_alike and known.is_leaf and known.is_contiguous() and known.requires_grad == value.requires_grad
