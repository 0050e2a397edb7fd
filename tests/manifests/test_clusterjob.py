"""A TrainingJob as the API server holds it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stepfast.errors import SpecError
from stepfast.footprint import ANNOTATION
from stepfast.step import JobKey
from stepfast_operator import clusterjob, labels
from stepfast_operator.document import JSON, encode
from stepfast_operator.record import Attempt, CheckpointStatus, State, Status


def document(*, spec: Any = None, status: Any = None, **metadata: Any) -> JSON:
    return {
        "apiVersion": "stepfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"namespace": "ml", "name": "gpt", "uid": "u", "generation": 3, "resourceVersion": "7", **metadata},
        "spec": {"trainer": {"image": "i", "command": ["torchrun", "t.py"]}, **(spec or {})},
        **({} if status is None else {"status": status}),
    }


def test_job_is_read() -> None:
    job = clusterjob.parse_job(document())
    assert (job.job, job.uid, job.generation) == (JobKey(namespace="ml", name="gpt"), "u", 3)
    assert (job.is_deleted, job.launched, job.finalizers, job.manifest.command) == (False, None, (), None)
    assert job.path == "/apis/stepfast.dev/v1alpha1/namespaces/ml/trainingjobs/gpt"
    assert job.spec.trainer.command == ("torchrun", "t.py")


def test_fields_of_a_newer_version_are_passed_over() -> None:
    """CRDs go before their operator, and the API server fills their defaults into jobs that run."""
    job = clusterjob.parse_job(
        document(spec={"newPolicy": {"a": 1}, "checkpoint": {"newField": 0, "storageUri": "az://a/b"}})
    )
    assert job.spec.checkpoint.storage_uri == "az://a/b"


def test_prediction_that_the_manifest_carries_is_read() -> None:
    assert clusterjob.parse_job(document()).manifest.anatomy is None
    assert clusterjob.parse_job(document(annotations={ANNOTATION: "{}"})).manifest.anatomy == "{}"


def test_marks_of_the_operator_are_read() -> None:
    notes = {labels.LAUNCHED: "{}", labels.RESUME_REQUEST: "r1", "other": "x"}
    job = clusterjob.parse_job(
        document(annotations=notes, deletionTimestamp="2026-01-01T00:00:00Z", finalizers=["a", labels.FINALIZER])
    )
    assert (job.launched, job.manifest.command, job.is_deleted) == ("{}", "r1", True)
    assert job.finalizers == ("a", labels.FINALIZER)


@pytest.mark.parametrize(
    ("spec", "is_ours"),
    [
        ({}, True),
        ({"managedBy": None}, True),
        ({"managedBy": "stepfast.dev/operator"}, True),
        ({"managedBy": "kueue.x-k8s.io/multikueue"}, False),
    ],
)
def test_jobs_of_another_manager_are_not_ours(spec: Any, is_ours: bool) -> None:
    assert clusterjob.is_managed(document(spec=spec)) is is_ours


def test_what_the_api_server_lets_pass_is_refused_with_its_field() -> None:
    with pytest.raises(SpecError, match=r"spec\.trainer\.command"):
        clusterjob.parse_job(document(spec={"trainer": {"image": "i", "command": ["torchrun", "--nnodes=3", "t.py"]}}))


def test_job_that_makes_no_sense_is_still_known_by_what_its_metadata_says() -> None:
    """So that its pods are ended, and its finalizer goes."""
    broken = document(spec={"trainer": 3}, finalizers=[labels.FINALIZER], deletionTimestamp="2026-01-01T00:00:00Z")
    job = clusterjob.unreadable_job(broken)
    assert (job.job, job.uid, job.generation) == (JobKey(namespace="ml", name="gpt"), "u", 3)
    assert (job.is_deleted, job.finalizers) == (True, (labels.FINALIZER,))


def test_status_comes_back_as_it_was_written() -> None:
    status = Status(
        state=State.RUNNING,
        attempt=3,
        restarts=2,
        current=Attempt(attempt=3, run="u-3", resume_step=5, planned_time=1_767_225_600.25),
        checkpoint=CheckpointStatus(latest_persisted_step=5),
    )
    assert clusterjob.status_of(document(status=encode(status))) == status


@pytest.mark.parametrize("status", [None, {}], ids=["none", "empty"])
def test_new_job_has_an_empty_status(status: Any) -> None:
    assert clusterjob.status_of(document(status=status)) == Status()


def test_field_of_a_newer_version_is_passed_over() -> None:
    status = {**encode(replace(Status(), restarts=1)), "ofAnotherVersion": [{"name": "n"}], "current": None}
    assert clusterjob.status_of(document(status=status)).restarts == 1


def test_status_that_somebody_else_wrote_is_an_error_with_its_field() -> None:
    with pytest.raises(SpecError, match=r"status\.restarts"):
        clusterjob.status_of(document(status={"restarts": "many"}))
