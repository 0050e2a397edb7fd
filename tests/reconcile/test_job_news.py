"""Which changes of a TrainingJob are a reason to look at it, and what of it is kept."""

from __future__ import annotations

from typing import Any

import pytest

from stepfast_operator.clusterjob import has_news, parse_job, trimmed

JOB: dict[str, Any] = {
    "apiVersion": "stepfast.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {
        "namespace": "team", "name": "job", "uid": "u", "resourceVersion": "7", "generation": 1,
        "managedFields": [{"manager": "kubectl", "fieldsV1": {"f:spec": {}}}],
    },
    "spec": {"trainer": {"command": ["torchrun", "train.py"]}},
    "status": {"state": "Running"},
}  # fmt: skip


def changed(**metadata: Any) -> dict[str, Any]:
    return trimmed({**JOB, "metadata": {**JOB["metadata"], **metadata}})


def test_what_the_operator_itself_writes_is_none() -> None:
    written = {**changed(resourceVersion="8", managedFields=[{"manager": "stepfast"}]), "status": {"state": "Failed"}}
    assert not has_news(trimmed(JOB), written)


@pytest.mark.parametrize(
    "news",
    [
        {"deletionTimestamp": "2026-01-01T00:00:00Z"},
        {"annotations": {"stepfast.dev/resume-request": "1"}},
        {"finalizers": ["stepfast.dev/finalizer"]},
        {"generation": 2},
    ],
    ids=lambda news: next(iter(news)),
)
def test_whatever_else_changes_is_one(news: dict[str, Any]) -> None:
    assert has_news(trimmed(JOB), changed(**news))
    assert has_news(trimmed(JOB), {**trimmed(JOB), "spec": {**JOB["spec"], "suspend": True}})


def test_who_wrote_which_field_is_not_kept_and_all_that_is_read_is() -> None:
    assert "managedFields" not in trimmed(JOB)["metadata"]
    assert "managedFields" in JOB["metadata"], "it is the watch's"
    assert parse_job(trimmed(JOB)) == parse_job(JOB)
