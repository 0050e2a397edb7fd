"""When a job fails: recorded and drawn failure traces. Pure but for reading the recorded one; times are seconds.

What is drawn comes from published statistics, what is recorded says where it is from at its head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gamma
from pathlib import Path
from random import Random

HOUR, DAY = 3600.0, 86_400.0
RECORDED = Path(__file__).parent / "recorded" / "infinitehbd-400-servers.txt"
RECORDED_SERVERS = 400
LLAMA_SERVERS = 2048  # 16,384 GPUs
LLAMA_MTBF_SECONDS = 54 * DAY / 419
"""419 unexpected interruptions in 54 days on 16,384 GPUs (The Llama 3 Herd of Models, arXiv:2407.21783, 3.3.4)."""
LLAMA_NODE_LOST = 0.21
"""The share of those after which a node's memory cannot be reached: network switch or cable 35, unplanned host
maintenance 32, NIC 7, power supply 3, SSD 3, CPU 2, system memory 2, server chassis 2, IO expansion board 2 (table 5
there, counted by us). A GPU that fails takes its process along; the host, and the agent on it, live on.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failure of the gang. `loses_node`: the memory of one of its nodes is gone too."""

    time: float
    loses_node: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A kind of traces: its mean time between failures, how long a job is watched, how the gaps are drawn."""

    name: str
    mtbf_seconds: float
    horizon_seconds: float
    gaps: Callable[[Random], Iterator[float]]

    def draw(self, seed: int, node_lost: float) -> Sequence[Failure]:
        """One job's failures, in order. The same seed gives the same times whatever `node_lost` is."""
        times, fates = Random(f"{self.name}/{seed}"), Random(f"{self.name}/{seed}/fates")
        failures, now = [], 0.0
        for gap in self.gaps(times):
            now += gap
            if now >= self.horizon_seconds:
                break
            failures.append(Failure(time=now, loses_node=fates.random() < node_lost))
        return failures


def exponential(name: str, mtbf_seconds: float, horizon_seconds: float) -> Trace:
    """Failures without memory: what Young and Daly assume."""

    def gaps(random: Random) -> Iterator[float]:
        while True:
            yield random.expovariate(1.0 / mtbf_seconds)

    return Trace(name=name, mtbf_seconds=mtbf_seconds, horizon_seconds=horizon_seconds, gaps=gaps)


def weibull(name: str, mtbf_seconds: float, horizon_seconds: float, shape: float = 0.7) -> Trace:
    """Failures in bursts: a shape of 0.7 to 0.8 fits the systems of Los Alamos (Schroeder and Gibson, "A Large-Scale
    Study of Failures in High-Performance Computing Systems", DSN 2006, section 5.3).
    """
    scale = mtbf_seconds / gamma(1.0 + 1.0 / shape)

    def gaps(random: Random) -> Iterator[float]:
        while True:
            yield random.weibullvariate(scale, shape)

    return Trace(name=name, mtbf_seconds=mtbf_seconds, horizon_seconds=horizon_seconds, gaps=gaps)


def recorded(name: str, horizon_seconds: float, *, servers: int = RECORDED_SERVERS, path: Path = RECORDED) -> Trace:
    """A recorded trace, from a place that the seed chooses; it begins again at its end.

    For more servers than it was recorded on time runs faster: the same bursts, as much more often as there are more
    servers. That is a model, not a record: failures of servers that share nothing would be less bursty.
    """
    times = read_times(path)
    speed = servers / RECORDED_SERVERS
    found = [(after - before) / speed for before, after in pairwise(times)]

    def gaps(random: Random) -> Iterator[float]:
        first = random.randrange(len(found))
        yield found[first] * random.random()
        while True:
            first += 1
            yield found[first % len(found)]

    mean = sum(found) / len(found)
    return Trace(name=name, mtbf_seconds=mean, horizon_seconds=horizon_seconds, gaps=gaps)


def read_times(path: Path) -> Sequence[float]:
    """Seconds of the events in a file of hours, one a line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [float(line) * HOUR for line in lines if line and not line.startswith("#")]


def all_traces() -> Sequence[Trace]:
    """Those of the report."""
    return (
        exponential("exponential, 3.1 h (Llama 3, 16,384 GPUs)", LLAMA_MTBF_SECONDS, 14 * DAY),
        exponential("exponential, 24 h", 24 * HOUR, 60 * DAY),
        exponential("exponential, 1 week", 7 * DAY, 120 * DAY),
        weibull("Weibull 0.7, 3.1 h", LLAMA_MTBF_SECONDS, 14 * DAY),
        recorded("recorded, 400 servers", 60 * DAY),
        recorded("recorded, as if 2,048 servers", 14 * DAY, servers=LLAMA_SERVERS),
    )
