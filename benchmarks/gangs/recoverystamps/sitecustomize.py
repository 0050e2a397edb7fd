"""Python imports this at the start of each process that has this folder on its path: launchers and ranks are stamped,
and when they import what takes long, without a change of what they run."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from stamps import forked_time, stamp  # type: ignore[import-not-found, unused-ignore] # it lies beside this file

_LAUNCHERS = {"stepfast.launcher", "torch.distributed.run"}
_WATCHED = {"launcher": ("torch", "torch.distributed.run"), "rank": ("torch", "stepfast.torch")}


class _Watch:
    """A finder that finds nothing itself, and has the import of some modules stamped."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = set(names)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._names:
            return None
        self._names.discard(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def timed(module: ModuleType) -> None:
            stamp(f"{name}: import begins")
            execute(module)
            stamp(f"{name}: imported")

        spec.loader.exec_module = timed  # type: ignore[method-assign] # a loader is one module's
        return spec


def _begin() -> None:
    role = "rank" if "RANK" in os.environ else "launcher" if _LAUNCHERS.intersection(sys.orig_argv) else ""
    if not role:
        return
    attempt, rank = int(os.environ.get("STEPFAST_ATTEMPT", "0")), int(os.environ.get("RANK", "-1"))
    stamp("forked", time=forked_time(), role=role, attempt=attempt, rank=rank)
    stamp("python is there")
    sys.meta_path.insert(0, _Watch(_WATCHED[role]))


if "BENCH_STAMPS" in os.environ:
    _begin()
