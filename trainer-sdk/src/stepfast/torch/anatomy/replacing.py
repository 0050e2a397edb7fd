"""What torch does not let be chosen is replaced for a while, in the whole process, and put back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Within, `name` of a module or class is `value`; what it had itself, or had not, comes back."""
    own = vars(owner)
    had, before = name in own, own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def backward_passes(wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> AbstractContextManager[None]:
    """Within, backward passes are run by what `wrapped` makes of the function of torch's that runs them."""
    name = "_engine_run_backward"
    return replaced(torch.autograd, name, wrapped(getattr(torch.autograd, name)))


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Within, the process has these variables; what they were, or were not, comes back."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
