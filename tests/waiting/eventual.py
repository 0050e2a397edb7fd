"""What tests wait for, and what they see of folders that running processes change meanwhile."""

from __future__ import annotations

import glob
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 90.0) -> Any:
    """The condition's first true value; fails the test when there is none within the deadline."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)
    return value


def files_in(folder: Path, pattern: str) -> list[Path]:
    """What `folder.glob(pattern)` finds, in order. A folder that is removed while it is looked through has nothing in
    it; pathlib's own raises then.
    """
    return sorted(folder / name for name in glob.iglob(pattern, root_dir=folder, recursive=True, include_hidden=True))
