"""What torch calls on a device, called on stand-ins for it.

Fake tensors of a CUDA device cannot go backward on a machine without one: autograd asks the driver for a stream. So the
stand-ins are the CPU's, and what torch would choose differently on CUDA is chosen here: fused dropout, the kernels of
attention, autocast's lists. A mode sees calls by name, before torch takes them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its customary name
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from stepfast.torch.anatomy.attention import LOWER_PRECISION, Attention, AttentionKernels
from stepfast.torch.anatomy.replacing import backward_passes, replaced


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
    """Calls what CUDA would run on a device of this compute capability; under autocast by CUDA's lists, where those of
    the CPU, in force beneath, say something else.

    `softmax_keeps_input`: up to torch 1.10 the backward pass of softmax was given its input, though it needs the
    result alone, so both were kept. `fuses_rms_norm`: of later releases.
    """

    def __init__(
        self,
        capability: tuple[int, int],
        attention: Attention = Attention.AUTO,
        *,
        softmax_keeps_input: bool = False,
        fuses_rms_norm: bool = True,
    ) -> None:
        super().__init__()
        self._attention = AttentionKernels(capability=capability, asked=attention, dropout=_dropout)
        self._softmax_keeps_input, self._fuses_rms_norm = softmax_keeps_input, fuses_rms_norm

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
        if func is F.multi_head_attention_forward:
            with _taken_apart(self):
                return func(*args, **kwargs)
        if torch.is_autocast_enabled("cpu"):
            if func in _CPU_ALONE:
                with torch.autocast("cpu", enabled=False):
                    return func(*args, **kwargs)
            args, kwargs = _cast(func, args, kwargs)
        if func is F.scaled_dot_product_attention:
            with torch.autocast("cpu", enabled=False):  # one operation to autocast, whatever it is made of
                return self._attention.attend(*args, **kwargs)
        if func is F.rms_norm and self._fuses_rms_norm:
            return _rms_norm(*args, **kwargs)
        if self._softmax_keeps_input and func in _SOFTMAX:
            return _softmax_of_1_10(*args, **kwargs)
        return func(*args, **kwargs)


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


def _rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """On CUDA one kernel, where input and weight are of one dtype. Stand-ins have none, and would be taken through its
    parts: LayerNorm's stands for it, which keeps a number more for each row.
    """
    if weight is not None and weight.dtype is not input.dtype:
        return F.rms_norm(input, normalized_shape, weight, eps)
    return F.layer_norm(input, normalized_shape, weight, None, torch.finfo(input.dtype).eps if eps is None else eps)


def _functions(names: str) -> frozenset[Any]:
    """The functions of these names, wherever torch offers them."""
    places = (torch, F, Tensor, torch.special, torch.linalg)
    found = (getattr(place, name, None) for name in names.split() for place in places)
    return frozenset(each for each in found if each is not None)


# aten/src/ATen/autocast_mode.h: what CUDA runs in fp32 …
_FP32 = _functions(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ softplus layer_norm "
    "rms_norm group_norm nuclear_norm frobenius_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss "
    "soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm "
    "logsumexp interpolate upsample"
)
# … what it runs with a result in fp32 unless the caller says another …
_SOFTMAX = _functions("softmax")
_FP32_RESULT = _functions("prod softmax log_softmax cumprod cumsum sum norm vector_norm matrix_norm")
# … and, a composition of these: its log_softmax is called within C++.
_CROSS_ENTROPY = _functions("cross_entropy")
# What it runs in lower precision, and the CPU does not …
_LOWERED = _functions(
    "prelu mv addmv addr chain_matmul multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
    "scaled_dot_product_attention"
)
# … and what the CPU alone runs in fp32 (aten/src/ATen/autocast_mode.cpp).
_CPU_ALONE = _functions(
    "avg_pool3d grid_sample grid_sampler polar quantile nanquantile stft trace view_as_complex max_pool3d max_unpool2d "
    "max_unpool3d adaptive_avg_pool3d pad"
)


def _cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if func in _FP32 or func in _CROSS_ENTROPY:
        args, kwargs = tree_map_only(Tensor, _to_fp32, (args, kwargs))
    elif func in _LOWERED:
        args, kwargs = tree_map_only(Tensor, _to_lower, (args, kwargs))
    elif func in _FP32_RESULT and kwargs.get("dtype") is None:
        given = args[0] if args else kwargs.get("input")
        if isinstance(given, Tensor) and given.dtype in LOWER_PRECISION:
            kwargs = {**{key: value for key, value in kwargs.items() if key != "_stacklevel"}, "dtype": torch.float32}
    return args, kwargs


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in LOWER_PRECISION else tensor


def _to_lower(tensor: Tensor) -> Tensor:
    return tensor.to(torch.get_autocast_dtype("cpu")) if tensor.dtype is torch.float32 else tensor
