"""How the script has ended: what is known of it when the process ends, and it has said nothing itself."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable
from enum import StrEnum
from types import FrameType
from typing import Any, NoReturn

_RETURNS = {"RETURN_VALUE", "RETURN_CONST"}  # RETURN_CONST: Python 3.12 and 3.13


class Ending(StrEnum):
    """What is known of a script that has ended."""

    ORDERLY = "Orderly"
    FAILED = "Failed"
    UNKNOWN = "Unknown"  # by an exception that says which status the process has, and that nobody can ask any more


class ScriptWatch:
    """Notes with which status the script calls `sys.exit`, and where its own module ended."""

    def __init__(self) -> None:
        self._main: FrameType | None = None
        self._theirs: Callable[..., NoReturn] | None = None
        self._ours: Callable[..., NoReturn] | None = None
        self._status: tuple[Any] | None = None

    def begin(self) -> None:
        """From the first call on, until `end`."""
        if self._main is None and threading.current_thread() is threading.main_thread():
            self._main = _main_module()
        if self._ours is not None:
            return
        theirs = self._theirs = sys.exit

        def exit(status: Any = None, /) -> NoReturn:
            if threading.current_thread() is threading.main_thread():  # elsewhere it ends that thread alone
                self._status = (status,)
            theirs(status)

        self._ours = sys.exit = exit

    def end(self) -> None:
        """`sys.exit` is what it was before."""
        if self._ours is not None and self._theirs is not None and sys.exit is self._ours:
            sys.exit = self._theirs
        self._ours = self._theirs = self._status = None

    def ending(self) -> Ending:
        """How the script has ended, asked when the process ends."""
        if hasattr(sys, "last_value"):
            return Ending.FAILED
        if self._main is not None and _has_returned(self._main):  # what was raised on the way was caught
            return Ending.ORDERLY
        if self._status is not None:
            return Ending.ORDERLY if self._status[0] in (None, 0) else Ending.FAILED
        return Ending.UNKNOWN if self._main is not None else Ending.ORDERLY


def _main_module() -> FrameType | None:
    """The frame of the script's own lines, if this is called from there."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            return frame
        frame = frame.f_back
    return None


def _has_returned(frame: FrameType) -> bool:
    return frame.f_lasti >= 0 and dis.opname[frame.f_code.co_code[frame.f_lasti]] in _RETURNS


__all__ = ["Ending", "ScriptWatch"]
