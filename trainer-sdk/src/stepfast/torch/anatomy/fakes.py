"""Fake tensors for a training step: no memory, no arithmetic, and an answer where a number is read from a tensor."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
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
        with FakeTensorMode(allow_non_fake_inputs=True), _Answers():
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
