"""Batches: how they are made, what tensors are in them, and how they come to a device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from stepfast.errors import AnatomyError

BatchFunction = Callable[..., Any]


def batch_of(batch_fn: BatchFunction, batch_size: int | None) -> Any:
    """What `batch_fn` makes, given `batch_size` when it takes an argument. Raises AnatomyError when it needs one."""
    takes = [
        parameter
        for parameter in inspect.signature(batch_fn).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if batch_size is None:
        if takes and takes[0].default is inspect.Parameter.empty:
            raise AnatomyError("batch_fn takes a batch size: pass batch_size=…")
        return batch_fn()
    if batch_size < 1:
        raise AnatomyError(f"batch_size: {batch_size} is less than 1")
    if not takes:
        raise AnatomyError("batch_fn takes no argument, so it cannot follow batch_size: let it take the batch size")
    return batch_fn(batch_size)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of nested tuples, lists, mappings and dataclasses, in their order."""
    return list(_tensors(tree))


def moved(tree: Any, place: torch.device) -> Any:
    """The same with its tensors on a device. Mappings come back as dicts; what moves itself, by a method `to`, does."""
    if hasattr(tree, "to"):
        return tree.to(place)
    if isinstance(tree, Mapping):
        return {key: moved(value, place) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(moved(each, place) for each in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(moved(each, place) for each in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        given = [each.name for each in fields(tree) if each.init]
        return replace(tree, **{name: moved(getattr(tree, name), place) for name in given})
    return tree


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, tuple | list | set | frozenset):
        for value in tree:
            yield from _tensors(value)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for each in fields(tree):
            yield from _tensors(getattr(tree, each.name))
