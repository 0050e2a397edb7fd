"""What torch calls on a device, called on stand-ins for it.

Fake tensors of a CUDA device cannot go backward on a machine without one: autograd asks the driver for a stream. So the
stand-ins are the CPU's, and what torch would choose differently on CUDA is chosen here: fused dropout, the kernels of
attention, autocast's lists. A mode sees calls by name, before torch takes them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its customary name
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from stepfast.torch.anatomy.replacing import backward_passes, replaced

_LOWER = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten


class Attention(StrEnum):
    """Which kernel `scaled_dot_product_attention` runs. Attention that a model writes out runs as it is written."""

    AUTO = "auto"  # what torch chooses: flash in half precision, else memory-efficient
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


@contextmanager
def in_force(kernels: TorchFunctionMode) -> Iterator[None]:
    """Within, these are called; also by what backward passes compute again, at whose door torch leaves a mode."""

    def within(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_within(*args: Any, **kwargs: Any) -> Any:
            with kernels:
                return run(*args, **kwargs)

        return run_within

    with kernels, backward_passes(within):
        yield


@contextmanager
def _taken_apart(kernels: TorchFunctionMode) -> Iterator[None]:
    """For one call of what torch.nn.functional writes in Python: what it is made of is seen, too. It asks first whether
    a mode wants it whole.
    """
    asking = ExitStack()

    def asked(_tensors: object) -> bool:
        asking.close()
        return False

    with asking, kernels:
        asking.enter_context(replaced(F, "has_torch_function", asked))
        yield


class CpuKernels(TorchFunctionMode):
    """A CPU's own choice stands. What the dispatcher does not show: a number that a product keeps for the backward pass
    is a tensor of eight bytes."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.multi_head_attention_forward:
            with _taken_apart(self):
                return func(*args, **(kwargs or {}))
        if func in _KEEP_NUMBERS and len(args) == 2:
            args = (args[0], _kept_number(args[0], args[1]))
        return func(*args, **(kwargs or {}))


_KEEP_NUMBERS: frozenset[Any] = frozenset(
    {Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, Tensor.__imul__, torch.mul}
    | {Tensor.div, Tensor.__truediv__, Tensor.div_, Tensor.__itruediv__, torch.div, torch.true_divide}
)


def _kept_number(tensor: Any, number: Any) -> Any:
    if isinstance(number, bool) or not isinstance(number, int | float):
        return number
    if not (isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled()):
        return number
    if not tensor.dim():  # beside such a one it would have a say in the result's dtype
        return number
    return torch.scalar_tensor(number, dtype=torch.float64 if isinstance(number, float) else torch.int64)


class CudaKernels(TorchFunctionMode):
    """Calls what CUDA would run; under autocast by CUDA's lists, on top of the CPU's, which leave fewer operations in
    fp32.

    `softmax_keeps_input`: up to torch 1.10 the backward pass of softmax was given its input, though it needs the result
    alone, so both were kept.
    """

    def __init__(self, attention: Attention = Attention.AUTO, *, softmax_keeps_input: bool = False) -> None:
        super().__init__()
        self._attention = attention
        self._softmax_keeps_input = softmax_keeps_input

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (F.dropout, torch.dropout):
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with _taken_apart(self):
                return func(*args, **kwargs)
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = _cast(func, args, kwargs)
        if self._softmax_keeps_input and func in _SOFTMAX:
            return _softmax_of_1_10(*args, **kwargs)
        return func(*args, **kwargs)

    def _attend(  # noqa: PLR0917 - torch's own signature
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if torch.is_autocast_enabled("cpu"):
            query, key, value = (each.to(torch.get_autocast_dtype("cpu")) for each in (query, key, value))
        kernel = self._attention_kernel(query, key, attn_mask)
        if kernel is Attention.FLASH:
            query, key, value, width = *_padded(query, key, value, 8), value.shape[-1]
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            out: Tensor = _aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, scale=scale
            )[0]
            return out if out.shape[-1] == width else out[..., :width]
        if enable_gqa and key.shape[-3] != query.shape[-3]:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        if kernel is Attention.EFFICIENT:
            bias = _bias(query, key, attn_mask)
            needs = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
            result: Tensor = _aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, needs, dropout_p, is_causal, scale=scale
            )[0]
            return result
        mask = None if attn_mask is None else _float_mask(query, attn_mask)
        return _math_attention(query, key, value, mask, dropout_p, is_causal=is_causal, scale=scale)

    def _attention_kernel(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Attention:
        """As torch's selection goes: its order, and what each kernel cannot do."""
        fits_flash = query.dtype in _LOWER and mask is None and query.dim() == 4 and query.shape[-1] <= 256
        if self._attention in (Attention.AUTO, Attention.FLASH) and fits_flash:
            return Attention.FLASH
        fits_efficient = query.dim() == 4 and query.dtype is not torch.float64 and query.shape[-1] % 4 == 0
        if self._attention is not Attention.MATH and fits_efficient:
            return Attention.EFFICIENT
        return Attention.MATH


def _dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool | None = None
) -> Tensor:
    """On CUDA one kernel that keeps a mask of one byte an element; elsewhere a mask of the elements' own size."""
    active = training if train is None else train
    if not active or not 0 < p < 1 or input.numel() == 0 or inplace:
        return torch.dropout_(input, p, active) if inplace else torch.dropout(input, p, active)
    result: Tensor = torch.native_dropout(input, p, True)[0]
    return result


class _KeepingSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, dim: int) -> Tensor:
        result = torch._softmax(given, dim, False)
        ctx.save_for_backward(given, result)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        given, result = ctx.saved_tensors
        return torch._softmax_backward_data(gradients[0], result, ctx.dim, given.dtype), None


def _softmax_of_1_10(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    given = input if dtype is None else input.to(dtype)
    result: Tensor = _KeepingSoftmax.apply(given, -1 if dim is None else dim)
    return result


def _math_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    *,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """aten::_scaled_dot_product_attention_math, written out, so that its dropout is CUDA's."""
    root = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    if is_causal:
        mask = query.new_ones(query.shape[-2], key.shape[-2]).tril()
        mask = torch.where(mask == 1, 0.0, float("-inf")).to(query.dtype)
    scores = (query * root) @ (key.transpose(-2, -1) * root)
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, -1)
    return _dropout(weights, dropout_p, training=dropout_p > 0) @ value


def _padded(query: Tensor, key: Tensor, value: Tensor, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    missing = -query.shape[-1] % multiple
    if not missing:
        return query, key, value
    return F.pad(query, (0, missing)), F.pad(key, (0, missing)), F.pad(value, (0, missing))


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


def _functions(names: str) -> frozenset[Any]:
    """The functions of these names, wherever torch offers them."""
    places = (torch, F, Tensor, torch.special, torch.linalg)
    found = (getattr(place, name, None) for name in names.split() for place in places)
    return frozenset(each for each in found if each is not None)


# aten/src/ATen/autocast_mode.h: what CUDA runs in fp32 …
_FP32 = _functions(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ softplus layer_norm "
    "group_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss hinge_embedding_loss kl_div l1_loss "
    "smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss "
    "triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp"
)
# … what it runs with a result in fp32 unless the caller says another …
_SOFTMAX = _functions("softmax")
_FP32_RESULT = _functions("prod softmax log_softmax cumprod cumsum sum")
# … and, a composition of these: its log_softmax is called within C++.
_CROSS_ENTROPY = _functions("cross_entropy")


def _cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if func in _FP32 or func in _CROSS_ENTROPY:
        args, kwargs = tree_map_only(Tensor, _to_fp32, (args, kwargs))
        return args, kwargs
    if func in _FP32_RESULT and kwargs.get("dtype") is None and isinstance(args[0], Tensor) and args[0].dtype in _LOWER:
        kwargs = {key: value for key, value in kwargs.items() if key != "_stacklevel"}
        return args, {**kwargs, "dtype": torch.float32}
    return args, kwargs


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _LOWER else tensor
