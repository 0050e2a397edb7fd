"""How much memory this machine has for a job: its own, within the limits of a container, and that of its GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from stepfast_operator.observed import NodeMemory

NAME = "this machine"
_CGROUPS = Path("/sys/fs/cgroup")
_OF_THIS_PROCESS = Path("/proc/self/cgroup")


def machine_memory(slot_bytes: int, *, has_gpus: bool) -> NodeMemory:
    """What there is here. `slot_bytes`: what the agent may take. `has_gpus`: whether the job's ranks have any."""
    return NodeMemory(
        name=NAME,
        device_bytes=_gpu_bytes() if has_gpus else None,
        memory_bytes=min([_physical_bytes(), *limits_of(_OF_THIS_PROCESS.read_text(encoding="utf-8"), _CGROUPS)]),
        slot_bytes=slot_bytes,
    )


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def limits_of(cgroup: str, root: Path) -> Iterator[int]:
    """The limits of a process's control groups: of its own and of all above it. `cgroup` is its /proc/PID/cgroup,
    `root` where they are mounted: of version 2, or of version 1 in a folder `memory`.
    """
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):
            if not folder.is_relative_to(top):
                break
            yield from _limit_in(folder / name)


def _limit_in(file: Path) -> Iterator[int]:
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return  # the root has none; a container may see no group but its own
    if text.isdecimal():  # else `max`
        yield int(text)


def _gpu_bytes() -> int | None:
    """What each GPU has, when they are alike; None when they are not, or when nobody here can tell."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        sizes = {int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles}
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    return sizes.pop() if len(sizes) == 1 else None
