"""The walk of `state.collect` once more over a nest whose structure is known: what a save does each time.

Nothing is described anew and no object is made for a leaf: containers that hold tensors alone are compared whole, in
C. Only what travels pickled is pickled anew, for anything in it may have changed. A nest of another structure, or one
that this walk cannot judge, is `collect`'s to take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch

from stepfast.torch.dtypes import PLAIN_TENSORS
from stepfast.torch.pickled import Placed, Skeletons
from stepfast.torch.state import DICTS, SEQUENCES, Found, leaf_tag, leaf_tensor

_Match = Callable[[Any, Found], bool]
"""Appends what the node holds to what is found, in `collect`'s order; False when its structure is another."""

_requires_grad = attrgetter("requires_grad")
_KEYS = frozenset({str, int, bool, type(None)})  # keys that are equal exactly when their types and values are
_VALUES = frozenset({int, float, bool, type(None), complex})  # always values, whatever they are


class Retrace:
    """Knows one nest's structure."""

    def __init__(self, root: object, objects: Sequence[Placed]) -> None:
        """The nest has been collected: it is finite, all in it can be saved, and `objects` were found in it."""
        try:
            self._match: _Match | None = _matcher(root, iter(objects))
        except _Unknown:
            self._match = None

    def collect(self, root: object, skeletons: Skeletons) -> Found | None:
        """The nest's tensors and values in `collect`'s order; None unless its structure is surely the known one."""
        found = Found(skeletons)
        if self._match is None or not self._match(root, found):
            return None
        return found


class _Unknown(Exception):
    """Something that is not worth knowing: the slow walk takes it."""


def _matcher(node: Any, objects: Iterator[Placed]) -> _Match:
    kind = type(node)
    if isinstance(node, torch.Tensor):
        return _tensor(node)
    if kind is defaultdict:
        raise _Unknown
    if kind in DICTS:
        return _dict(node, objects)
    if kind in SEQUENCES:
        return _sequence(node, objects)
    tag = leaf_tag(node)
    return _object(node, next(objects)) if tag == "p" else _leaf(node, tag)


def _tensor(known: torch.Tensor) -> _Match:
    kind, requires_grad = type(known), known.requires_grad
    if kind not in PLAIN_TENSORS:
        raise _Unknown

    def match(node: Any, found: Found) -> bool:
        found.tensors.append(node)
        return type(node) is kind and bool(node.requires_grad == requires_grad)

    return match


def _dict(known: dict[Any, Any], objects: Iterator[Placed]) -> _Match:
    kind, keys = type(known), list(known)
    key_types = list(map(type, keys))
    if not _KEYS.issuperset(key_types):
        raise _Unknown
    match_children = _children(list(known.values()), objects)

    def match(node: Any, found: Found) -> bool:
        if type(node) is not kind:
            return False
        names = list(node)
        return names == keys and list(map(type, names)) == key_types and match_children(list(node.values()), found)

    return match


def _sequence(known: Any, objects: Iterator[Placed]) -> _Match:
    kind, match_children = type(known), _children(list(known), objects)

    def match(node: Any, found: Found) -> bool:
        return type(node) is kind and match_children(list(node), found)

    return match


def _children(known: list[Any], objects: Iterator[Placed]) -> Callable[[list[Any], Found], bool]:
    types = list(map(type, known))
    if known and PLAIN_TENSORS.issuperset(types):
        grads = list(map(_requires_grad, known))

        def match_tensors(nodes: list[Any], found: Found) -> bool:
            if list(map(type, nodes)) != types or list(map(_requires_grad, nodes)) != grads:
                return False
            found.tensors += nodes
            return True

        return match_tensors
    matchers = [_matcher(child, objects) for child in known]

    def match_each(nodes: list[Any], found: Found) -> bool:
        if len(nodes) != len(matchers):
            return False
        return all(match(node, found) for match, node in zip(matchers, nodes, strict=True))

    return match_each


def _object(known: Any, placed: Placed) -> _Match:
    kind = type(known)

    def match(node: Any, found: Found) -> bool:
        return type(node) is kind and leaf_tag(node) == "p" and found.add_object(node) == placed

    return match


def _leaf(known: Any, tag: str) -> _Match:
    kind = type(known)

    def match(node: Any, found: Found) -> bool:
        is_value = tag == "v" and type(node) in _VALUES
        if not is_value and (type(node) is not kind or leaf_tag(node) != tag):
            return False
        if tag == "v":
            found.values.append(node)
        else:
            found.tensors.append(leaf_tensor(tag, node))
        return True

    return match
