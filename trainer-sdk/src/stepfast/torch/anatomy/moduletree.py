"""Modules as a tree by their dotted names: the large ones unfolded, neighbouring layers of one shape as one. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from stepfast.torch.anatomy.report import ModuleMemory
from stepfast.torch.anatomy.sentences import ALL_OTHERS, ITSELF, NO_SUBMODULE

_LEAST_SHARE = 0.01  # of the whole: what is smaller is one of the others


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """A line of the tree: what a module holds with its submodules. `depth`: how far it is indented.

    `name` is relative to the row that it stands below; `0-23` are 24 layers of the same shape, together.
    """

    name: str
    kind: str
    depth: int
    components: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.components.values())


def module_rows(modules: Sequence[ModuleMemory], *, most: int = 16) -> tuple[ModuleRow, ...]:
    """The largest modules as an indented tree of about `most` rows; each level adds up to the row above it."""
    root = _merged(_tree(modules))
    if not root.total_bytes:
        return ()
    least_bytes = root.total_bytes * _LEAST_SHARE
    unfolded: set[int] = set()
    rows = 0
    waiting = [(-root.total_bytes, 0, root)]
    order = 0
    while waiting and rows < most:
        _, _, node = heapq.heappop(waiting)
        shown, others = _split(node, least_bytes)
        unfolded.add(id(node))
        rows += len(shown) + bool(others)
        for child in shown:
            if child.children:
                order += 1  # nodes do not compare
                heapq.heappush(waiting, (-child.total_bytes, order, child))
    return tuple(_rows(root, unfolded, least_bytes, depth=0))


@dataclass(slots=True, kw_only=True)
class _Node:
    name: str
    kind: str = ""
    components: dict[str, int] = field(default_factory=dict)  # its own
    children: dict[str, _Node] = field(default_factory=dict)
    total_bytes: int = 0  # with its children

    def whole(self) -> dict[str, int]:
        """Its components, its children's included."""
        summed = dict(self.components)
        for child in self.children.values():
            _add(summed, child.whole())
        return summed


def _tree(modules: Iterable[ModuleMemory]) -> _Node:
    root = _Node(name="")
    for module in modules:
        path = [root]
        for part in module.name.split(".") if module.name else ():
            path.append(path[-1].children.setdefault(part, _Node(name=part)))
        path[-1].kind = module.kind
        _add(path[-1].components, module.components)
        for node in path:
            node.total_bytes += module.total_bytes
    return root


def _merged(node: _Node) -> _Node:
    """The same tree with neighbouring layers of one shape as one node, and chains of only children as one name."""
    children: dict[str, _Node] = {}
    for _, group in groupby(node.children.values(), key=_LayerShapes()):
        layers = list(group)
        child = _merged(_sum(layers) if len(layers) > 1 else layers[0])
        children[child.name] = child
    if (
        node.name
        and not node.total_bytes - sum(child.total_bytes for child in children.values())
        and len(children) == 1
    ):
        (only,) = children.values()
        return _Node(
            name=f"{node.name}.{only.name}", kind=only.kind, components=only.components, children=only.children,
            total_bytes=only.total_bytes,
        )  # fmt: skip
    return _Node(
        name=node.name, kind=node.kind, components=node.components, children=children, total_bytes=node.total_bytes
    )


class _LayerShapes:
    """A key for groupby: equal for numbered neighbours that hold the same modules, and for nothing else."""

    def __init__(self) -> None:
        self._others = 0

    def __call__(self, node: _Node) -> object:
        if node.name.isdecimal():
            return frozenset(_shape(node, ""))
        self._others += 1
        return self._others


def _shape(node: _Node, path: str) -> Iterator[tuple[str, str]]:
    yield path, node.kind
    for child in node.children.values():
        yield from _shape(child, f"{path}.{child.name}")


def _sum(nodes: Sequence[_Node]) -> _Node:
    first = nodes[0]
    name = first.name if len(nodes) == 1 or not first.name.isdecimal() else f"{first.name}-{nodes[-1].name}"
    summed = _Node(name=name, kind=first.kind, total_bytes=sum(node.total_bytes for node in nodes))
    for node in nodes:
        _add(summed.components, node.components)
    for child in first.children:
        parts = [node.children[child] for node in nodes]
        summed.children[child] = _sum_alike(parts)
    return summed


def _sum_alike(nodes: Sequence[_Node]) -> _Node:
    """The sum of one and the same submodule of several layers."""
    summed = _sum(nodes)
    summed.name = nodes[0].name
    return summed


def _split(node: _Node, least_bytes: float) -> tuple[list[_Node], list[_Node]]:
    """A node's children and what it holds itself: those that are shown, largest first, and the others."""
    parts = list(node.children.values())
    own = sum(node.components.values())
    if own and parts:
        parts.append(_Node(name=ITSELF if node.name else NO_SUBMODULE, components=node.components, total_bytes=own))
    parts.sort(key=lambda part: -part.total_bytes)
    shown = [part for part in parts if part.total_bytes >= least_bytes]
    others = parts[len(shown) :]
    return (parts, []) if len(others) == 1 else (shown, others)


def _rows(node: _Node, unfolded: set[int], least_bytes: float, *, depth: int) -> Iterator[ModuleRow]:
    if node.name or not node.children:
        yield ModuleRow(name=node.name or NO_SUBMODULE, kind=node.kind, depth=depth, components=node.whole())
        depth += 1
    if id(node) not in unfolded:
        return
    shown, others = _split(node, least_bytes)
    for child in shown:
        yield from _rows(child, unfolded, least_bytes, depth=depth)
    if others:
        summed: dict[str, int] = {}
        for other in others:
            _add(summed, other.whole())
        yield ModuleRow(name=ALL_OTHERS, kind=f"{len(others)} modules", depth=depth, components=summed)


def _add(to: dict[str, int], components: Mapping[str, int]) -> None:
    for name, size in components.items():
        to[name] = to.get(name, 0) + size
