"""The objects of a Checkpointer: taking their states out, putting them back, and which of them all ranks share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn.parallel import DistributedDataParallel

from stepfast.errors import CheckpointMismatch
from stepfast.torch.rng import get_rng_state
from stepfast.torch.settled import checked_settlements
from stepfast.torch.sharedmemory import SharedMemory
from stepfast.torch.state import Json, leaves
from stepfast.torch.targets import OwnState

RNG = "rng"
_RESERVED = (RNG,)

OpenMemory = Callable[[str, int], SharedMemory | None]


class Resharding(Protocol):
    """An object whose ranks each hold a share of one state, and that divides it anew among another number of ranks."""

    def load_rank_states(self, states: Mapping[int, Any]) -> None:
        """Takes in what other ranks saved: every rank calls it alike, each with some of the states, by the rank that
        saved them; all of them together are given all. Raises ValueError.
        """


class Replicated(Protocol):
    """An object that is equal on all ranks, and says so itself: `replicated` need not name it."""

    @property
    def is_replicated(self) -> bool:
        """True."""


class Borrowing(Protocol):
    """An object that would share memory with the other processes of its node."""

    def use_node_memory(self, open_memory: OpenMemory) -> None:
        """`open_memory(name, size_bytes)`: see `stepfast.torch.sharedmemory.open_shared`."""


@dataclass(frozen=True, slots=True)
class RankStates:
    """What stands for an object's state where it was saved by another number of ranks."""

    states: Mapping[int, Any]


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
        self._declared = frozenset({*replicated, *(name for name, item in objects.items() if _says_it_is_equal(item))})
        wrapped = [name for name, item in objects.items() if _is_equal_on_all_ranks(item)]
        self.replicated_names = sorted({*self._declared, *wrapped})

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those of torch's kind."""
        return [item for item in self._objects.values() if isinstance(item, torch.optim.Optimizer)]

    def lend(self, open_memory: OpenMemory) -> None:
        """Tells objects that would share memory (`Borrowing`) where it is to be had."""
        for item in self._objects.values():
            take = getattr(_unwrapped(item), "use_node_memory", None)
            if callable(take):
                take(open_memory)

    @property
    def resharded_names(self) -> list[str]:
        """Those that take in what another number of ranks has saved (`Resharding`)."""
        return [name for name, item in self._objects.items() if _reshards(item)]

    def state(self) -> dict[str, Any]:
        """Each object's state by its name, and the random generators'. What DDP wraps is saved as what it wraps."""
        states = {
            name: _unwrapped(item).state_dict() if _has_state(item) else item for name, item in self._objects.items()
        }
        return {**states, RNG: get_rng_state()}

    def settled(self) -> list[tuple[torch.Tensor, int]]:
        """What the objects say of their tensors that do not change (`settled.Settling`). Raises TypeError."""
        found = []
        for name, item in self._objects.items():
            say = getattr(_unwrapped(item), "settled", None)
            if callable(say):
                found += checked_settlements(name, say())
        return found

    def replicated_tensors(self, structure: Json, count: int) -> list[bool]:
        """For each of the `count` tensors of the state that is described so, whether all ranks have the same.

        Of a DDP-wrapped module these are the parameters that DDP keeps equal; its buffers are each rank's own between
        two forward passes. Pickles are each rank's own: equal objects may look different in theirs.
        """
        shared: set[int] = set()
        own: set[int] = set()
        for name, child in structure[1]:
            item = self._objects.get(name)
            if name in self._declared:
                shared.update(_tensors_in(child))
            elif _is_ddp(item) and name in self.replicated_names:
                parameters = _replicated_parameters(item)
                for key, value in child[1]:
                    (shared if key in parameters else own).update(_tensors_in(value))
            else:
                own.update(_tensors_in(child))
        return [number in shared and number not in own for number in range(count)]

    def own_states(self) -> dict[str, OwnState]:
        """The states whose tensors are surely the objects' own memory: what is written to them, the object has.

        Of modules, optimizers and dicts; not of those that make their state, or take one in, in a way of their own.
        """
        found = {}
        for name, item in self._objects.items():
            inner = _unwrapped(item)
            if isinstance(item, dict):
                found[name] = OwnState(state=item, keeps_flags=False)
            elif isinstance(inner, torch.nn.Module) and _is_plain_module(inner):
                found[name] = OwnState(state=inner.state_dict(keep_vars=True), keeps_flags=True)
            elif isinstance(inner, torch.optim.Optimizer) and _is_plain_optimizer(inner):
                found[name] = OwnState(state=inner.state_dict(), keeps_flags=False)
        return found

    def expect(self, names: Sequence[str], *, step: int) -> None:
        """Raises CheckpointMismatch when there is an object that is not among the names."""
        missing = sorted(set(self._objects) - set(names))
        if missing:
            held = ", ".join(sorted(name for name in names if name not in _RESERVED)) or "nothing"
            raise CheckpointMismatch(f"step {step} holds {held}, but not {', '.join(missing)}")

    def bound_to_ranks(self, replicated: Collection[str]) -> list[str]:
        """Those that another number of ranks cannot take, where `replicated` are the names that all ranks share."""
        return sorted(set(self._objects) - {*replicated, *self.resharded_names})

    def explain_bound(self, names: Sequence[str]) -> str:
        """Why another number of ranks cannot take these objects, and what to do."""
        text = (
            f"{', '.join(names)}: each rank's own. Declare what is equal on all ranks `replicated` before it is saved, "
            "give what can be divided anew a method load_rank_states, leave out what is not needed"
        )
        if any(_is_sharded(self._objects[name]) for name in names):
            text += "; sharded models and optimizers (FSDP2, tensor parallel) are for stepfast.torch.dcp"
        return f'{text} (docs/guide.md, "Another number of ranks")'

    def load(self, states: Mapping[str, Any], *, step: int) -> None:
        """Puts the states into the objects. Raises CheckpointMismatch when one does not take its own."""
        for name, item in self._objects.items():
            if isinstance(states[name], RankStates):
                _translated(name, step, item.load_rank_states, states[name].states)
            elif _has_state(item):
                if _has_it_all(_unwrapped(item), states[name]):
                    continue
                _translated(name, step, _unwrapped(item).load_state_dict, states[name])
            elif isinstance(states[name], dict):
                _update_in_place(item, states[name])
            else:
                kind = type(states[name]).__name__
                raise CheckpointMismatch(f"{name} is a dict and does not take the {kind} of step {step}")


def _translated(name: str, step: int, load: Callable[[Any], object], state: Any) -> None:
    try:
        load(state)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointMismatch(f"{name} does not take the state of step {step}: {error}") from error


def _reshards(item: Any) -> bool:
    return callable(getattr(item, "load_rank_states", None))


def _says_it_is_equal(item: Any) -> bool:
    return getattr(item, "is_replicated", False) is True


def _is_sharded(item: Any) -> bool:
    """Whether the module's or the optimizer's parameters are shards of larger ones."""
    from torch.distributed.tensor import DTensor  # late: it takes a good part of torch's import

    if isinstance(item, torch.optim.Optimizer):
        parameters = [parameter for group in item.param_groups for parameter in group["params"]]
    else:
        parameters = list(item.parameters()) if isinstance(item, torch.nn.Module) else []
    return any(isinstance(parameter, DTensor) for parameter in parameters)


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


def _replicated_parameters(model: DistributedDataParallel) -> set[str]:
    names = {name for name, _ in model.module.named_parameters(remove_duplicate=False)}
    return names - set(model.parameters_to_ignore)


def _tensors_in(structure: Json) -> Iterator[int]:
    """But for the pickles."""
    for tag, content in leaves(structure):
        if tag == "p":
            yield from content[1]
        elif tag != "v":
            yield content


_MODULE_METHODS = (
    "state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict", "get_extra_state",
    "set_extra_state",
)  # fmt: skip
_MODULE_HOOKS = (
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
_OPTIMIZER_METHODS = ("state_dict", "load_state_dict", "_process_value_according_to_param_policy")
_OPTIMIZER_HOOKS = (
    "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)  # fmt: skip


def _is_plain_module(module: torch.nn.Module) -> bool:
    """Whether its state is its parameters and buffers, no more and no less."""
    return all(
        all(getattr(type(part), name) is getattr(torch.nn.Module, name) for name in _MODULE_METHODS)
        and not any(getattr(part, name) for name in _MODULE_HOOKS)
        for part in module.modules()
    )


def _is_plain_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it gives its tensors away, and takes them in, as torch's own do."""
    own, torchs = type(optimizer), torch.optim.Optimizer
    is_torchs = all(getattr(own, name) is getattr(torchs, name) for name in _OPTIMIZER_METHODS)
    return is_torchs and not any(getattr(optimizer, name) for name in _OPTIMIZER_HOOKS)


def _has_it_all(item: Any, state: Any) -> bool:
    """Whether the item is a module whose own tensors the state's are: there is nothing left to load."""
    if not isinstance(item, torch.nn.Module) or not isinstance(state, Mapping) or not _is_plain_module(item):
        return False
    own = item.state_dict(keep_vars=True)
    return own.keys() == state.keys() and all(_is_same_memory(own[name], state[name]) for name in own)


def _is_same_memory(one: torch.Tensor, other: Any) -> bool:
    if one is other:
        return True
    if not isinstance(other, torch.Tensor) or not one.is_cpu or not one.numel():
        return False
    looks_alike = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    return looks_alike and one.data_ptr() == other.data_ptr() and one.is_neg() == other.is_neg()


def _update_in_place(target: MutableMapping[Any, Any], state: Mapping[Any, Any]) -> None:
    """The dict becomes the state; tensors that fit stay the caller's own and take the values."""
    for key in [key for key in target if key not in state]:
        del target[key]
    for key, value in state.items():
        target[key] = _taken(target.get(key), value)


def _taken(known: Any, value: Any) -> Any:
    """What stands for the value: what was there, holding it now, if it can; an optimizer may refer to it."""
    if known is value:
        return known
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
