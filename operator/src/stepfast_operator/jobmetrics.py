"""Gauges of jobs, read off their statuses when somebody asks: those of a job that is gone are gone, too.

Of a job that is over only its state, and what became of it, is told.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from stepfast.step import JobKey
from stepfast_operator.goodput import goodput_of
from stepfast_operator.record import ConditionType, State, Status

_JOB = ("namespace", "name")
_ALWAYS = {
    "stepfast_goodput_ratio": "Training that was kept over the time active.",
    "stepfast_job_restarts": "Restarts of the job's gang.",
    "stepfast_job_steps_lost": "Steps of the job that had to be made again.",
}
_WHILE_IT_LIVES = {
    "stepfast_job_step": "The newest step that a rank has made.",
    "stepfast_job_steps_per_second": "Steps that the job makes in a second.",
    "stepfast_job_nodes_desired": "Nodes that the job's gang is to have.",
    "stepfast_job_nodes_ready": "Nodes whose ranks are all here.",
    "stepfast_job_queued": "1 while the job's gang waits in a queue to be admitted.",
    "stepfast_job_restarts_without_progress": "Restarts in a row between which no newer step was committed.",
    "stepfast_job_persist_lag_steps": "Steps by which the newest committed one is behind training.",
    "stepfast_job_persist_failing": "1 while an agent cannot write the job's steps to the storage.",
    "stepfast_job_checkpoint_stale": "1 while more training is at risk than maxStalenessSeconds promises.",
    "stepfast_checkpoint_committed_timestamp_seconds": "When the newest committed step was committed.",
    "stepfast_checkpoint_age_seconds": "Of the newest committed step.",
}


class JobGauges(Collector):
    """`statuses`: of every job that there is; `now`: seconds since the epoch."""

    def __init__(self, statuses: Callable[[], Mapping[JobKey, Status]], now: Callable[[], float]) -> None:
        self._statuses, self._now = statuses, now

    def collect(self) -> Iterator[GaugeMetricFamily]:
        statuses, now = self._statuses(), self._now()
        yield _tally(statuses)
        states = GaugeMetricFamily("stepfast_job_state", "1: the state that the job is in.", labels=[*_JOB, "state"])
        families = {
            name: GaugeMetricFamily(name, meaning, labels=_JOB) for name, meaning in (_ALWAYS | _WHILE_IT_LIVES).items()
        }
        for job, status in statuses.items():
            states.add_metric([job.namespace, job.name, str(status.state)], 1)
            values = _kept(status, now) if status.is_terminal else {**_kept(status, now), **_living(status, now)}
            for name, value in values.items():
                if value is not None:
                    families[name].add_metric([job.namespace, job.name], value)
        yield states
        yield from families.values()


def _tally(statuses: Mapping[JobKey, Status]) -> GaugeMetricFamily:
    jobs = GaugeMetricFamily("stepfast_jobs", "Jobs by state.", labels=["state"])
    tally = Tally(status.state for status in statuses.values())
    for state in State:
        jobs.add_metric([str(state)], tally[state])
    return jobs


def _kept(status: Status, now: float) -> dict[str, float | None]:
    return {
        "stepfast_goodput_ratio": goodput_of(status, now),
        "stepfast_job_restarts": status.restarts,
        "stepfast_job_steps_lost": status.steps_lost,
    }


def _living(status: Status, now: float) -> dict[str, float | None]:
    trainer, checkpoint, nodes = status.trainer_status, status.checkpoint, status.nodes
    committed = checkpoint.latest_persisted_time
    fresh = status.condition(ConditionType.CHECKPOINT_FRESH)
    return {
        "stepfast_job_step": trainer.global_step,
        "stepfast_job_steps_per_second": trainer.steps_per_second,
        "stepfast_job_nodes_desired": nodes.desired,
        "stepfast_job_nodes_ready": nodes.ready,
        "stepfast_job_queued": status.is_queued,
        "stepfast_job_restarts_without_progress": status.restarts_without_progress,
        "stepfast_job_persist_lag_steps": checkpoint.persist_lag_steps,
        "stepfast_job_persist_failing": checkpoint.persist_error is not None,
        "stepfast_job_checkpoint_stale": fresh is not None and fresh.reason == "Stale",
        "stepfast_checkpoint_committed_timestamp_seconds": committed,
        "stepfast_checkpoint_age_seconds": None if committed is None else max(0.0, now - committed),
    }
