"""Objects that only travel pickled, and how their tensors travel beside the pickle, like all others of the state.

What is pickled is a skeleton: where torch.save would write a tensor's bytes it has a number, and a restore puts the
tensor of that number there. What is no plain tensor (of another class, sparse, quantised, …) torch's own pickling takes
apart; the storages that it comes down to leave in the same way. So what comes back is what torch.load would bring back.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import warn_if_has_hooks

from stepfast.errors import CheckpointUnsafe, StateUnsupported
from stepfast.torch.dtypes import PLAIN_TENSORS, unsaveable
from stepfast.torch.sharing import is_plain

_PROTOCOL = 4  # from 5 on NumPy's arrays come back as views of the pickle, which cannot be resized
_ROOM_STEP = 1024
_MOST_SLACK = 64 * 1024
_STORAGES = (torch.UntypedStorage, torch.storage.TypedStorage)


class Skeleton:
    """An object's pickle, and the tensors that its numbers stand for, each with a name within the object.

    Raises StateUnsupported when the object cannot be pickled.
    """

    def __init__(self, node: object) -> None:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, _labels(node))
        try:
            pickler.dump(node)
        except Exception as error:
            raise _unpicklable(node, error) from error
        self.node = node  # held: by its identity it is known
        self.data = buffer.getvalue()
        self.tensors, self.names = pickler.tensors, pickler.names

    def tensor(self, room: int) -> torch.Tensor:
        """The pickle as a tensor of that many bytes: what follows its end is not read."""
        padded = bytearray(room)
        padded[: len(self.data)] = self.data
        return torch.frombuffer(padded, dtype=torch.uint8)


class Skeletons:
    """Those of one save: each object is pickled once, however often the state is walked.

    `rooms`: how many bytes the known layout has for each object's pickle, in their order.
    """

    def __init__(self, rooms: Sequence[int] = ()) -> None:
        self._rooms = rooms
        self._made: dict[int, Skeleton] = {}

    def of(self, node: object) -> Skeleton:
        """The object's. Raises StateUnsupported."""
        made = self._made.get(id(node))
        if made is None:
            made = self._made[id(node)] = Skeleton(node)
        return made

    def room(self, index: int, size: int) -> int:
        """How many bytes are for that object's pickle of `size` bytes: as many as before, while they do.

        With slack, or every counter in an object that grows by a digit would move all that lies behind it.
        """
        wanted = -(-(size + min(size // 4, _MOST_SLACK)) // _ROOM_STEP) * _ROOM_STEP
        known = self._rooms[index] if index < len(self._rooms) else 0
        return known if size <= known <= 2 * wanted else wanted


@dataclass(frozen=True, slots=True)
class Placed:
    """Where an object's parts stand among a state's tensors: its skeleton, and the tensors that the numbers mean.

    `added` are those that no object before it has: name within the object, class, and whether gradients are wanted.
    """

    skeleton: int
    tensors: tuple[int, ...]
    added: tuple[tuple[str, type, bool], ...]


def load_skeleton(data: torch.Tensor, tensors: Sequence[torch.Tensor], *, weights_only: bool) -> Any:
    """The object again, of these tensors. Raises CheckpointUnsafe when `weights_only`."""
    _refuse(weights_only)
    try:
        return _Unpickler(io.BytesIO(data.numpy().data), tensors).load()
    finally:
        # torch keeps a list of the sparse tensors that it has rebuilt, until a load ends.
        torch._utils._validate_loaded_sparse_tensors()  # type: ignore[no-untyped-call]  # torch's


def pickle_value(node: object) -> bytes:
    """A small object as a whole, by torch.save. Raises StateUnsupported."""
    buffer = io.BytesIO()
    try:
        torch.save(node, buffer)
    except Exception as error:
        raise _unpicklable(node, error) from error
    return buffer.getvalue()


def unpickle_value(data: bytes, *, weights_only: bool) -> Any:
    """`pickle_value`'s inverse. Raises CheckpointUnsafe when `weights_only`."""
    _refuse(weights_only)
    return torch.load(io.BytesIO(data), weights_only=False)


def _unpicklable(node: object, error: Exception) -> StateUnsupported:
    return StateUnsupported(f"an object of type {type(node).__qualname__} cannot be pickled: {error}")


def _refuse(weights_only: bool) -> None:
    if weights_only:
        raise CheckpointUnsafe(
            "the checkpoint holds pickled objects, which run code when loaded: pass weights_only=False if you trust it"
        )


# ---------------------------------------------------------------- what stands in a skeleton
# The names of these functions are part of the format.


def tensor_at(number: int) -> torch.Tensor:
    """Stands for the tensor of that number."""
    raise CheckpointUnsafe(f"tensor {number} is not in the pickle: only a restore knows it")


def storage_at(number: int, dtype: torch.dtype) -> Any:
    """Stands for the storage of the tensor of that number."""
    raise CheckpointUnsafe(f"storage {number} ({dtype}) is not in the pickle: only a restore knows it")


def set_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    """What the tensor has beside its own."""
    for name, value in attributes.items():
        setattr(tensor, name, value)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, labels: dict[int, str]) -> None:
        super().__init__(file, _PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self._labels = labels
        self._storages: dict[int, int] = {}

    # Not by persistent_id(), which would be called for each number and string too.
    def reducer_override(self, node: Any) -> Any:
        if type(node) in PLAIN_TENSORS:
            # Of lazily conjugated ones torch keeps the memory as it is, and what is tied to it.
            return self._tensor(node) if unsaveable(node) is None and is_plain(node) else NotImplemented
        if isinstance(node, _STORAGES):
            return self._storage(node)
        return NotImplemented

    def _tensor(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        if type(tensor) is torch.Tensor:
            warn_if_has_hooks(tensor)  # as torch does, which says nothing of a parameter's
        label = self._labels.get(id(tensor))
        # To torch what was computed is another leaf when it comes back.
        number = self._take(tensor if tensor.is_leaf else tensor.detach().requires_grad_(), label)
        attributes = vars(tensor)
        if not attributes:
            return tensor_at, (number,)
        return tensor_at, (number,), attributes, None, None, set_attributes

    def _storage(self, storage: torch.UntypedStorage | torch.storage.TypedStorage) -> Any:
        untyped, dtype = storage, torch.uint8  # torch.load brings all back with a type, and what it calls relies on it
        if isinstance(storage, torch.storage.TypedStorage):
            untyped, dtype = storage._untyped_storage, storage.dtype
        if untyped.device.type == "meta":
            return NotImplemented
        number = self._storages.get(untyped._cdata)
        if number is None:
            flat = torch.empty(0, dtype=torch.uint8, device=untyped.device).set_(untyped)
            number = self._storages[untyped._cdata] = self._take(flat, None)
        return storage_at, (number, dtype)

    def _take(self, tensor: torch.Tensor, label: str | None) -> int:
        self.tensors.append(tensor)
        self.names.append(str(len(self.names)) if label is None else label)
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == tensor_at.__name__:
            return self._tensors.__getitem__
        if module == __name__ and name == storage_at.__name__:
            return self._storage
        return super().find_class(module, name)

    def _storage(self, number: int, dtype: torch.dtype) -> Any:
        storage = self._tensors[number].untyped_storage()
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]  # torch's


# ---------------------------------------------------------------- names


def _labels(node: object) -> dict[int, str]:
    """Names for the tensors that lie openly in an object, by identity: its items, fields and attributes, and those of
    modules in it. Of each save anew: tensors may change places. The same on all ranks, and no code of the object runs.
    """
    labels: dict[int, str] = {}
    left, met = [("", node)], {id(node)}
    while left:
        prefix, holder = left.pop()
        for key, child in _parts(holder):
            if type(key) is not str:
                continue
            if type(child) in PLAIN_TENSORS:
                labels.setdefault(id(child), prefix + key)
            elif issubclass(type(child), torch.nn.Module) and id(child) not in met:
                met.add(id(child))
                left.append((f"{prefix}{key}.", child))
    return labels


def _parts(holder: Any) -> Iterator[tuple[Any, Any]]:
    kind = type(holder)
    own: Any = getattr(holder, "__dict__", None)
    if issubclass(kind, dict):
        yield from dict.items(holder)
    elif issubclass(kind, tuple):
        yield from zip(getattr(kind, "_fields", ()), tuple.__iter__(holder), strict=False)
    if type(own) is dict:
        if issubclass(kind, torch.nn.Module):
            for group in ("_parameters", "_buffers", "_modules"):
                yield from own.get(group, {}).items()
        yield from own.items()


__all__ = [
    "Placed", "Skeleton", "Skeletons", "load_skeleton", "pickle_value", "set_attributes", "storage_at", "tensor_at",
    "unpickle_value",
]  # fmt: skip
