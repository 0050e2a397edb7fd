"""Every alert of the chart, on the rule engine of Prometheus (promtool): it fires when it is to, and only then."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from prometheusserver import promtool
from scrapes import ALERTS, ROOT, RULES, scraped_series, series_in

JOB = 'namespace="team", name="gpt"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Series with a value a minute (promtool's notation), and the minute at which is looked. `fires`: the labels of
    what fires then, without its name and severity; None: nothing.
    """

    series: dict[str, str]
    minute: int
    fires: dict[str, str] | None = field(default_factory=lambda: {"namespace": "team", "name": "gpt"})


def state(name: str) -> str:
    return f'stepfast_job_state{{{JOB}, state="{name}"}}'


def jobs(name: str) -> str:
    return f'stepfast_jobs{{state="{name}"}}'


def agents(ready: str) -> str:
    return f'stepfast_agents{{ready="{ready}"}}'


def of_node(name: str) -> str:
    return f'stepfast_checkpoint_{name}{{node="n1"}}'


def mirrored(outcome: str) -> str:
    return f'stepfast_checkpoint_mirror_steps_total{{node="n1", outcome="{outcome}"}}'


FAILED = {"namespace": "team", "name": "gpt", "state": "Failed"}
STARTING = {"namespace": "team", "name": "gpt", "state": "Starting"}
QUEUED = f"stepfast_job_queued{{{JOB}}}"
SLOW = 'stepfast_reconcile_duration_seconds_bucket{le="%s"}'
CASES: dict[str, dict[str, Case]] = {
    "StepfastJobFailed": {
        "has failed": Case(series={state("Running"): "1x9", state("Failed"): "_x10 1x200"}, minute=12, fires=FAILED),
        "failed long ago": Case(series={state("Failed"): "1x200"}, minute=100, fires=None),
        "runs": Case(series={state("Running"): "1x20"}, minute=12, fires=None),
    },
    "StepfastJobWithoutProgress": {
        "two in a row": Case(series={f"stepfast_job_restarts_without_progress{{{JOB}}}": "0 1 2 2"}, minute=3),
        "one": Case(series={f"stepfast_job_restarts_without_progress{{{JOB}}}": "0 1 1 1"}, minute=3, fires=None),
    },
    "StepfastJobRestartsOften": {
        "one every ten minutes": Case(series={f"stepfast_job_restarts{{{JOB}}}": "0+0.1x70"}, minute=65),
        "two in an hour": Case(series={f"stepfast_job_restarts{{{JOB}}}": "3x30 5x40"}, minute=65, fires=None),
    },
    "StepfastJobNotRunning": {
        "starts for long": Case(series={state("Starting"): "1x20"}, minute=12, fires=STARTING),
        "starts": Case(series={state("Starting"): "1x20"}, minute=8, fires=None),
        "runs by now": Case(series={state("Starting"): "1x8", state("Running"): "_x9 1x20"}, minute=20, fires=None),
        "is suspended": Case(series={state("Suspended"): "1x60"}, minute=50, fires=None),
        "waits in a queue": Case(series={state("Starting"): "1x60", QUEUED: "1x60"}, minute=50, fires=None),
        "was admitted, and does not run": Case(
            series={state("Starting"): "1x60", QUEUED: "1x9 0x60"}, minute=25, fires=STARTING
        ),
    },
    "StepfastJobHung": {
        "hung a moment ago": Case(series={"stepfast_hangs_total": "0x5 1x60"}, minute=10, fires={}),
        "hung before": Case(series={"stepfast_hangs_total": "0x5 1x60"}, minute=40, fires=None),
    },
    "StepfastCheckpointStale": {
        "stale": Case(series={f"stepfast_job_checkpoint_stale{{{JOB}}}": "0x5 1x20"}, minute=8),
        "fresh again": Case(series={f"stepfast_job_checkpoint_stale{{{JOB}}}": "1x5 0x20"}, minute=8, fires=None),
    },
    "StepfastPersistFailing": {
        "fails": Case(series={f"stepfast_job_persist_failing{{{JOB}}}": "1x20"}, minute=6),
        "failed once": Case(series={f"stepfast_job_persist_failing{{{JOB}}}": "1x3 0x20"}, minute=6, fires=None),
    },
    "StepfastPersistLag": {
        "behind": Case(series={of_node("persist_lag_seconds"): "0+60x60"}, minute=20, fires={"node": "n1"}),
        "a little": Case(series={of_node("persist_lag_seconds"): "300x60"}, minute=20, fires=None),
    },
    "StepfastMemoryTierNearlyFull": {
        "full": Case(
            series={of_node("memory_used_bytes"): "95x30", of_node("memory_limit_bytes"): "100x30"},
            minute=20, fires={"node": "n1"},
        ),
        "half": Case(
            series={of_node("memory_used_bytes"): "50x30", of_node("memory_limit_bytes"): "100x30"},
            minute=20, fires=None,
        ),
    },
    "StepfastMirrorsFailing": {
        "never held": Case(series={mirrored("refused"): "0+1x40"}, minute=30, fires={"node": "n1"}),
        "held in between": Case(
            series={mirrored("failed"): "0+1x40", mirrored("held"): "0+0.2x40"}, minute=30, fires=None
        ),
        "not tried": Case(series={mirrored("failed"): "3x40", mirrored("held"): "9x40"}, minute=30, fires=None),
    },
    "StepfastAgentNotReady": {
        "one is not": Case(series={agents("false"): "1x30"}, minute=12, fires={"ready": "false"}),
        "all are": Case(series={agents("false"): "0x30", agents("true"): "3x30"}, minute=12, fires=None),
        "replaced by an upgrade": Case(series={agents("false"): "1x5 0x30"}, minute=12, fires=None),
    },
    "StepfastAgentAbsent": {
        "none, and a job": Case(series={agents("true"): "0x30", jobs("Running"): "1x30"}, minute=7, fires={}),
        "none, and no job": Case(series={agents("true"): "0x30", jobs("Running"): "0x30"}, minute=7, fires=None),
        "one": Case(series={agents("true"): "1x30", jobs("Running"): "1x30"}, minute=7, fires=None),
    },
    "StepfastOperatorDown": {
        "gone": Case(series={jobs("Running"): "1x5"}, minute=20, fires={}),
        "there": Case(series={jobs("Running"): "1x30"}, minute=20, fires=None),
    },
    "StepfastOperatorWatchStale": {
        "silent": Case(
            series={'stepfast_watch_age_seconds{resource="pods"}': "0+60x20"}, minute=6, fires={"resource": "pods"}
        ),
        "hears": Case(series={'stepfast_watch_age_seconds{resource="pods"}': "30x20"}, minute=6, fires=None),
    },
    "StepfastReconcileErrors": {
        "again and again": Case(series={"stepfast_reconcile_errors_total": "0+1x60"}, minute=25, fires={}),
        "once": Case(series={"stepfast_reconcile_errors_total": "0x5 1x60"}, minute=25, fires=None),
    },
    "StepfastReconcileSlow": {
        "slow": Case(
            series={SLOW % "5": "0x60", SLOW % "10": "0+60x60", SLOW % "+Inf": "0+60x60"}, minute=30, fires={}
        ),
        "fast": Case(
            series={SLOW % "0.1": "0+60x60", SLOW % "5": "0+60x60", SLOW % "+Inf": "0+60x60"}, minute=30, fires=None
        ),
    },
}  # fmt: skip


def unit_test(alert: str, case: Case) -> dict[str, Any]:
    """The case as promtool takes it."""
    firing = f'ALERTS{{alertname="{alert}", alertstate="firing"}}'
    expected = []
    if case.fires is not None:
        labels = {**case.fires, "alertname": alert, "alertstate": "firing", **ALERTS[alert]["labels"]}
        text = ", ".join(f'{name}="{value}"' for name, value in labels.items())
        expected = [{"labels": f"ALERTS{{{text}}}", "value": 1}]
    return {
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
        "promql_expr_test": [{"expr": firing, "eval_time": f"{case.minute}m", "exp_samples": expected}],
    }


@pytest.mark.parametrize(
    ("alert", "name"), [pytest.param(alert, name, id=f"{alert}: {name}") for alert in CASES for name in CASES[alert]]
)
def test_alert_fires_when_it_is_to(alert: str, name: str, tmp_path: Path) -> None:
    test = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [unit_test(alert, CASES[alert][name])]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))
    promtool("test", "rules", "test.yaml", folder=tmp_path)


def test_every_alert_is_tested_both_ways() -> None:
    assert CASES.keys() == ALERTS.keys()
    for alert, cases in CASES.items():
        assert {case.fires is None for case in cases.values()} == {True, False}, alert


def test_promtool_finds_no_fault_in_the_rules() -> None:
    assert f"SUCCESS: {len(ALERTS)} rules found" in promtool("check", "rules", "--lint-fatal", str(RULES), folder=ROOT)


def test_alerts_name_metrics_that_there_are() -> None:
    assert series_in(rule["expr"] for rule in ALERTS.values()) <= scraped_series()


def test_every_alert_says_what_to_do_and_has_its_paragraph() -> None:
    text = (ROOT / "docs" / "observing.md").read_text()
    for alert, rule in ALERTS.items():
        assert f"\n### {alert}\n" in text, alert
        assert rule["labels"].keys() == {"severity"}, alert
        assert rule["labels"]["severity"] in ("critical", "warning"), alert
        assert rule["annotations"].keys() == {"summary", "description"}, alert
        assert all(value.endswith(".") for value in rule["annotations"].values()), alert
