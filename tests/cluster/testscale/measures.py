"""What is measured of an operator from outside: its memory and processor, its histogram, its answers, its requests."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Any

from testoperator.process import OperatorProcess

PASSES, WAITS = "stepfast_reconcile_duration_seconds", "stepfast_reconcile_wait_seconds"
_PROBE_SECONDS = 0.1
_CHANGES = frozenset({"create", "update", "patch", "delete", "deletecollection"})
Buckets = Mapping[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of a process: what it holds now and at most ever (bytes), and how long it has computed."""

    resident_bytes: int
    peak_bytes: int
    processor_seconds: float


def usage_of(pid: int) -> Usage:
    status = Path(f"/proc/{pid}/status").read_text()
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Usage(
        resident_bytes=_kibibytes(status, "VmRSS") * 1024,
        peak_bytes=_kibibytes(status, "VmHWM") * 1024,
        processor_seconds=(int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK"),
    )


def _kibibytes(status: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    if found is None:
        raise ValueError(f"{name} is not told: the process is over")
    return int(found[1])


def histogram(name: str, scraped: str) -> Buckets:
    """Of one histogram without labels: upper bound (seconds) → how many were no longer."""
    pattern = rf'^{name}_bucket\{{le="([^"]+)"\}} (\S+)$'
    return {float(bound): float(count) for bound, count in re.findall(pattern, scraped, re.MULTILINE)}


def quantile(share: float, before: Buckets, after: Buckets) -> float:
    """As Prometheus' histogram_quantile: of the passes between two scrapes, linear inside of a bucket; NaN without."""
    counts = [(bound, after[bound] - before.get(bound, 0.0)) for bound in sorted(after)]
    wanted, below, low = share * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= wanted and count > 0:
            return low if bound == inf else low + (bound - low) * (wanted - below) / (count - below)
        below, low = count, bound
    return float("nan")


def number_of(before: Buckets, after: Buckets) -> int:
    """How many passes there were between two scrapes."""
    return int(after[inf] - before.get(inf, 0.0))


@asynccontextmanager
async def probed(operator: OperatorProcess) -> AsyncIterator[list[float]]:
    """Asks for its health again and again: how long the answers took (seconds), which is how long its event loop had
    no time for them.
    """
    answers: list[float] = []

    async def ask() -> None:
        while True:
            begin = time.monotonic()
            await asyncio.to_thread(operator.health)
            answers.append(time.monotonic() - begin)
            await asyncio.sleep(_PROBE_SECONDS)

    task = asyncio.create_task(ask())
    try:
        yield answers
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Requests:
    """The requests of one user, as the API server's audit log has them."""

    def __init__(self, audit_log: Path, user: str) -> None:
        self._audit_log, self._user = audit_log, user
        self._offset = 0

    def skip(self) -> None:
        """What was asked until now does not count."""
        self._offset = self._audit_log.stat().st_size

    def take(self) -> list[Mapping[str, Any]]:
        """Those since the last call, in the order of their answers."""
        return list(self._read())

    def _read(self) -> Iterator[Mapping[str, Any]]:
        with self._audit_log.open("rb") as log:
            log.seek(self._offset)
            for line in log:
                if not line.endswith(b"\n"):
                    return  # it is being written
                self._offset += len(line)
                if self._user.encode() in line:
                    event = json.loads(line)
                    if event["user"]["username"] == self._user and event["stage"] == "ResponseComplete":
                        yield event


def counted(requests: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """How often what was asked: verb and kind of objects."""
    return Counter(f"{event['verb']} {_resource(event)}" for event in requests)


def changes(requests: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that write anything but the operator's Lease, which it renews to say that it lives."""
    return [event for event in requests if event["verb"] in _CHANGES and _resource(event) != "leases"]


def refused(requests: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Those that failed, by their code."""
    codes = [(event, int((event.get("responseStatus") or {}).get("code") or 0)) for event in requests]
    return Counter(f"{code} {event['verb']} {_resource(event)}" for event, code in codes if code >= 400)


def time_of(event: Mapping[str, Any]) -> float:
    """When it was answered (seconds since the epoch)."""
    return datetime.fromisoformat(str(event["stageTimestamp"])).timestamp()


def _resource(event: Mapping[str, Any]) -> str:
    reference = event.get("objectRef") or {}
    name, part = str(reference.get("resource") or event["requestURI"]), reference.get("subresource")
    return f"{name}/{part}" if part else name
