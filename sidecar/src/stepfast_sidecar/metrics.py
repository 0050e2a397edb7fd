"""The agent's Prometheus metrics, by the names of the API. No label grows with jobs or steps, but for the gauges of a
job's anatomy, which are there while its ranks are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from stepfast.anatomymetrics import METRICS, PREFIX
from stepfast.step import JobKey, Tier

_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0)


class FlushCause(StrEnum):
    """Why all that is staged is persisted now."""

    SIGTERM = "SIGTERM"  # the agent is to end
    REQUESTED = "Requested"  # the operator waits for it: before a restart, or at the end of a job
    EVICTION_NOTICE = "EvictionNotice"  # the cloud is about to take the node away
    RANK_DIED = "RankDied"
    RUN_OVER = "RunOver"  # its last rank on this node has said goodbye
    AGENT_RESTARTED = "AgentRestarted"  # and no rank came back


class MirrorOutcome(StrEnum):
    """What became of a step that was sent to the agent that mirrors it."""

    HELD = "held"
    OVERTAKEN = "overtaken"  # by a newer save
    REFUSED = "refused"
    FAILED = "failed"


class Metrics:
    """One registry of its own, so that several agents can live in one process of tests."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prefix = "stepfast_checkpoint"
        self._stall = Histogram(
            f"{prefix}_stall_seconds",
            "How long a save stalled training.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._stage_bytes = Counter(f"{prefix}_stage_bytes", "Bytes staged into memory.", registry=self.registry)
        self._persist = Histogram(
            f"{prefix}_persist_duration_seconds",
            "Upload of a node's part.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._persist_bytes = Counter(f"{prefix}_persist_bytes", "Bytes persisted.", registry=self.registry)
        self._failures = Counter(
            f"{prefix}_persist_failures", "Failed attempts to persist.", ["reason"], registry=self.registry
        )
        self._commits = Counter(f"{prefix}_commits", "Steps committed.", registry=self.registry)
        self._dropped = Counter(f"{prefix}_dropped_steps", "Steps given up for newer ones.", registry=self.registry)
        self._restore = Histogram(
            f"{prefix}_restore_duration_seconds",
            "Restore of a rank.",
            ["tier"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._flush = Histogram(
            f"{prefix}_flush_duration_seconds", "Flush.", ["cause"], buckets=_SECONDS, registry=self.registry
        )
        # There from the start, so that the first of each is an increase.
        for tier in Tier:
            self._restore.labels(tier=tier)
        for cause in FlushCause:
            self._flush.labels(cause=cause)
        self._mirrored = Counter(
            f"{prefix}_mirror_steps", "Steps sent to the agent that mirrors them.", ["outcome"], registry=self.registry
        )
        for outcome in MirrorOutcome:
            self._mirrored.labels(outcome=outcome)
        self._mirrored_bytes = Counter(f"{prefix}_mirror_bytes", "Bytes that went out so.", registry=self.registry)
        self._mirror_duration = Histogram(
            f"{prefix}_mirror_duration_seconds", "A node's step, until another holds it.", buckets=_SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self._fetched_bytes = Counter(
            f"{prefix}_mirror_fetched_bytes", "Bytes restored out of other nodes' memory.", registry=self.registry
        )
        self._mirrors_used = Gauge(
            f"{prefix}_mirror_memory_used_bytes", "Memory that other nodes' steps take.", registry=self.registry
        )
        self._used = Gauge(f"{prefix}_memory_used_bytes", "Memory tier in use.", registry=self.registry)
        self._limit = Gauge(f"{prefix}_memory_limit_bytes", "Memory tier's limit.", registry=self.registry)
        self._lag = Gauge(f"{prefix}_persist_lag_seconds", "Age of the oldest pending step.", registry=self.registry)
        self._anatomies = _Anatomies()
        self.registry.register(self._anatomies)

    def observe(
        self,
        *,
        limit_bytes: int,
        used_bytes: Callable[[], int],
        mirror_bytes: Callable[[], int],
        lag_seconds: Callable[[], float],
        anatomies: Callable[[], Mapping[JobKey, Mapping[str, float]]],
    ) -> None:
        """What the gauges show. `anatomies`: of living jobs, as stepfast.anatomymetrics names it."""
        self._anatomies.read = anatomies
        self._limit.set(limit_bytes)
        self._used.set_function(used_bytes)
        self._mirrors_used.set_function(mirror_bytes)
        self._lag.set_function(lag_seconds)

    def staged(self, size_bytes: int, stall_seconds: float) -> None:
        self._stall.observe(stall_seconds)
        self._stage_bytes.inc(size_bytes)

    def persisted(self, size_bytes: int, seconds: float) -> None:
        self._persist.observe(seconds)
        self._persist_bytes.inc(size_bytes)

    def failed(self, reason: str) -> None:
        self._failures.labels(reason=reason).inc()

    def committed(self) -> None:
        self._commits.inc()

    def dropped(self) -> None:
        self._dropped.inc()

    def restored(self, tier: str, seconds: float) -> None:
        self._restore.labels(tier=tier).observe(seconds)

    def mirrored(self, outcome: MirrorOutcome, size_bytes: int, seconds: float) -> None:
        self._mirrored.labels(outcome=outcome).inc()
        self._mirrored_bytes.inc(size_bytes)
        if outcome is MirrorOutcome.HELD:
            self._mirror_duration.observe(seconds)

    def fetched_from_mirror(self, size_bytes: int) -> None:
        self._fetched_bytes.inc(size_bytes)

    def flushed(self, cause: FlushCause, seconds: float) -> None:
        self._flush.labels(cause=cause).observe(seconds)


class _Anatomies(Collector):
    """Gauges of what living jobs tell of their anatomy, read when somebody asks: a job that is gone leaves none."""

    def __init__(self) -> None:
        self.read: Callable[[], Mapping[JobKey, Mapping[str, float]]] = dict

    def collect(self) -> Iterator[GaugeMetricFamily]:
        told = self.read()
        for name, meaning in METRICS.items():
            family = GaugeMetricFamily(f"stepfast_{PREFIX}{name}", meaning, labels=["namespace", "name"])
            for job, values in told.items():
                if name in values:
                    family.add_metric([job.namespace, job.name], values[name])
            yield family
