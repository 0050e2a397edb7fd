"""What a kernel allocates for itself beside its results, and how long it takes: asked of the kernel.

Each kind of call is made once, on zeros, with the profiler on. That is exact for the device that it is asked on, down
to the eight bytes of a wrapped scalar, and stays so when a release of torch changes a kernel. No training step is run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_unflatten

from stepfast.torch.anatomy.generators import untouched_generators
from stepfast.torch.anatomy.history import cpu_history
from stepfast.torch.anatomy.recorder import Call, Signature, TensorShape

_UNASKED = frozenset({"c10d", "_c10d_functional", "prim", "profiler", "fsdp"})
_LIMIT_BYTES = 4 << 30
_RNN_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default


@dataclass(frozen=True, slots=True)
class Piece:
    """A kernel takes memory (`is_birth`) or gives back what it took as its `ordinal`-th piece.

    `made` is the number of the result that lies there, among the storages that the call makes; None for a workspace.
    `size_bytes` None: as large as the result.
    """

    ordinal: int
    size_bytes: int | None
    is_birth: bool
    made: int | None


@dataclass(frozen=True, slots=True)
class KernelRun:
    """What happens within one call, in order. `seconds` is None where nobody measured it."""

    pieces: tuple[Piece, ...]
    seconds: float | None


class Workspaces(Protocol):
    """Knows what happens within a call. None: nothing but its results."""

    def of(self, call: Call) -> KernelRun | None: ...


class AskedWorkspaces:
    """Asks this machine's CPU, each kind of call once; calls whose tensors exceed `limit_bytes` are left out."""

    def __init__(self, *, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._known: dict[Signature, KernelRun | None] = {}

    def of(self, call: Call) -> KernelRun | None:
        signature = call.signature
        if signature not in self._known:
            self._known[signature] = self._ask(call) if self._is_askable(call) else None
        return self._known[signature]

    def _is_askable(self, call: Call) -> bool:
        operator = call.signature.operator
        if operator.namespace in _UNASKED or (not call.made and _is_view(operator)):
            return False
        shapes = (*(leaf for leaf in call.signature.leaves if isinstance(leaf, TensorShape)), *call.outputs)
        return sum(map(_span_bytes, shapes)) <= self._limit_bytes

    def _ask(self, call: Call) -> KernelRun | None:
        try:
            with untouched_generators(), torch.set_grad_enabled(call.signature.keeps):
                return _run(call.signature)
        except (RuntimeError, TypeError, ValueError, IndexError):
            # Zeros are no valid argument of some operations; the step itself runs on other values.
            return None


def _run(signature: Signature) -> KernelRun:
    given = _materialized(signature)
    if signature.operator is _RNN_BACKWARD:
        given = _with_rnn_workspace(given[0]), given[1]
    before = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves(given) if isinstance(tensor, torch.Tensor)}
    args, kwargs = given
    with cpu_history() as history:
        started = time.perf_counter()
        result = signature.operator(*args, **kwargs)
        seconds = time.perf_counter() - started
    pointers: list[int] = []
    for tensor in tree_leaves(result):
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            pointer = tensor.untyped_storage().data_ptr()
            if pointer and pointer not in before and pointer not in pointers:
                pointers.append(pointer)
    return KernelRun(_pieces([(each.address, each.size_bytes) for each in history.changes], pointers), seconds)


def _with_rnn_workspace(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """oneDNN's backward pass reads what its forward pass left in a workspace, whose size no stand-in knows. It does not
    look how large that is, so a forward pass makes one.
    """
    inputs = args[:7]
    reverse, mode, hidden_size, num_layers, has_biases, train, bidirectional, batch_sizes, batch_first = args[13:22]
    with torch.enable_grad():
        made = torch.ops.aten.mkldnn_rnn_layer.default(
            *inputs, reverse, batch_sizes, mode, hidden_size, num_layers, has_biases, bidirectional, batch_first, train
        )
    return (*args[:-1], made[-1])


def _pieces(changes: Sequence[tuple[int, int]], results: Sequence[int]) -> tuple[Piece, ...]:
    """`changes` are (pointer, signed bytes). A pointer may be taken, given back and taken again: results live last."""
    last_birth = {pointer: index for index, (pointer, size) in enumerate(changes) if size > 0}
    pieces: list[Piece] = []
    living: dict[int, int] = {}
    births = 0
    for index, (pointer, size) in enumerate(changes):
        if size > 0:
            is_result = pointer in results and last_birth[pointer] == index
            pieces.append(Piece(births, size, True, results.index(pointer) if is_result else None))
            living[pointer] = births
            births += 1
        elif pointer in living:
            pieces.append(Piece(living.pop(pointer), -size, False, None))
    return tuple(pieces)


def _materialized(signature: Signature) -> tuple[tuple[Any, ...], dict[str, Any]]:
    leaves = [
        torch.empty_strided(leaf.size, leaf.stride, dtype=leaf.dtype).zero_() if isinstance(leaf, TensorShape) else leaf
        for leaf in signature.leaves
    ]
    args, kwargs = tree_unflatten(leaves, signature.spec)
    return args, kwargs


def _span_bytes(shape: TensorShape) -> int:
    """Bytes of the smallest storage that holds such a tensor."""
    if 0 in shape.size:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(shape.size, shape.stride, strict=False))
    return (last + 1) * shape.dtype.itemsize


def _is_view(operator: torch._ops.OpOverload[Any, Any]) -> bool:
    returns = operator._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)
