"""What operations cost: FLOPs, bytes and time, in the three classes of the document.

The classes are those of Ivanov et al., "Data Movement Is All You Need" (2020), which "Model training anatomy" takes
over: tensor contractions, statistical normalisations, element-wise operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Any

import torch
from torch.utils import flop_counter
from torch.utils._pytree import tree_unflatten

from stepfast.torch.anatomy.devices import Device
from stepfast.torch.anatomy.recorder import Call, TensorShape
from stepfast.torch.anatomy.timeline import Phase
from stepfast.torch.anatomy.workspaces import KernelRun

_aten = torch.ops.aten
_LAUNCH_SECONDS = 5e-6  # what a CUDA kernel costs at least


class OperationClass(StrEnum):
    """How much an operation computes for what it moves."""

    CONTRACTION = "contraction"  # products of matrices, convolutions, attention in one kernel
    NORMALISATION = "normalisation"  # reductions whose result is applied again: softmax, norms
    ELEMENT_WISE = "element-wise"  # all others: biases, dropout, activations, residuals, copies


# FLOPs an element of the largest tensor: what a careful implementation does, sqrt and exp as one each.
_NORMALISATION_FLOPS: dict[str, float] = {
    "aten::_softmax": 5, "aten::_log_softmax": 5, "aten::_safe_softmax": 6,
    "aten::_softmax_backward_data": 4, "aten::_log_softmax_backward_data": 4,
    "aten::native_layer_norm": 7, "aten::native_layer_norm_backward": 11,
    "aten::native_group_norm": 7, "aten::native_group_norm_backward": 11,
    "aten::native_batch_norm": 7, "aten::native_batch_norm_backward": 11,
    "aten::cudnn_batch_norm": 7, "aten::cudnn_batch_norm_backward": 11,
    "aten::_fused_rms_norm": 5, "aten::_fused_rms_norm_backward": 9,
}  # fmt: skip
_FOREACH = "aten::_foreach_"
_REDUCTIONS = frozenset(
    f"aten::{name}"
    for name in (
        *("sum", "mean", "var", "var_mean", "std", "amax", "amin", "max", "min", "logsumexp", "linalg_vector_norm"),
        *("norm", "cumsum", "nll_loss_forward"),
    )
)
_MOVES = frozenset(
    f"aten::{name}"
    for name in (
        *("clone", "copy_", "_to_copy", "cat", "stack", "embedding", "embedding_dense_backward", "index", "gather"),
        *("index_select", "fill_", "zero_", "zeros", "zeros_like", "ones", "ones_like", "full", "empty", "empty_like"),
        *("new_zeros", "new_empty", "constant_pad_nd", "slice_backward", "lift_fresh"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one kind of call costs. `moved_bytes`: read and written, each tensor once."""

    kind: OperationClass
    flops: float
    moved_bytes: int
    is_half: bool  # computes in 16 bits

    def roofline_seconds(self, device: Device) -> float:
        """The least time on a device: by its arithmetic or by its memory, whichever takes longer."""
        if not self.moved_bytes:
            return 0.0
        return max(self.flops / self.peak_flops(device), self.moved_bytes / device.bandwidth)

    def peak_flops(self, device: Device) -> float:
        """What the device does at most with such an operation, in FLOP/s."""
        if self.kind is OperationClass.CONTRACTION and self.is_half:
            return device.half_flops
        return device.fp32_flops


class Costs:
    """Costs of calls; each kind of call is looked at once."""

    def __init__(self) -> None:
        self._known: dict[Any, Cost] = {}

    def of(self, call: Call) -> Cost:
        key = call.signature
        if key not in self._known:
            self._known[key] = _cost(call)
        return self._known[key]

    def seconds_on(self, device: Device) -> Callable[[Call, KernelRun | None], float]:
        """How long a call takes: as its kernel was measured, else at the device's roofline."""

        def seconds(call: Call, run: KernelRun | None) -> float:
            if run is not None and run.seconds is not None:
                return run.seconds
            bound = self.of(call).roofline_seconds(device)
            return max(bound, _LAUNCH_SECONDS) if device.is_cuda and bound else bound

        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassCost:
    """All calls of one class in one phase of a step."""

    kind: OperationClass
    phase: Phase
    calls: int
    flops: float
    moved_bytes: int
    seconds: float


def costs_by_class(timed: Iterable[tuple[Call, float]], costs: Costs, *, step: int) -> tuple[ClassCost, ...]:
    """Sums over one step. `timed` are calls with their seconds."""
    sums: dict[tuple[OperationClass, Phase], list[float]] = {}
    for call, seconds in timed:
        if call.step != step or call.phase is Phase.SETUP:
            continue
        cost = costs.of(call)
        if not cost.moved_bytes:
            continue
        total = sums.setdefault((cost.kind, call.phase), [0, 0.0, 0, 0.0])
        for index, value in enumerate((1, cost.flops, cost.moved_bytes, seconds)):
            total[index] += value
    ordered = [(each, sums[each]) for each in product(OperationClass, Phase) if each in sums]
    return tuple(
        ClassCost(kind=kind, phase=phase, calls=int(calls), flops=flops, moved_bytes=int(moved), seconds=seconds)
        for (kind, phase), (calls, flops, moved, seconds) in ordered
    )


def _cost(call: Call) -> Cost:
    operator = call.signature.operator
    given = [leaf for leaf in call.signature.leaves if isinstance(leaf, TensorShape)]
    shapes = (*given, *call.outputs)
    # A number that kernels.py keeps as a tensor is made by torch without any operation.
    is_number = operator is _aten.scalar_tensor.default
    is_view = is_number or (not call.made and not operator._schema.is_mutable)
    moved = 0 if is_view else sum(map(_bytes, shapes))
    flops, kind = _flops(call)
    floats = [shape.dtype for shape in shapes if shape.dtype.is_floating_point]
    is_half = bool(floats) and all(dtype.itemsize == 2 for dtype in floats[:2])
    return Cost(kind=kind, flops=0.0 if is_view else flops, moved_bytes=moved, is_half=is_half)


def _flops(call: Call) -> tuple[float, OperationClass]:
    operator = call.signature.operator
    formula = _contraction(operator)
    if formula is not None:
        leaves = [tuple(leaf.size) if isinstance(leaf, TensorShape) else leaf for leaf in call.signature.leaves]
        args, kwargs = tree_unflatten(leaves, call.signature.spec)
        results = tuple(None if shape is None else tuple(shape.size) for shape in call.results)
        flops = formula(*args, **kwargs, out_val=results[0] if len(results) == 1 else results)
        return float(flops), OperationClass.CONTRACTION
    name = operator._schema.name
    if name.startswith(_FOREACH):
        return _foreach_flops(call, name)
    elements = max((math.prod(shape.size) for shape in call.outputs), default=0)
    given = max((math.prod(leaf.size) for leaf in call.signature.leaves if isinstance(leaf, TensorShape)), default=0)
    if name in _NORMALISATION_FLOPS:
        return _NORMALISATION_FLOPS[name] * max(elements, given), OperationClass.NORMALISATION
    if name in _REDUCTIONS:
        return float(given), OperationClass.NORMALISATION
    return 0.0 if name in _MOVES else float(elements), OperationClass.ELEMENT_WISE


def is_contraction(call: Call) -> bool:
    """Whether the call's operation is of that class."""
    return _contraction(call.signature.operator) is not None


def _foreach_flops(call: Call, name: str) -> tuple[float, OperationClass]:
    """One operation on each tensor of the first list."""
    args, _ = tree_unflatten(list(call.signature.leaves), call.signature.spec)
    elements = float(sum(math.prod(shape.size) for shape in args[0]))
    if f"aten::{name.removeprefix(_FOREACH)}" in _REDUCTIONS:
        return elements, OperationClass.NORMALISATION
    is_move = f"aten::{name.removeprefix(_FOREACH)}" in _MOVES
    return 0.0 if is_move else elements, OperationClass.ELEMENT_WISE


def _contraction(operator: torch._ops.OpOverload[Any, Any]) -> Callable[..., Any] | None:
    packet = operator.overloadpacket
    if packet is _aten._scaled_dot_product_flash_attention_for_cpu:
        return _attention
    if packet is _aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return _attention_backward
    formula: Callable[..., Any] | None = flop_counter.flop_registry.get(packet)
    return formula


def _attention(query: Any, key: Any, value: Any, *_rest: Any, **_more: Any) -> int:
    return int(flop_counter.sdpa_flop_count(query, key, value))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_rest: Any, **_more: Any) -> int:
    return int(flop_counter.sdpa_backward_flop_count(gradient, query, key, value))


def _bytes(shape: TensorShape) -> int:
    return math.prod(shape.size) * shape.dtype.itemsize
