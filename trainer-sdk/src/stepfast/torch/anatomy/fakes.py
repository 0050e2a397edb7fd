"""Fake tensors for a training step: no memory, no arithmetic, and an answer where a number is read from a tensor."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from stepfast.errors import AnatomyError
from stepfast.torch.anatomy.generators import untouched_generators
from stepfast.torch.anatomy.replacing import replaced
from stepfast.torch.anatomy.values import KnownValues

_aten = torch.ops.aten
NO_LAZY_MODULES = "the model has lazy modules, whose sizes are known after a first batch: make them with their sizes"
_swap_tensors = torch.utils.swap_tensors
_deepcopy: Callable[..., torch.Tensor] = torch.Tensor.__deepcopy__


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors made within are fake. Those made outside may be used, and are taken for fake ones of their shape."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()  # what cycles hold would end at moments of the collector's own choice
    try:
        with (
            untouched_generators(),
            FakeTensorMode(allow_non_fake_inputs=True),
            _Answers(),
            replaced(torch.utils, "swap_tensors", _swap),
            replaced(torch.Tensor, "__deepcopy__", _copy),
        ):
            yield
    except torch._subclasses.fake_tensor.DynamicOutputShapeException as error:
        raise AnatomyError(
            f"the step makes a tensor whose size depends on values ({error.func}); only steps whose shapes follow from "
            "their inputs' shapes can be predicted. Pad or bound it for the prediction, or measure instead"
        ) from error
    finally:
        if was_enabled:
            gc.enable()


def on_fakes(make_model: Callable[[], Any]) -> Any:
    """The model of fake tensors: as it is made, or where its tensors are real ones a copy, so that these stay as they
    are. Raises AnatomyError for what cannot be predicted so.
    """
    try:
        model = make_model()
        if not isinstance(model, nn.Module):
            return model
        tensors = (*model.parameters(), *model.buffers())
        here = active_fake_mode()
        if any(isinstance(each, FakeTensor) and each.fake_mode is not here for each in tensors):
            raise AnatomyError("model_fn returned a model that was made for another prediction: let it make a new one")
        check_places("model_fn", tensors)
        return model if all(isinstance(each, FakeTensor) for each in tensors) else deepcopy(model)
    except RuntimeError as error:
        if "UninitializedParameter" in str(error):
            raise AnatomyError(NO_LAZY_MODULES) from error
        raise


def taken_for_real() -> AbstractContextManager[None]:
    """Within, Transformers, where it is in use, does not ask whether a tensor is fake: it would make masks then that it
    does without in training, and by them other kernels of attention would be chosen.
    """
    name = "is_fake_tensor"
    asking = sys.modules.get("transformers.utils.import_utils")
    return replaced(asking, name, lambda _tensor: False) if hasattr(asking, name) else nullcontext()


def check_places(maker: str, tensors: Iterable[torch.Tensor]) -> None:
    """Raises AnatomyError unless all are the CPU's: these stand for the device's, whatever that is."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise AnatomyError(
                f"{maker} makes tensors on {tensor.device}: let it make the CPU's, which are taken for the device's"
            )


class _Answers(TorchDispatchMode):
    """Numbers that a step reads. What is known is said; else a question is answered with no (loops that go on while
    something is wrong end), a floating-point number, as in reading a loss for a log, with 1."""

    def __init__(self) -> None:
        super().__init__()
        self._values = KnownValues()

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload[Any, Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _aten._local_scalar_dense.default and getattr(args[0], "constant", None) is None:
            return self._read(args[0])
        if func.overloadpacket in _MULTIPLIED:
            _check_dtypes(args)
        if func in _COMPARED:
            return self._are_equal(args[0], args[1])
        if torch.Tag.dynamic_output_shape in func.tags:
            known = self._values.shaped_by_values(func, args, kwargs or {})
            if known is not None:
                return known
        result = func(*args, **(kwargs or {}))
        if func is _aten.native_layer_norm_backward.default:  # its stand-in's result has the strides of the gradient
            result = tuple(None if each is None else each.contiguous() for each in result)
        self._values.follow(func, args, kwargs or {}, result)
        return result

    def _read(self, tensor: torch.Tensor) -> bool | int | float:
        value = self._values.of(tensor)
        if value is not None:
            with unset_fake_temporarily():
                return value.item()
        if tensor.dtype in (torch.bool, torch.uint8):  # DeepSpeed asks in bytes whether anything overflowed
            return False if tensor.dtype is torch.bool else 0
        if tensor.is_floating_point():
            return 1.0
        raise AnatomyError(
            "the step reads a whole number from a tensor (.item(), int(), .tolist()), which has no value in a "
            "prediction. Take it from the batch's shape, or measure instead"
        )

    def _are_equal(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        if first is second:
            return True
        one, other = self._values.of(first), self._values.of(second)
        if one is None or other is None:
            return False
        with unset_fake_temporarily():
            return torch.equal(one, other)


_MULTIPLIED = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.convolution}


def _check_dtypes(args: tuple[Any, ...]) -> None:
    """Raises AnatomyError where a kernel would refuse: stand-ins multiply anything."""
    dtypes = {each.dtype for each in args if isinstance(each, torch.Tensor) and each.is_floating_point()}
    if len(dtypes) > 1:
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise AnatomyError(
            f"the step multiplies {names}, which torch refuses: make the batch in the model's dtype, or train in mixed "
            "precision"
        )


_COMPARED = (_aten.equal.default, _aten.allclose.default)


def _swap(first: torch.Tensor, second: torch.Tensor) -> None:
    """torch.utils.swap_tensors, by which modules change the dtype of fake parameters, refuses all that is weakly
    referenced; the fake mode refers weakly to each tensor that it has made."""
    if not (isinstance(first, FakeTensor) and isinstance(second, FakeTensor)):
        _swap_tensors(first, second)
        return
    first.__dict__, second.__dict__ = second.__dict__, first.__dict__
    torch._C._swap_tensor_impl(first, second)


def _copy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """Tensor.__deepcopy__, which would copy the fake mode with a fake tensor, and the memory of a real one."""
    if not tensor.is_leaf:
        return _deepcopy(tensor, memo)  # it says why not
    if id(tensor) not in memo:
        with torch.no_grad():
            copied = tensor.clone()
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = (
            nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied.requires_grad_(tensor.requires_grad)
        )
    copy: torch.Tensor = memo[id(tensor)]
    return copy
