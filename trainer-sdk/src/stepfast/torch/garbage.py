"""Python's search for garbage, put off while thousands of objects are made that are no garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_kept() -> Iterator[None]:
    """A look at every tensor makes an object for each, which Python would take for a reason to search all that there
    are: 0.2 s with torch imported, in the middle of a save or a restore, of which nothing comes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
