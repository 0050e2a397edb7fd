"""Which module an operation belongs to: in the forward pass by the modules' own hooks, in the backward pass by the
sequence numbers that autograd gives to its nodes.

A node gets its number when the forward operation that made it begins; so the module that was active at that number is
the one whose backward pass the node is.
"""

from __future__ import annotations

from bisect import bisect_right
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class ModulePath:
    """The dotted name of the module at work. Within its context, names follow the modules' calls."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._roots: list[nn.Module] = []  # held: a name is known by the module's id
        self._active: list[str] = []
        self._depths: list[int] = []  # of autograd's graph tasks, beside `_active`: see `is_recomputing`
        self._numbers: list[int] = [0]  # sequence numbers at which …
        self._modules: list[str] = [""]  # … the module at work became this one
        self._hooks: list[Any] = []

    def name(self, root: nn.Module) -> None:
        """Knows the modules in `root` by their names from now on (again, when wrappers have changed them)."""
        self._roots.append(root)
        for name, module in root.named_modules():
            self._names[id(module)] = name

    def __enter__(self) -> ModulePath:
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def current(self) -> str:
        """The module at work, "" outside of all known ones."""
        if self._active and (not _is_backward() or self.is_recomputing()):
            return self._active[-1]
        node: Any = torch._C._current_autograd_node()  # none outside of a node, whatever torch declares
        if node is None:
            return ""
        return self._modules[bisect_right(self._numbers, node._sequence_nr()) - 1]

    def is_recomputing(self) -> bool:
        """Whether a forward pass runs within a backward pass: activation checkpointing."""
        return bool(self._depths) and self._depths[-1] >= 0 and _is_backward()

    def _enter(self, module: nn.Module, _arguments: object) -> None:
        self._active.append(self._names.get(id(module), self._active[-1] if self._active else ""))
        self._depths.append(torch._C._current_graph_task_id())
        self._turn()

    def _leave(self, _module: nn.Module, _arguments: object, _output: object) -> None:
        # A module that raised before its hook ran leaves nothing behind; one that was never entered is none of ours.
        if self._active:
            self._active.pop()
            self._depths.pop()
            self._turn()

    def _turn(self) -> None:
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._modules.append(self._active[-1] if self._active else "")


def _is_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
