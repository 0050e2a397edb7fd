"""What of a job's spec bounds its life: budgets of restarts, deadlines, the promised age of checkpoints. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stepfast_operator.failurepolicy import FailurePolicy
from stepfast_operator.spec import ElasticPolicy, ProgressPolicy, ResumePolicy, TrainingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Each as in the spec; `failure_policy` without its rules."""

    failure_policy: FailurePolicy
    progress_policy: ProgressPolicy
    startup_deadline_seconds: float
    graceful_suspend_seconds: float
    resume_policy: ResumePolicy
    max_nodes: int = 1
    elastic_policy: ElasticPolicy | None = None
    active_deadline_seconds: float | None = None
    max_staleness_seconds: float | None = None
    ttl_seconds_after_finished: float | None = None


def limits_of(spec: TrainingSpec) -> Limits:
    return Limits(
        failure_policy=replace(spec.failure_policy, rules=()),
        progress_policy=spec.progress_policy,
        startup_deadline_seconds=spec.startup_deadline_seconds,
        max_nodes=spec.max_nodes,
        elastic_policy=spec.elastic_policy,
        active_deadline_seconds=spec.active_deadline_seconds,
        max_staleness_seconds=spec.checkpoint.max_staleness_seconds,
        graceful_suspend_seconds=spec.checkpoint.graceful_suspend_seconds,
        ttl_seconds_after_finished=spec.ttl_seconds_after_finished,
        resume_policy=spec.checkpoint.resume_policy,
    )
