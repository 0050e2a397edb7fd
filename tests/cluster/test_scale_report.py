"""What `make bench-scale` reads out of histograms and audit logs, and what it says of goals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testscale.measures import Requests, changes, counted, histogram, number_of, quantile, refused
from testscale.report import MIB, STRETCHES, describe, goals_of
from testscale.trial import Findings, Size, Stretch

NAME = "stepfast_reconcile_duration_seconds"
STRETCH = Stretch(
    name="", seconds=60.0, passes=100, p50_seconds=0.001, p99_seconds=0.1, p99_wait_seconds=0.2,
    resident_bytes=100 * MIB, peak_bytes=120 * MIB, processors=0.1, slowest_answer_seconds=0.2,
    p99_answer_seconds=0.1, requests={"create pods": 100, "get leases": 30, "list trainingjobs": 3}, refused={},
    changes=[],
)  # fmt: skip
SECONDS = {
    "create": 100.0, "begin again": 3.0, "decide again": 4.0, "large made": 10.0, "large runs": 40.0,
    "large made again": 20.0, "large runs again": 50.0,
}  # fmt: skip


def findings(**of_all: Any) -> Findings:
    stretches = {name: replace(STRETCH, name=name) for name in STRETCHES}
    for field, (stretch, value) in of_all.items():
        stretches[stretch] = replace(stretches[stretch], **{field: value})
    return Findings(size=Size(jobs=10, pods=10), stretches=stretches, seconds=dict(SECONDS), idle_bytes=70 * MIB)


def scraped(*counts: int) -> str:
    lines = [
        f'{NAME}_bucket{{le="{bound}"}} {count}.0' for bound, count in zip(("0.1", "1.0", "+Inf"), counts, strict=True)
    ]
    return "\n".join(["# HELP", *lines, f"{NAME}_count 9"])


def test_quantile_is_of_the_passes_between_two_scrapes() -> None:
    before, after = histogram(NAME, scraped(100, 100, 100)), histogram(NAME, scraped(150, 200, 200))
    assert number_of(before, after) == 100
    assert quantile(0.25, before, after) == pytest.approx(0.05)
    assert quantile(0.75, before, after) == pytest.approx(0.55)
    assert quantile(0.99, histogram(NAME, ""), histogram(NAME, scraped(0, 0, 5))) == 1.0, "the last bound that is known"
    assert math.isnan(quantile(0.5, after, after))


def event(user: str, verb: str, resource: str, code: int = 200, **more: Any) -> str:
    return json.dumps({
        "stage": "ResponseComplete", "user": {"username": user}, "verb": verb, "requestURI": f"/{resource}",
        "objectRef": {"resource": resource, **more}, "responseStatus": {"code": code},
    }) + "\n"  # fmt: skip


def test_requests_are_the_operators_own_since_the_last_look(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    log.write_text(event("operator", "create", "pods"))
    requests = Requests(log, "operator")
    requests.skip()
    with log.open("a") as more:
        more.write(event("operator", "update", "leases") + event("kwok", "patch", "pods", subresource="status"))
        more.write(event("operator", "patch", "trainingjobs", 409, subresource="status"))
        more.write(event("operator", "create", "events")[:20])  # is being written
    taken = requests.take()
    assert counted(taken) == {"update leases": 1, "patch trainingjobs/status": 1}
    assert [one["objectRef"]["resource"] for one in changes(taken)] == ["trainingjobs"], "the Lease is told apart"
    assert refused(taken) == {"409 patch trainingjobs/status": 1}
    with log.open("a") as more:
        more.write(event("operator", "create", "events")[20:])
    assert counted(requests.take()) == {"create events": 1}


def test_goals_that_are_met() -> None:
    goals = goals_of(findings())
    assert [goal.name for goal in goals if not goal.is_met] == []
    assert "**no**" not in describe(findings(), "2 processors", "2026-01-01")


@pytest.mark.parametrize(
    ("field", "stretch", "value", "missed"),
    [
        ("p99_seconds", "fail", 1.5, "reconcile p99"),
        ("peak_bytes", "train", 251 * MIB, "memory"),
        ("requests", "create", {"create pods": 1000}, "API requests"),
        ("changes", "quiet", [{"verb": "patch"}], "written"),
    ],
    ids=["slow", "large", "many requests", "written"],
)
def test_goal_that_is_missed_is_told(field: str, stretch: str, value: Any, missed: str) -> None:
    found = findings(**{field: (stretch, value)})
    assert [goal.name.startswith(missed) for goal in goals_of(found) if not goal.is_met] == [True]
    assert describe(found, "2 processors", "2026-01-01").count("**no**") == 1


@pytest.mark.parametrize("name", ["decide again", "large made", "large runs again"])
def test_time_that_is_too_long_is_a_goal_missed(name: str) -> None:
    found = findings()
    found.seconds[name] = 61.0
    assert len([goal for goal in goals_of(found) if not goal.is_met]) == 1
