"""Gauges of single jobs: what a status says of its job while it lives, and what is left of it afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from lives import BEGIN, attempt, training
from stepfast.step import JobKey
from stepfast_operator.metrics import Metrics
from stepfast_operator.podview import AgentView
from stepfast_operator.record import Condition, ConditionType, State, Status

NOW = BEGIN + 1000
JOB = JobKey(namespace="team", name="gpt")
LABELS = {"namespace": "team", "name": "gpt"}


def scraped(statuses: Mapping[JobKey, Status]) -> CollectorRegistry:
    metrics = Metrics()
    agents = [AgentView(pod=f"agent-{index}", node=f"node-{index}", is_ready=index > 0) for index in range(4)]
    metrics.watch(statuses=lambda: statuses, agents=lambda: agents, ages=lambda: {"pods": 3.0}, now=lambda: NOW)
    return metrics.registry


def told(status: Status) -> dict[str, float]:
    """The samples of one job, by name; of its state its name."""
    found: dict[str, float] = {}
    for family in scraped({JOB: status}).collect():
        for sample in family.samples:
            if sample.labels.items() >= LABELS.items():
                found[sample.name + sample.labels.get("state", "")] = sample.value
    return found


def test_living_job_is_told_by_its_status() -> None:
    assert told(training()) == {
        "stepfast_job_stateRunning": 1,
        "stepfast_goodput_ratio": pytest.approx(0.8389, abs=1e-4),
        "stepfast_job_restarts": 2,
        "stepfast_job_steps_lost": 20,
        "stepfast_job_step": 260,
        "stepfast_job_steps_per_second": 0.5,
        "stepfast_job_nodes_desired": 4,
        "stepfast_job_nodes_ready": 4,
        "stepfast_job_queued": 0,
        "stepfast_job_restarts_without_progress": 0,
        "stepfast_job_persist_failing": 0,
        "stepfast_job_checkpoint_stale": 0,
        "stepfast_checkpoint_committed_timestamp_seconds": BEGIN + 960,
        "stepfast_checkpoint_age_seconds": 40,
    }


def test_checkpoints_in_danger_are_told() -> None:
    checkpoint = replace(training().checkpoint, persist_error="the disk is full", persist_lag_steps=9)
    stale = Condition(type=ConditionType.CHECKPOINT_FRESH, status="False", reason="Stale")
    found = told(replace(training(), checkpoint=checkpoint, conditions=(stale,)))
    assert found["stepfast_job_persist_failing"] == 1
    assert found["stepfast_job_checkpoint_stale"] == 1
    assert found["stepfast_job_persist_lag_steps"] == 9


def test_gang_that_waits_in_a_queue_is_told_until_it_is_admitted() -> None:
    waiting = attempt(3, 705, queued_time=BEGIN + 710)
    assert told(replace(training(), current=waiting))["stepfast_job_queued"] == 1
    assert told(replace(training(), current=replace(waiting, dequeued_time=BEGIN + 720)))["stepfast_job_queued"] == 0


def test_of_a_job_that_is_over_only_what_became_of_it_is_told() -> None:
    over = replace(training(), state=State.FAILED, terminal_state="Failed", goodput_ratio=0.5)
    assert told(over) == {
        "stepfast_job_stateFailed": 1,
        "stepfast_goodput_ratio": 0.5,
        "stepfast_job_restarts": 2,
        "stepfast_job_steps_lost": 20,
    }


def test_job_that_is_gone_leaves_no_series() -> None:
    assert not [
        sample
        for family in scraped({}).collect()
        for sample in family.samples
        if "name" in sample.labels or sample.name == "stepfast_job_state"
    ]


def test_jobs_are_tallied_by_state_and_agents_by_readiness() -> None:
    other = JobKey(namespace="team", name="other")
    sample = scraped({JOB: training(), other: Status()}).get_sample_value
    assert sample("stepfast_jobs", {"state": "Running"}) == 1
    assert sample("stepfast_jobs", {"state": "Pending"}) == 1
    assert sample("stepfast_jobs", {"state": "Failed"}) == 0
    assert sample("stepfast_agents", {"ready": "true"}) == 3
    assert sample("stepfast_agents", {"ready": "false"}) == 1
    assert sample("stepfast_watch_age_seconds", {"resource": "pods"}) == 3
