"""What the operator measures of itself and of its jobs, for Prometheus. Job names stand only on gauges that go with the
job.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from stepfast.step import JobKey
from stepfast_operator.reconcile import Pass
from stepfast_operator.record import Recovery, State
from stepfast_operator.recoveryphases import phases_of

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
_RECONCILE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_JOB = ("namespace", "name")


class Metrics:
    """One registry; `text` is what is scraped."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._restarts = Counter(
            "stepfast_restarts", "Gangs that were restarted.", ("cause", "counted"), registry=self.registry
        )
        self._recovery = Histogram(
            "stepfast_recovery_duration_seconds",
            "From a failure to the first new step, by phase.",
            ("phase",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._steps_lost = Counter("stepfast_steps_lost", "Steps that had to be made again.", registry=self.registry)
        self._hangs = Counter("stepfast_hangs", "Gangs that made no step for too long.", registry=self.registry)
        self._goodput = Gauge(
            "stepfast_goodput_ratio", "Training that was kept over the time active.", _JOB, registry=self.registry
        )
        self._persisted = Gauge(
            "stepfast_checkpoint_committed_timestamp_seconds",
            "When the newest committed step was committed.",
            _JOB,
            registry=self.registry,
        )
        self._passes = Histogram(
            "stepfast_reconcile_duration_seconds",
            "One look at one job, with all that follows from it.",
            buckets=_RECONCILE_SECONDS,
            registry=self.registry,
        )
        self._errors = Counter(
            "stepfast_reconcile_errors", "Looks at a job that ended in an error.", registry=self.registry
        )

    def watch(
        self,
        states: Callable[[], Sequence[State]],
        ages: Callable[[], Mapping[str, float]],
        now: Callable[[], float],
    ) -> None:
        """What is asked for when it is scraped: the jobs' states, and seconds since each watch heard anything."""
        self.registry.register(_Asked(states, ages, self._persisted, now))

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def reconciled(self, seconds: float) -> None:
        self._passes.observe(seconds)

    def failed(self) -> None:
        self._errors.inc()

    def observe(self, job: JobKey, seen: Pass) -> None:
        """What one pass brought about."""
        before, after = seen.before, seen.after
        if after.restarts > before.restarts and after.recoveries:
            last = after.recoveries[-1]
            self._restarts.labels(cause=str(last.cause), counted=str(last.counted).lower()).inc()
        if after.steps_lost > before.steps_lost:
            self._steps_lost.inc(after.steps_lost - before.steps_lost)
        if after.last_failure != before.last_failure and after.last_failure is not None:
            self._hangs.inc(after.last_failure.reason == "HangDetected")
        if after.goodput_ratio is not None:
            self._goodput.labels(job.namespace, job.name).set(after.goodput_ratio)
        if after.checkpoint.latest_persisted_time is not None:
            self._persisted.labels(job.namespace, job.name).set(after.checkpoint.latest_persisted_time)
        self._observe_recovery(before.recoveries, after.recoveries)

    def forget(self, job: JobKey) -> None:
        """The job is gone."""
        for gauge in (self._goodput, self._persisted):
            try:
                gauge.remove(job.namespace, job.name)
            except KeyError:
                continue

    def _observe_recovery(self, before: Sequence[Recovery], after: Sequence[Recovery]) -> None:
        """The last recovery, once it is complete."""
        if not after or after[-1].duration_seconds is None:
            return
        last = after[-1]
        if before and before[-1].attempt == last.attempt and before[-1].duration_seconds is not None:
            return
        for phase in phases_of(last):
            self._recovery.labels(phase=phase.name).observe(phase.seconds)


class _Asked(Collector):
    """Gauges that are computed when they are scraped."""

    def __init__(
        self,
        states: Callable[[], Sequence[State]],
        ages: Callable[[], Mapping[str, float]],
        persisted: Gauge,
        now: Callable[[], float],
    ) -> None:
        self._states, self._ages, self._persisted, self._now = states, ages, persisted, now

    def collect(self) -> Iterator[GaugeMetricFamily]:
        jobs = GaugeMetricFamily("stepfast_jobs", "Jobs by state.", labels=["state"])
        tally = Tally(self._states())
        for state in State:
            jobs.add_metric([str(state)], tally[state])
        yield jobs
        ages = GaugeMetricFamily(
            "stepfast_watch_age_seconds", "Since a watch heard anything of the API server.", labels=["resource"]
        )
        for resource, seconds in self._ages().items():
            ages.add_metric([resource], seconds)
        yield ages
        age = GaugeMetricFamily("stepfast_checkpoint_age_seconds", "Of the newest committed step.", labels=list(_JOB))
        now = self._now()
        for family in self._persisted.collect():
            for sample in family.samples:
                age.add_metric([sample.labels[name] for name in _JOB], max(0.0, now - sample.value))
        yield age
