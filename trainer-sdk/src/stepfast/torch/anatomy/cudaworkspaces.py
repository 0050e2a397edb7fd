"""What CUDA's kernels allocate for themselves, as far as their sources say it: for machines where they cannot be asked.

Known are the workspaces of cuBLAS (aten/src/ATen/cuda/CublasHandlePool.cpp) and of attention's backward passes
(aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, attention_backward.cu). cuDNN chooses an algorithm for
each convolution on the device itself, with a workspace of its own: that is not known here.
"""

from __future__ import annotations

import math

import torch

from stepfast.torch.anatomy.devices import Device
from stepfast.torch.anatomy.operations import is_contraction
from stepfast.torch.anatomy.recorder import Call, TensorShape
from stepfast.torch.anatomy.timeline import Phase
from stepfast.torch.anatomy.workspaces import KernelRun, Piece

_aten = torch.ops.aten
_FLOAT_BYTES = 4
_HALF = (torch.float16, torch.bfloat16)
_CUDNN = (_aten.convolution, _aten.convolution_backward)


class CudaWorkspaces:
    """One for each prediction: cuBLAS keeps a workspace for each thread that multiplies, from its first product on."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._threads: set[bool] = set()  # autograd's thread multiplies with a handle of its own

    def of(self, call: Call) -> KernelRun | None:
        sizes: list[int] = []
        kept: list[int] = []
        packet = call.signature.operator.overloadpacket
        if packet is _aten._scaled_dot_product_flash_attention_backward:
            sizes = _flash_backward(call)
        elif packet is _aten._scaled_dot_product_efficient_attention_backward:
            sizes = _efficient_backward(call)
        elif is_contraction(call) and packet not in _CUDNN:
            kept = self._cublas(call)
        if not sizes and not kept:
            return None
        return KernelRun(_pieces(kept, sizes, call), None)

    def _cublas(self, call: Call) -> list[int]:
        is_backward = call.phase is Phase.BACKWARD
        if is_backward in self._threads:
            return []
        self._threads.add(is_backward)
        return [self._device.cublas_workspace_bytes]


def _pieces(kept: list[int], sizes: list[int], call: Call) -> tuple[Piece, ...]:
    """First what stays, then the results, then what is given back at the end."""
    births = [
        *(Piece(at, size, True, None) for at, size in enumerate(kept)),
        *(Piece(len(kept) + at, None, True, at) for at in range(len(call.made))),
    ]
    first = len(births)
    births += [Piece(first + at, size, True, None) for at, size in enumerate(sizes)]
    return (*births, *(Piece(piece.ordinal, piece.size_bytes, False, None) for piece in births[first:]))


def _flash_backward(call: Call) -> list[int]:
    """Its sums for the queries' gradient in fp32, and a number for each row; sizes are rounded up to its blocks."""
    query = _shapes(call)[1]
    batch, heads, length, width = query.size
    rows = batch * heads * _up(length, 128)
    return [rows * _FLOAT_BYTES, rows * _up(width, 32) * _FLOAT_BYTES]


def _efficient_backward(call: Call) -> list[int]:
    """A number for each row; where results are of 16 bits, sums for the queries' gradient in fp32."""
    query = _shapes(call)[1]
    batch, heads, length, _ = query.size
    sizes = [batch * heads * _up(length, 32) * _FLOAT_BYTES]
    if query.dtype in _HALF:
        sizes.append(math.prod(query.size) * _FLOAT_BYTES)
    return sizes


def _shapes(call: Call) -> list[TensorShape]:
    return [leaf for leaf in call.signature.leaves if isinstance(leaf, TensorShape)]


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
