"""Moments in the life of a process, as JSON lines in a file of its own: what `benchmarks.gangs.recovery` reads.

Nothing is written where BENCH_STAMPS names no folder.
"""

from __future__ import annotations

import json
import os
import time

_FOLDER = os.environ.get("BENCH_STAMPS")


def stamp(name: str, **values: object) -> None:
    """The moment is now, unless `time` says otherwise (seconds since the epoch)."""
    if _FOLDER is None:
        return
    line = json.dumps({"name": name, "time": time.time(), "pid": os.getpid(), **values}) + "\n"
    descriptor = os.open(f"{_FOLDER}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def forked_time() -> float:
    """When this process was forked, to a hundredth of a second."""
    with open("/proc/self/stat", encoding="ascii") as stat:
        started = int(stat.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - started)
