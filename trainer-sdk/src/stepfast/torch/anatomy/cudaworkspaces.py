"""What CUDA's kernels allocate for themselves, as far as their sources say it: for machines where they cannot be asked.

Known are the workspaces of cuBLAS (aten/src/ATen/cuda/CublasHandlePool.cpp) and of attention's backward passes
(aten/src/ATen/native/transformers/cuda: flash_attn/flash_api.cpp, attention_backward.cu, mem_eff_attention/
kernel_backward.h). cuDNN's are not known here; `unknown` says where they run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from stepfast.torch.anatomy.attention import CUDNN_FIRST, LOWER_PRECISION
from stepfast.torch.anatomy.devices import Device
from stepfast.torch.anatomy.operations import is_contraction
from stepfast.torch.anatomy.recorder import Call, TensorShape
from stepfast.torch.anatomy.timeline import Phase
from stepfast.torch.anatomy.workspaces import KernelRun, Piece

_aten = torch.ops.aten
_FLOAT_BYTES = 4
_HEADER = 4  # numbers before each tile of sums
_CUDNN = {_aten.convolution, _aten.convolution_backward}
_CPU_RNN = {_aten.mkldnn_rnn_layer}
_MUCH_SHARED_MEMORY = ((7, 0), (8, 0), (9, 0), (10, 0))  # a block may take 96 KiB on Volta, 163 and more on the others


class CudaWorkspaces:
    """One for each prediction: cuBLAS keeps a workspace for each thread that multiplies, from its first product on."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._threads: set[bool] = set()  # autograd's thread multiplies with a handle of its own

    def of(self, call: Call) -> KernelRun | None:
        packet = call.signature.operator.overloadpacket
        if packet is _aten._scaled_dot_product_flash_attention_backward:
            return KernelRun(_pieces(call, held=_flash_backward(call)), None)
        if packet is _aten._scaled_dot_product_efficient_attention_backward:
            passing, held = _efficient_backward(call, self._device.capability)
            return KernelRun(_pieces(call, passing=passing, held=held), None)
        kept = self._cublas(call) if is_contraction(call) and packet not in _CUDNN else []
        return KernelRun(_pieces(call, kept=kept), None) if kept else None

    def _cublas(self, call: Call) -> list[int]:
        is_backward = call.phase is Phase.BACKWARD
        if is_backward in self._threads:
            return []
        self._threads.add(is_backward)
        return [self._device.cublas_workspace_bytes]


def unknown(calls: Iterable[Call], device: Device) -> tuple[str, ...]:
    """What runs on the device in ways that are not known here, in words."""
    packets = {call.signature.operator.overloadpacket for call in calls}
    notes: list[str] = []
    if packets & _CUDNN:
        notes.append("cuDNN chooses how convolutions run on the device: its workspaces for them are not counted")
    if packets & _CPU_RNN:
        notes.append("recurrent layers run as cuDNN's on the device: their memory is what the CPU's kernel takes")
    if device.capability >= CUDNN_FIRST and _aten._scaled_dot_product_flash_attention in packets:
        notes.append("attention may run as cuDNN's on the device: its memory is what flash takes")
    return tuple(notes)


def _pieces(
    call: Call, *, kept: Sequence[int] = (), passing: Sequence[int] = (), held: Sequence[int] = ()
) -> tuple[Piece, ...]:
    """First what stays, then the results; what passes before the kernel runs; last what is held while it does."""
    births = [
        *(Piece(at, size, True, None) for at, size in enumerate(kept)),
        *(Piece(len(kept) + at, None, True, at) for at in range(len(call.made))),
    ]
    first = len(births)
    passed = [Piece(first + at, size, True, None) for at, size in enumerate(passing)]
    until_end = [Piece(first + len(passed) + at, size, True, None) for at, size in enumerate(held)]
    return (*births, *passed, *until_end[:1], *_ended(passed), *until_end[1:], *_ended(until_end))


def _ended(births: Sequence[Piece]) -> list[Piece]:
    return [Piece(piece.ordinal, piece.size_bytes, False, None) for piece in births]


def _flash_backward(call: Call) -> list[int]:
    """A number for each row; sums for the queries' gradient in fp32, in whole blocks; where keys and values are
    shared, their gradients as if each head of the queries had its own.
    """
    _, query, key, value = _shapes(call)[:4]
    batch, heads, length, width = query.size
    rows = batch * heads * _up(length, 128)
    sizes = [rows * _FLOAT_BYTES, rows * _up(width, 32 if width <= 128 else 64) * _FLOAT_BYTES]
    if key.size[1] != heads:
        sizes += [batch * heads * each.size[2] * width * each.dtype.itemsize for each in (key, value)]
    return sizes


def _efficient_backward(call: Call, capability: tuple[int, int]) -> tuple[list[int], list[int]]:
    """What passes while the rows' numbers are made, and what the kernel holds: these, and its own sums."""
    _, query, key, value = _shapes(call)[:4]
    batch, heads, length, _ = query.size
    tile = _tile(query, max(query.size[3], value.size[3]), capability)
    rows = batch * heads * length * _FLOAT_BYTES
    passing: list[int] = []
    if not tile.sums_rows:
        products = rows * value.size[3]
        copies = [products, products] if query.dtype in LOWER_PRECISION else []
        passing = [*copies, products, rows]
    return passing, [rows, batch * heads * _sums(tile, query, key, value) * _FLOAT_BYTES]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """A memory-efficient backward kernel: queries and keys that a block works on. `keeps`: gradients of keys and values
    stay in registers; `sums_rows`: it computes the rows' numbers itself.
    """

    queries: int
    keys: int
    keeps: bool
    sums_rows: bool


def _tile(query: TensorShape, width: int, capability: tuple[int, int]) -> _Tile:
    """The first of mem_eff_attention/kernels/cutlassB.h that takes the width and fits the device's shared memory."""
    is_half, is_ampere = query.dtype in LOWER_PRECISION, capability >= (8, 0)
    has_much = capability in _MUCH_SHARED_MEMORY
    queries, keys, widest = 64, 64, 32 if width <= 32 else 64 if width <= 64 else 128 if width <= 128 else 1 << 16
    if is_half and capability in ((8, 6), (8, 9)) and 64 < width <= 96:
        queries, widest = 128, 96
    elif width > 64 and has_much and (is_ampere or is_half):
        queries, keys = 128, 128 if is_half and is_ampere and width <= 128 else 64
    keeps = is_half and widest <= queries
    return _Tile(queries=queries, keys=keys, keeps=keeps, sums_rows=is_half and (keeps or is_ampere))


def _sums(tile: _Tile, query: TensorShape, key: TensorShape, value: TensorShape) -> int:
    """Numbers of one head: of queries' gradients a tile with a header for each block; of keys' and values' a block for
    each part into which the keys are split, where half precision does not keep them in registers.
    """
    batch, heads, length, width = query.size
    of_queries = -(-length // tile.queries) * -(-width // tile.keys) * (_HEADER + tile.queries * tile.keys)
    if query.dtype not in LOWER_PRECISION or tile.keeps:
        return _up(of_queries, 4)
    splits = max(1, min(-(-key.size[2] // tile.keys), 200 // (batch * heads)))
    of_others = splits * tile.keys * (_up(width, tile.queries) + _up(value.size[3], tile.queries))
    return _up(of_queries + of_others, 4)


def _shapes(call: Call) -> list[TensorShape]:
    return [leaf for leaf in call.signature.leaves if isinstance(leaf, TensorShape)]


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
