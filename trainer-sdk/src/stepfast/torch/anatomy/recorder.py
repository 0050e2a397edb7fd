"""Records what operations are called and which storages they bring into being, and when these end.

It sees what passes torch's dispatcher, on real tensors or fake ones: results of operations. What a kernel allocates for
itself does not pass there (see workspaces.py). Storages are followed by weak references, so a block ends where its last
owner lets go of it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from stepfast.torch.anatomy.accumulation import Holders, as_without_a_mode, holders_of_a_buffer
from stepfast.torch.anatomy.modules import ModulePath
from stepfast.torch.anatomy.replacing import replaced
from stepfast.torch.anatomy.timeline import Block, Component, Phase

_COLLECTIVES = ("c10d::", "_c10d_functional::", "fsdp::")


class TensorShape(NamedTuple):
    """What a kernel's own memory and time depend on. Sizes and strides in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Signature(NamedTuple):
    """An operation on arguments of certain shapes: calls that are equal in it cost the same.

    `leaves` are the arguments, flattened: TensorShape for tensors; `spec` puts them together again. `keeps`: gradients
    are recorded, which some kernels ask themselves, to keep more for their backward pass.
    """

    operator: torch._ops.OpOverload[Any, Any]
    leaves: tuple[Any, ...]
    spec: Any  # torch.utils._pytree.TreeSpec
    keeps: bool


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operation. `made` are the blocks that came into being with it, in the order of its results.

    `results` has None where the operation returned none: a gradient that nobody needs.
    """

    signature: Signature
    results: tuple[TensorShape | None, ...]
    made: tuple[int, ...]
    module: str
    phase: Phase
    step: int
    is_recomputed: bool = False  # activation checkpointing's second time

    @property
    def outputs(self) -> tuple[TensorShape, ...]:
        return tuple(shape for shape in self.results if shape is not None)


@dataclass(frozen=True, slots=True)
class Begin:
    """The call with this index, and the blocks that it makes."""

    call: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """A block that came into being unseen is there from here on."""

    block: int


@dataclass(frozen=True, slots=True)
class Resize:
    """A storage has another size from here on; block `old` ends, `new` begins. FSDP frees and makes parameters so."""

    old: int
    new: int


@dataclass(frozen=True, slots=True)
class End:
    """A block ends, in `phase` of `step`."""

    block: int
    phase: Phase
    step: int


Entry = Begin | Adopt | Resize | End


@dataclass(slots=True)
class Sightings:
    """When and where a real run was seen: of each block its address and the time by which it was there; of each call
    its begin and end. Times in ns since the epoch.
    """

    blocks: list[tuple[int, int]] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)  # blocks, and when they ended
    calls: list[tuple[int, int]] = field(default_factory=list)
    phases: list[tuple[int, Phase, int]] = field(default_factory=list)  # since when, which, of which step


class Recorder(TorchDispatchMode):
    """Within its context, all operations of this thread are recorded in `log`, `calls` and `blocks`. Blocks that are
    `left_out` are no memory of the device.

    `sightings`: what is filled beside them where tensors are real.
    """

    def __init__(self, modules: ModulePath, sightings: Sightings | None = None) -> None:
        super().__init__()
        self._sightings = sightings
        self.log: list[Entry] = []
        self.calls: list[Call] = []
        self.blocks: list[Block] = []
        self.left_out: set[int] = set()
        self._modules = modules
        self._phase, self._step = Phase.SETUP, 0
        self._known = WeakIdKeyDictionary()  # UntypedStorage -> (block, weak reference)
        self._kept: set[int] = set()  # blocks whose component is decided, whatever becomes of them
        self._forward: set[int] = set()  # blocks of the forward pass under way
        self._is_paused = self._is_closed = False
        self._fake: Any = None
        self._watch = ExitStack()
        self._alone: Holders = holders_of_a_buffer()

    @contextmanager
    def phase(self, phase: Phase, step: int) -> Iterator[None]:
        """What happens within belongs to this phase of this step."""
        before = self._phase, self._step
        self.turn(phase, step)
        try:
            yield
        finally:
            self.turn(*before)

    def turn(self, phase: Phase, step: int) -> None:
        """What comes now belongs to this phase. What a forward pass leaves behind is activations."""
        if self._phase is Phase.FORWARD and phase is not Phase.FORWARD:
            for block in self._forward - self._kept:
                self.blocks[block].component = Component.ACTIVATIONS
            self._forward.clear()
        self._phase, self._step = phase, step
        if self._sightings is not None:
            self._sightings.phases.append((time.time_ns(), phase, step))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done within is done elsewhere: on the host, or before training. See `adopt` for what it leaves."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def adopt(self, component: Component, tensors: Iterable[torch.Tensor], *, module: str | None = None) -> None:
        """Takes in tensors that were made unseen, in their order; the memory of those is for `component`."""
        for tensor in tensors:
            for storage in _storages(tensor):
                if self._block(storage) is None:
                    block = self._begin(storage, component.value)
                    self.blocks[block].component = component
                    self._kept.add(block)
                    self.blocks[block].module = module or ""
                    self.log.append(Adopt(block))

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Of these nothing was recorded: they are the host's."""
        known = (self._block(storage) for tensor in tensors for storage in _storages(tensor))
        self.left_out.update(block for block in known if block is not None)

    def close(self) -> None:
        """Ends that come later are not recorded: what is still there stays there."""
        self._is_closed = True

    def label(self, component: Component, tensors: Iterable[torch.Tensor], *, module: str | None = None) -> None:
        """Says what the memory of these tensors is for, and whose it is; others than recorded ones are passed over."""
        for tensor in tensors:
            for storage in _storages(tensor):
                block = self._block(storage)
                if block is not None:
                    self.blocks[block].component = component
                    self._kept.add(block)
                    self.blocks[block].module = self.blocks[block].module if module is None else module

    def __enter__(self) -> Recorder:
        self._fake = active_fake_mode()
        self._watch.enter_context(replaced(torch.UntypedStorage, "resize_", self._resizing()))
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._watch.close()

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload[Any, Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # it comes again as operations on local tensors
        func = as_without_a_mode(func, args, self._alone)
        begin = time.time_ns()
        result = func(*args, **(kwargs or {}))
        # DTensor finds out shapes with fake tensors of its own, which are no memory of anyone.
        if active_fake_mode() is self._fake and not self._is_paused:
            if self._sightings is not None:
                self._sightings.calls.append((begin, time.time_ns()))
            self._record(func, args, kwargs or {}, result)
        return result

    def _record(
        self, func: torch._ops.OpOverload[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        name = str(func.name())
        leaves, spec = tree_flatten((args, dict(kwargs)))
        results = tree_leaves(result)
        outputs = [leaf for leaf in results if isinstance(leaf, torch.Tensor)]
        made: list[int] = []
        for tensor in outputs:
            for storage in _storages(tensor):
                if self._block(storage) is None:
                    made.append(self._begin(storage, name))  # noqa: PERF401 - the second storage asks for the first
        signature = Signature(func, tuple(map(_described, leaves)), spec, torch.is_grad_enabled())
        if name.startswith(_COLLECTIVES):
            self._communicated((*leaves, *outputs))
        elif func is torch.ops.aten._to_copy.default and self._is_weight(leaves[0]):
            self.label(Component.WEIGHTS, outputs)  # autocast's copy in lower precision
        shapes = tuple(_shape(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in results)
        self.calls.append(
            Call(
                signature=signature,
                results=shapes,
                made=tuple(made),
                module=self._modules.current(),
                phase=self._phase,
                step=self._step,
                is_recomputed=self._modules.is_recomputing(),
            )
        )
        self.log.append(Begin(len(self.calls) - 1))

    def _communicated(self, leaves: Iterable[Any]) -> None:
        """What collectives read and write is for communication, unless it is known to be something else."""
        for leaf in leaves:
            for storage in _storages(leaf) if isinstance(leaf, torch.Tensor) else ():
                block = self._block(storage)
                if block is not None and block not in self._kept:
                    self.blocks[block].component = Component.COMMUNICATION
                    self._kept.add(block)

    def _begin(self, storage: torch.UntypedStorage, operator: str) -> int:
        block = len(self.blocks)
        is_recomputed = self._phase is Phase.BACKWARD and self._modules.is_recomputing()
        component = Component.ACTIVATIONS if is_recomputed else Component.TEMPORARY
        if self._phase is Phase.SETUP:
            component = Component.INPUTS  # between two steps a batch is made, or brought to the device
        self.blocks.append(
            Block(storage.nbytes(), component, self._modules.current(), operator, self._phase, self._step)
        )
        self._follow(storage, block)
        if self._sightings is not None:
            self._sightings.blocks.append((storage.data_ptr(), time.time_ns()))
        if self._phase is Phase.FORWARD:
            self._forward.add(block)
        return block

    def _follow(self, storage: torch.UntypedStorage, block: int) -> None:
        # The record must not outlive the recorder: the reference holds it weakly.
        recorder = weakref.ref(self)

        def ended(_reference: object) -> None:
            alive = recorder()
            if alive is not None:
                alive._end(storage_key)

        storage_key = [block]  # what the storage's block is now: a resize changes it
        self._known[storage] = (storage_key, weakref.ref(storage, ended))

    def _end(self, key: list[int]) -> None:
        if self._is_closed:
            return
        self._forward.discard(key[0])
        if self._sightings is not None:
            self._sightings.ends.append((key[0], time.time_ns()))
        self.log.append(End(key[0], self._phase, self._step))

    def _block(self, storage: torch.UntypedStorage) -> int | None:
        known = self._known.get(storage)
        return None if known is None else known[0][0]

    def _is_weight(self, leaf: Any) -> bool:
        if not isinstance(leaf, torch.Tensor):
            return False
        blocks = (self._block(storage) for storage in _storages(leaf))
        return any(block is not None and self.blocks[block].component is Component.WEIGHTS for block in blocks)

    def _resizing(self) -> Callable[..., Any]:
        """`UntypedStorage.resize_`, which does not pass the dispatcher, seen."""
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self._resized(storage)
            return result

        return resize_

    def _resized(self, storage: torch.UntypedStorage) -> None:
        known = self._known.get(storage)
        if known is None or self.blocks[known[0][0]].size_bytes == storage.nbytes():
            return
        key, old = known[0], self.blocks[known[0][0]]
        new = len(self.blocks)
        self.blocks.append(Block(storage.nbytes(), old.component, old.module, old.operator, self._phase, self._step))
        if self._sightings is not None:
            self._sightings.blocks.append((storage.data_ptr(), time.time_ns()))
        if key[0] in self._kept:
            self._kept.add(new)
        self.log.append(Resize(key[0], new))
        key[0] = new


def _described(leaf: Any) -> Any:
    return _shape(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _shape(tensor: torch.Tensor) -> TensorShape:
    return TensorShape(tuple(tensor.shape), _stride(tensor), tensor.dtype)


def _stride(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.stride()) if tensor.layout is torch.strided else ()


def _storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Those that hold its elements: several for a subclass that wraps tensors."""
    if isinstance(tensor, DTensor):
        return _storages(tensor._local_tensor)
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        return [storage for name in flatten()[0] for storage in _storages(getattr(tensor, name))]
    if tensor.layout is not torch.strided:
        return []
    return [tensor.untyped_storage()]
