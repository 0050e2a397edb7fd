"""What the operator measures of itself and counts of its jobs, for Prometheus. What is told of single jobs is
`jobmetrics.py`'s.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from stepfast.step import JobKey
from stepfast_operator.jobmetrics import JobGauges
from stepfast_operator.podview import AgentView
from stepfast_operator.reconcile import Pass
from stepfast_operator.record import Cause, Recovery, Status
from stepfast_operator.recoveryphases import PHASES, phases_of

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
RECONCILE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


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
        # There from the start, so that the first of each is an increase.
        for cause in Cause:
            for counted in ("true", "false"):
                self._restarts.labels(cause=cause, counted=counted)
        for phase in PHASES:
            self._recovery.labels(phase=phase)
        self._steps_lost = Counter("stepfast_steps_lost", "Steps that had to be made again.", registry=self.registry)
        self._hangs = Counter("stepfast_hangs", "Gangs that made no step for too long.", registry=self.registry)
        self._passes = Histogram(
            "stepfast_reconcile_duration_seconds",
            "One look at one job, with all that follows from it but the waiting for pods to end.",
            buckets=RECONCILE_SECONDS,
            registry=self.registry,
        )
        self._waits = Histogram(
            "stepfast_reconcile_wait_seconds",
            "Until a job that was to be looked at had its turn.",
            buckets=RECONCILE_SECONDS,
            registry=self.registry,
        )
        self._errors = Counter(
            "stepfast_reconcile_errors", "Looks at a job that ended in an error.", registry=self.registry
        )

    def watch(
        self,
        *,
        statuses: Callable[[], Mapping[JobKey, Status]],
        agents: Callable[[], Iterable[AgentView]],
        ages: Callable[[], Mapping[str, float]],
        now: Callable[[], float],
    ) -> None:
        """What is asked for when it is scraped: the jobs' statuses, the agents, and seconds since each watch heard
        anything.
        """
        self.registry.register(JobGauges(statuses, now))
        self.registry.register(_Watches(agents, ages))

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def reconciled(self, seconds: float) -> None:
        self._passes.observe(seconds)

    def waited(self, seconds: float) -> None:
        self._waits.observe(seconds)

    def failed(self) -> None:
        self._errors.inc()

    def observe(self, seen: Pass) -> None:
        """What one pass brought about."""
        before, after = seen.before, seen.after
        if after.restarts > before.restarts and after.recoveries:
            last = after.recoveries[-1]
            self._restarts.labels(cause=str(last.cause), counted=str(last.counted).lower()).inc()
        self._steps_lost.inc(max(0, _steps_surely_lost(after) - _steps_surely_lost(before)))
        self._hangs.inc(_has_hung(before, after))
        self._observe_recovery(before.recoveries, after.recoveries)

    def _observe_recovery(self, before: Sequence[Recovery], after: Sequence[Recovery]) -> None:
        """The last recovery, once it is complete."""
        if not after or after[-1].duration_seconds is None:
            return
        last = after[-1]
        old = next((one for one in before if one.is_same(last)), None)
        if old is not None and old.duration_seconds is not None:
            return
        for phase in phases_of(last):
            self._recovery.labels(phase=phase.name).observe(phase.seconds)


def _steps_surely_lost(status: Status) -> int:
    """Without those of an attempt that has not gone on yet: its ranks may restore a newer step than was known when it
    was planned, and a counter takes nothing back.
    """
    current = status.current
    if current is None or current.in_place_restarts > 0:
        return status.steps_lost
    has_gone_on = current.restored_time is not None or current.first_step_time is not None
    return status.steps_lost if has_gone_on else status.steps_lost - current.steps_lost


def _has_hung(before: Status, after: Status) -> bool:
    """Whether an attempt was found to hang: it is ended for that, or the policy is to say so alone."""
    failure, current = after.last_failure, after.current
    if failure is not None and failure.reason is Cause.HANG_DETECTED:
        known = before.last_failure
        if known is None or known.attempt != failure.attempt:
            return True
    if current is None or current.hang_notified_time is None:
        return False
    return before.current is None or before.current.hang_notified_time != current.hang_notified_time


class _Watches(Collector):
    """What the operator hears of the cluster, told when it is scraped."""

    def __init__(self, agents: Callable[[], Iterable[AgentView]], ages: Callable[[], Mapping[str, float]]) -> None:
        self._agents, self._ages = agents, ages

    def collect(self) -> Iterator[GaugeMetricFamily]:
        agents = GaugeMetricFamily("stepfast_agents", "Nodes' agents, by whether they are ready.", labels=["ready"])
        tally = Tally(agent.is_ready for agent in self._agents())
        for is_ready in (True, False):
            agents.add_metric([str(is_ready).lower()], tally[is_ready])
        yield agents
        ages = GaugeMetricFamily(
            "stepfast_watch_age_seconds", "Since a watch heard anything of the API server.", labels=["resource"]
        )
        for resource, seconds in self._ages().items():
            ages.add_metric([resource], seconds)
        yield ages
