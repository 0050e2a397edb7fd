"""What /proc tells of processes and of the machine. Knows nothing of benchmarks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def processes() -> Iterator[int]:
    """All process ids."""
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def command_of(pid: int) -> str:
    """Its command line; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def families(roots: Iterable[int]) -> set[int]:
    """Those processes, all of the sessions that they lead, and whoever descends from one of them."""
    found = set(roots)
    relations = {pid: (int(fields[1]), int(fields[3])) for pid in processes() if (fields := _stat(pid))}
    while True:
        more = {pid for pid, relatives in relations.items() if pid not in found and found.intersection(relatives)}
        if not more:
            return found & relations.keys()
        found |= more


def marked(variable: str, value: str) -> list[int]:
    """The processes whose environment, as they were started with, has the variable at that value; no zombies."""
    wanted = f"{variable}={value}".encode()
    found = []
    for pid in processes():
        try:
            if pid != os.getpid() and wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
        except OSError:
            continue
    return found


def anonymous_bytes(pid: int) -> int:
    """Memory that is the process's own: no files and no shared memory; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def proportional_bytes(pid: int) -> int:
    """Its memory, of what it shares with others its part (Pss); 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def shared_memory_bytes() -> int:
    """Shared memory and tmpfs of the whole machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Shmem:"))


def busy_seconds() -> float:
    """Processor time of the whole machine since it started, all but idle and waiting."""
    fields = [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / _TICKS


def processor_seconds(pids: Iterable[int]) -> float:
    """Processor time of those processes."""
    return sum((int(fields[11]) + int(fields[12])) / _TICKS for pid in pids if (fields := _stat(pid)))


def _stat(pid: int) -> list[str] | None:
    """The fields from the state on: the name before them may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
