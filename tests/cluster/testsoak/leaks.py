"""What the operator and the agents take, and what of it is left at rest: memory, open files, sockets, processes; slots;
objects.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from testjobs.release import Release

# At rest, beside 15 % of what it was before the first job. While jobs run an agent takes what they need, now more and
# now less.
_MARGIN = {"memory_bytes": 24 << 20, "files": 8, "sockets": 8, "processes": 0}
REST_SAMPLES = 8  # half a minute apart: a job's process ends when nobody has needed it for two minutes
LEAST_SAMPLES = 9  # of one life, to leave something behind
# An agent fills until the first jobs have left it, ten minutes after their end; samples are half a minute apart.
WARM_UP_SAMPLES = {"agent": 36, "operator": 4}
_KINDS = "pods,services,trainingjobs,configmaps,secrets,leases,events"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of one container's processes."""

    kind: str  # `agent` or `operator`
    component: str  # which one of these, and which container of it
    started: str  # which life of the component it is
    memory_bytes: int  # resident
    files: int
    sockets: int
    processes: int


def usages(release: Release) -> Iterator[Usage]:
    """Of the operator and of every agent that runs now."""
    for pod in release.pods("operator", "sidecar"):
        node = release.cluster.nodes[pod["spec"]["nodeName"]]
        kind = "operator" if "operator" in pod["metadata"]["name"] else "agent"
        component = kind if kind == "operator" else f"{kind} on {node.name}"
        for container in pod["status"].get("containerStatuses") or ():
            identity = container.get("containerID", "")
            first = node.container_process(identity) if "running" in container["state"] else None
            if first is not None:
                which = {"kind": kind, "component": f"{component}: {container['name']}", "started": identity}
                found = usage_of(node.proc(), first, **which)
                yield from () if found is None else (found,)


def peers_of_operator(release: Release) -> Counter[str]:
    """See `peers_of`."""
    pod = release.operator_pod()
    node = release.cluster.nodes[pod["spec"]["nodeName"]]
    first = node.container_process(pod["status"]["containerStatuses"][0]["containerID"])
    assert first is not None, "the operator runs"
    return peers_of(node.proc(), first)


def usage_of(proc: Path, first: int, **which: str) -> Usage | None:
    """Of that process and all that it has started, as `proc` shows them; None: it has ended meanwhile. `which`: whose
    they are, as Usage has it.
    """
    memory = files = sockets = processes = 0
    for process in _tree(proc, first):
        try:
            pages = int((proc / f"{process}/statm").read_text().split()[1])
            targets = _open_files(proc, process)
        except OSError:
            continue  # it ended meanwhile
        memory += pages * os.sysconf("SC_PAGE_SIZE")
        processes += 1
        files += len(targets)
        sockets += sum(target.startswith("socket:") for target in targets)
    if not memory:
        return None
    return Usage(memory_bytes=memory, files=files, sockets=sockets, processes=processes, **which)


def peers_of(proc: Path, process: int) -> Counter[str]:
    """What that process' sockets are, for whoever has to find a leak: `ADDRESS:PORT` of the other end and the state,
    both as the kernel writes them, of those of TCP; `other` the rest.
    """
    links = [link for link in _open_files(proc, process) if link.startswith("socket:")]
    inodes = {link.removeprefix("socket:[").removesuffix("]") for link in links}
    tables = [(proc / f"{process}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables for row in table]
    found = Counter(f"{row[2]} {row[3]}" for row in rows if row[9] in inodes)
    found["other"] = len(inodes) - found.total()
    return found


def _open_files(proc: Path, process: int) -> list[str]:
    """What the links of its descriptors say. Raises OSError when it has ended."""
    found = []
    for link in (proc / f"{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(link))
    return found


def _tree(proc: Path, first: int) -> Iterator[int]:
    yield first
    try:
        children = [path.read_text() for path in (proc / f"{first}/task").glob("*/children")]
    except OSError:
        return
    for child in " ".join(children).split():
        yield from _tree(proc, int(child))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """Of a component's longest life, once it was warm: medians of the first third of its samples and of the last."""

    component: str
    samples: int
    first: Usage
    last: Usage


def trends(samples: Sequence[Usage]) -> list[Trend]:
    """Of each component that was seen warm, by name."""
    lives: dict[tuple[str, str], list[Usage]] = {}
    for sample in samples:
        lives.setdefault((sample.component, sample.started), []).append(sample)
    longest: dict[str, list[Usage]] = {}
    for (component, _), life in lives.items():
        longest[component] = max(longest.get(component, []), life, key=len)
    found = []
    for component, whole in sorted(longest.items()):
        life = whole[WARM_UP_SAMPLES[whole[0].kind] :]
        if not life:
            continue
        third = max(1, len(life) // 3)
        first, last = _median(life[:third]), _median(life[-third:])
        found.append(Trend(component=component, samples=len(life), first=first, last=last))
    return found


def _median(part: Sequence[Usage]) -> Usage:
    return _put_together(lambda values: int(statistics.median(values)), part)


def _put_together(how: Callable[[Iterable[int]], int], part: Sequence[Usage]) -> Usage:
    """Each measure by itself."""
    taken: dict[str, Any] = {what: how([getattr(one, what) for one in part]) for what in _MARGIN}
    return replace(part[0], **taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What a component took at rest, before the first job (the most that one of its kind did) and after the last."""

    component: str
    before: Usage
    after: Usage


def rests(before: Sequence[Usage], after: Sequence[Usage]) -> list[Rest]:
    """Of samples that see each component at rest at least once: the least that it was seen with is that. By name."""
    most: dict[str, Usage] = {}
    for usage in _least(before).values():
        most[_of_kind(usage)] = _put_together(max, [most.get(_of_kind(usage), usage), usage])
    return [
        Rest(component=component, before=most[_of_kind(usage)], after=usage)
        for component, usage in sorted(_least(after).items())
    ]


def _least(samples: Sequence[Usage]) -> dict[str, Usage]:
    found: dict[str, Usage] = {}
    for sample in samples:
        found[sample.component] = _put_together(min, [found.get(sample.component, sample), sample])
    return found


def _of_kind(usage: Usage) -> str:
    """The same container of another pod is of the same kind."""
    return f"{usage.kind}: {usage.component.rpartition(': ')[2]}"


def leaks(rests: Sequence[Rest], trends: Sequence[Trend]) -> Iterator[str]:
    """What is more at rest than it was, beyond its margin; also when no agent, or no operator, lived long enough for
    that to say something.
    """
    long = {trend.first.kind for trend in trends if trend.samples >= LEAST_SAMPLES}
    for kind in sorted(WARM_UP_SAMPLES.keys() - long):
        yield f"no {kind} lived long enough to tell whether it leaks"
    for rest in rests:
        for what, margin in _MARGIN.items():
            before, after = getattr(rest.before, what), getattr(rest.after, what)
            if after > 1.15 * before + margin:
                yield f"{rest.component}: {what} at rest grew from {before} to {after}"


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
