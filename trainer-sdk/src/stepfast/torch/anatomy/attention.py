"""Which kernel scaled_dot_product_attention runs on a CUDA device, and that kernel called on stand-ins.

torch takes the first of its kernels that can do it (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp): cuDNN's on
newer devices, flash, the memory-efficient one, and last arithmetic written out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its customary name

_aten = torch.ops.aten
LOWER_PRECISION = (torch.float16, torch.bfloat16)
_AMPERE = (8, 0)
CUDNN_FIRST = (9, 0)  # torch asks cuDNN first from this capability on, on data centers' devices
_NO_WIDE_FLASH = ((8, 6), (8, 9), (12, 0))  # too little shared memory for flash's backward pass of wide heads


class Attention(StrEnum):
    """Which kernel `scaled_dot_product_attention` runs. Attention that a model writes out runs as it is written."""

    AUTO = "auto"  # what torch chooses by the device: cuDNN, flash, memory-efficient
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """What is attended to: query, key and value of (batch, heads, length, width), and a mask or the causal one."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool

    @property
    def are_plain(self) -> bool:
        """Of four dimensions, as the fused kernels want them."""
        return self.query.dim() == self.key.dim() == self.value.dim() == 4

    @property
    def need_gradients(self) -> bool:
        return torch.is_grad_enabled() and any(each.requires_grad for each in (self.query, self.key, self.value))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernels:
    """Those of a device of this compute capability. `asked`: the one that shall run, where it can."""

    capability: tuple[int, int]
    asked: Attention
    dropout: Callable[[Tensor, float], Tensor]  # CUDA's

    def attend(  # noqa: PLR0917 - torch's own signature
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """scaled_dot_product_attention, by the kernel that would run."""
        heads = Heads(query=query, key=key, value=value, mask=attn_mask, is_causal=is_causal)
        kernel = self.chosen(heads)
        if kernel is Attention.FLASH:
            return _flash(heads, dropout_p, scale)
        if kernel is Attention.EFFICIENT:
            result: Tensor = _aten._scaled_dot_product_efficient_attention(
                query, key, value, _bias(query, key, attn_mask), heads.need_gradients, dropout_p, is_causal, scale=scale
            )[0]
            return result
        if enable_gqa and key.shape[-3] != query.shape[-3]:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
            heads = Heads(query=query, key=key, value=value, mask=attn_mask, is_causal=is_causal)
        return self._written_out(heads, dropout_p, scale)

    def chosen(self, heads: Heads) -> Attention:
        """As torch's selection goes: its order, and what each kernel cannot do. cuDNN's keeps what flash keeps."""
        if self.asked is Attention.AUTO and self._fits_cudnn(heads):
            return Attention.FLASH
        if self.asked in (Attention.AUTO, Attention.FLASH) and self._fits_flash(heads):
            return Attention.FLASH
        if self.asked is not Attention.MATH and self._fits_efficient(heads):
            return Attention.EFFICIENT
        return Attention.MATH

    def _fits_cudnn(self, heads: Heads) -> bool:
        width = heads.query.shape[-1]
        is_here = CUDNN_FIRST <= self.capability < (11, 0) and heads.query.dtype in LOWER_PRECISION and heads.are_plain
        if heads.mask is not None and (heads.mask.requires_grad or heads.is_causal):
            return False
        return is_here and width == heads.value.shape[-1] and width % 8 == 0 and width <= 128

    def _fits_flash(self, heads: Heads) -> bool:
        query, width = heads.query, heads.query.shape[-1]
        if (
            self.capability < _AMPERE
            or query.dtype not in LOWER_PRECISION
            or heads.mask is not None
            or not heads.are_plain
        ):
            return False
        if heads.is_causal and query.shape[-2] != heads.key.shape[-2]:
            return False
        if heads.need_gradients and width > 192 and self.capability in _NO_WIDE_FLASH:
            return False
        return width == heads.value.shape[-1] <= 256

    def _fits_efficient(self, heads: Heads) -> bool:
        dtype = heads.query.dtype
        if not heads.are_plain or dtype not in (torch.float32, *LOWER_PRECISION):
            return False
        if dtype is torch.bfloat16 and self.capability < _AMPERE:
            return False
        multiple = 8 if dtype in LOWER_PRECISION else 4 if self.capability >= _AMPERE else 1
        return heads.query.shape[-1] % multiple == 0 and heads.value.shape[-1] % multiple == 0

    def _written_out(self, heads: Heads, dropout_p: float, scale: float | None) -> Tensor:
        """aten::_scaled_dot_product_attention_math, so that its dropout is CUDA's. Half precision goes through fp32."""
        query, key, value, mask = heads.query, heads.key, heads.value, heads.mask
        given = query.dtype
        if given in LOWER_PRECISION:
            query, key, value = query.float(), key.float(), value.float()
        root = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
        mask = None if mask is None else _float_mask(query, mask)
        if heads.is_causal:
            mask = query.new_ones(query.shape[-2], key.shape[-2]).tril()
            mask = torch.where(mask == 1, 0.0, float("-inf")).to(query.dtype)
        scores = (query * root) @ (key.transpose(-2, -1) * root)
        if mask is not None:
            scores = scores + mask
        weights = torch.softmax(scores, -1)
        return (self.dropout(weights, dropout_p) @ value).to(given)


def _flash(heads: Heads, dropout_p: float, scale: float | None) -> Tensor:
    """Flash takes widths that are multiples of 8: others are padded, and the result is cut."""
    query, key, value, width = heads.query, heads.key, heads.value, heads.value.shape[-1]
    scale = width**-0.5 if scale is None else scale
    missing = -width % 8
    if missing:
        query, key, value = (F.pad(each, (0, missing)) for each in (query, key, value))
    out: Tensor = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, heads.is_causal, scale=scale)[
        0
    ]
    return out[..., :width] if missing else out


def _float_mask(query: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.to(query.dtype)


def _bias(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask as the memory-efficient kernel takes it: rows aligned to 16 elements, expanded over batch and heads."""
    if mask is None:
        return None
    mask = _float_mask(query, mask)
    missing = -mask.shape[-1] % 16
    if missing:
        mask = F.pad(mask, (0, missing))[..., : mask.shape[-1]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
