"""What the operator and the agents take, and whether it grows: memory, open files, sockets; slots; objects."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testcluster.waiting import CommandFailed
from testjobs.release import Release

_MARGIN = {"memory_bytes": 24 << 20, "files": 12, "sockets": 12}  # beside a quarter of what it was
_KINDS = "pods,services,trainingjobs,configmaps,secrets,leases,events"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of one container's processes. `started`: which life of the container it is."""

    component: str
    started: str
    memory_bytes: int  # resident
    files: int
    sockets: int


def usages(release: Release) -> Iterator[Usage]:
    """Of the operator and of every agent that runs now."""
    for pod in release.pods("operator", "sidecar"):
        for container in pod["status"].get("containerStatuses") or ():
            running = container["state"].get("running")
            process = _process_of(release, pod, container) if running is not None else None
            if process is None:
                continue
            component = "operator" if "operator" in pod["metadata"]["name"] else f"agent on {pod['spec']['nodeName']}"
            yield _usage(
                f"{component}: {container['name']}", f"{pod['metadata']['uid']}{running['startedAt']}", process
            )


def _process_of(release: Release, pod: Mapping[str, Any], container: Mapping[str, Any]) -> int | None:
    """The container's first process, as this machine numbers it."""
    node = release.cluster.nodes[pod["spec"]["nodeName"]]
    identity = container["containerID"].removeprefix("containerd://")
    socket = str(node.folder / "containerd.sock")
    try:
        listed = node.run("ctr", "--address", socket, "--namespace", "k8s.io", "tasks", "list")
    except CommandFailed:
        return None  # the node was lost just now
    rows = (line.split() for line in listed.splitlines()[1:])
    return next((int(row[1]) for row in rows if row and row[0] == identity), None)


def _usage(component: str, started: str, first: int) -> Usage:
    memory = files = sockets = 0
    for process in _tree(first):
        try:
            memory += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            targets = [os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir()]
        except OSError:
            continue  # it ended meanwhile
        files += len(targets)
        sockets += sum(target.startswith("socket:") for target in targets)
    return Usage(component=component, started=started, memory_bytes=memory, files=files, sockets=sockets)


def _tree(first: int) -> Iterator[int]:
    yield first
    try:
        children = [path.read_text() for path in Path(f"/proc/{first}/task").glob("*/children")]
    except OSError:
        return
    for child in " ".join(children).split():
        yield from _tree(int(child))


def growths(samples: Sequence[Usage]) -> Iterator[str]:
    """What has grown beyond its margin in the longest life of each component: the median of the last third of the
    samples beside that of the first. A life that is too short to tell says nothing.
    """
    lives: dict[tuple[str, str], list[Usage]] = {}
    for sample in samples:
        lives.setdefault((sample.component, sample.started), []).append(sample)
    longest: dict[str, list[Usage]] = {}
    for (component, _), life in lives.items():
        longest[component] = max(longest.get(component, []), life, key=len)
    for component, life in sorted(longest.items()):
        third = len(life) // 3
        if third < 3:
            continue
        for what, margin in _MARGIN.items():
            first, last = (
                statistics.median(getattr(one, what) for one in part) for part in (life[:third], life[-third:])
            )
            if last > 1.25 * first + margin:
                yield f"{component}: {what} grew from {first:.0f} to {last:.0f} in {len(life)} samples"


def objects_of(release: Release, namespace: str) -> dict[str, int]:
    """How many objects of each kind the namespace has."""
    found: dict[str, int] = {}
    for item in release.cluster.get(_KINDS, "-n", namespace)["items"]:
        found[item["kind"]] = found.get(item["kind"], 0) + 1
    return found


def held_bytes(release: Release) -> dict[str, int]:
    """By node, what its agent says that it holds for jobs."""
    nodes = release.cluster.get("checkpointnodes")["items"]
    return {node["metadata"]["name"]: int(node["status"]["memory"]["usedBytes"]) for node in nodes}
