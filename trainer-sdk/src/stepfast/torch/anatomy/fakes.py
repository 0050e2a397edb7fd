"""Fake tensors for a training step: no memory, no arithmetic, and an answer where a number is read from a tensor."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from stepfast.errors import AnatomyError

_READ = torch.ops.aten._local_scalar_dense.default


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors made within are fake. Those made outside may be used, and are taken for fake ones of their shape."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()  # what cycles hold would end at moments of the collector's own choice
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _Answers(), _swapped():
            yield
    except torch._subclasses.fake_tensor.DynamicOutputShapeException as error:
        raise AnatomyError(
            f"the step makes a tensor whose size depends on values ({error.func}); only steps whose shapes follow from "
            "their inputs' shapes can be predicted. Pad or bound it for the prediction, or measure instead"
        ) from error
    finally:
        if was_enabled:
            gc.enable()


class _Answers(TorchDispatchMode):
    """Numbers that a step reads: a question is answered with no (loops that go on while something is wrong end), a
    floating-point number, as in reading a loss for a log, with 1."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _READ and getattr(args[0], "constant", None) is None:
            dtype = args[0].dtype
            if dtype in (torch.bool, torch.uint8):  # DeepSpeed asks in bytes whether anything overflowed
                return False if dtype is torch.bool else 0
            if dtype.is_floating_point:
                return 1.0
            raise AnatomyError(
                "the step reads a whole number from a tensor (.item(), int(), .tolist()), which has no value in a "
                "prediction. Take it from the batch's shape, or measure instead"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def _swapped() -> Iterator[None]:
    """Modules change the dtype of fake parameters by torch.utils.swap_tensors, which refuses all that is weakly
    referenced; the fake mode refers weakly to each tensor that it has made."""
    original = torch.utils.swap_tensors

    def swap_tensors(first: torch.Tensor, second: torch.Tensor) -> None:
        if not (isinstance(first, FakeTensor) and isinstance(second, FakeTensor)):
            original(first, second)
            return
        first.__dict__, second.__dict__ = second.__dict__, first.__dict__
        torch._C._swap_tensor_impl(first, second)

    setattr(torch.utils, "swap_tensors", swap_tensors)  # noqa: B010 - mypy knows the function alone
    try:
        yield
    finally:
        setattr(torch.utils, "swap_tensors", original)  # noqa: B010
