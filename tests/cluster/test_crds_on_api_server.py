"""A real API server takes what the CRDs mean to allow, and refuses the rest in words that a user understands.

Rows that follow from the schema (enums, bounds, required and unknown fields) are made from it; each CEL rule has a row
by hand, and a test holds that none is forgotten.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stepfast_operator.document import encode
from stepfast_operator.record import Status
from stepfast_operator.spec import API_VERSION, parse_manifest
from testcluster.waiting import wait_until
from testcrds.api import Api
from testcrds.manifests import (
    FULL,
    LEAST,
    OTHER_GANGS,
    OWN_STORAGE,
    full_job_status,
    full_node_status,
    large,
    manifest,
)
from testcrds.places import FOLDER, NAMES, mark, marks, messages, mistakes, places, schema_of
from testcrds.rows import ACCEPTED, BAD_NAMES, CHANGES, FINISHED, REFUSED, REPORTS, RUNNING, STOPPED, SUSPENDED

JOB, NODE = (schema_of(name)["properties"] for name in NAMES)
EXAMPLES = sorted(FOLDER.parent.glob("examples/*/job.yaml"))
# An interval is text or an object, which rows by hand try.
MISTAKES = [
    row
    for row in {
        row[0]: row for spec in (*OTHER_GANGS, OWN_STORAGE, FULL) for row in mistakes(spec, JOB["spec"], "spec")
    }.values()
    if not row[0].startswith("spec.checkpoint.interval ")
]


@pytest.fixture(scope="module")
def installed(api_server: Any) -> Iterator[Any]:
    """The API server with our CRDs; those that it did not have before are removed again."""
    names = [f"{name}.stepfast.dev" for name in NAMES]
    before = api_server.kubectl("get", "crd", "-o", "name")
    api_server.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(FOLDER))
    yield api_server
    new = [name for name in names if name not in before]
    if new:
        api_server.kubectl("delete", "crd", *new)


@pytest.fixture(scope="module")
def api(installed: Any) -> Iterator[Api]:
    api = Api(installed.kubeconfig, f"crds-{uuid.uuid4().hex[:8]}")
    for path in (api.jobs(), api.nodes()):
        wait_until(f"{path} is served", lambda path=path: api.send("GET", path).status == 200, seconds=60)
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": api.namespace}}
    assert api.send("POST", "/api/v1/namespaces", namespace).status == 201
    yield api
    api.close()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_examples_are_accepted(api: Api, path: Path) -> None:
    example = yaml.safe_load(path.read_text())
    answer = api.dry_run(example["spec"], example["metadata"]["name"])
    assert answer.status == 201, answer.message


def test_a_manifest_with_every_field_is_accepted_and_kept(api: Api) -> None:
    reached = {mark(path) for spec in (FULL, OWN_STORAGE, *OTHER_GANGS) for path, _, _ in places(spec, JOB["spec"])}
    assert set(marks(JOB["spec"])) - reached == {"checkpoint.interval.seconds"}  # an interval is one or the other
    answer = api.dry_run(FULL)
    assert answer.status == 201, answer.message
    assert answer.body["spec"] == FULL
    for other in OTHER_GANGS:
        answer = api.dry_run(other)
        assert answer.status == 201, answer.message
        own = other.keys() - LEAST.keys()
        assert {name: answer.body["spec"][name] for name in own} == {name: other[name] for name in own}
    answer = api.dry_run(OWN_STORAGE)
    assert answer.status == 201, answer.message
    assert answer.body["spec"]["checkpoint"].items() >= OWN_STORAGE["checkpoint"].items()


def test_what_the_api_server_fills_in_is_what_the_operator_fills_in(api: Api) -> None:
    stored = parse_manifest(api.dry_run(LEAST).body, default_namespace="local")
    assert stored.spec == parse_manifest(manifest(LEAST), default_namespace="local").spec


@pytest.mark.parametrize("spec", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_good_manifests_are_accepted_by_both_readers(api: Api, spec: dict[str, Any]) -> None:
    answer = api.dry_run(spec)
    assert answer.status == 201, answer.message
    parse_manifest(answer.body, default_namespace="local")


@pytest.mark.parametrize(("spec", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_manifests_are_refused_in_plain_words(api: Api, spec: dict[str, Any], words: str) -> None:
    answer = api.dry_run(spec)
    assert answer.status == (400 if "unknown field" in words else 422), answer.message
    assert words in answer.message


@pytest.mark.parametrize(("name", "words"), BAD_NAMES.values(), ids=BAD_NAMES.keys())
def test_names_that_pods_could_not_have_are_refused(api: Api, name: str, words: str) -> None:
    answer = api.dry_run(LEAST, name)
    assert answer.status == 422, answer.message
    assert words in answer.message


def test_the_longest_name_leaves_room_for_the_greatest_numbers(api: Api) -> None:
    longest = "a" * 50
    assert api.dry_run(LEAST, longest).status == 201
    last_node = JOB["spec"]["properties"]["trainer"]["properties"]["numNodes"]["maximum"] - 1
    assert len(f"{longest}-9999999-{last_node}") == 63  # a pod's name is its host name


@pytest.mark.parametrize(("spec", "words"), [row[1:] for row in MISTAKES], ids=[row[0] for row in MISTAKES])
def test_the_schema_is_enforced_at_every_place(api: Api, spec: Any, words: str) -> None:
    answer = api.dry_run(spec)
    assert answer.status == (400 if "unknown field" in words else 422), answer.message
    assert words in answer.message


@pytest.mark.parametrize(("old", "status", "new", "words"), CHANGES.values(), ids=CHANGES.keys())
def test_a_spec_changes_only_when_it_may(api: Api, old: Any, status: Any, new: Any, words: str | None) -> None:
    name = api.create(old)
    if status is not None:
        assert api.report(name, status).status == 200
    answer = api.change(name, spec=new)
    if words is None:
        assert answer.status == 200, answer.message
    else:
        assert answer.status == 422, answer.body
        assert words in answer.message


def test_no_rule_is_too_expensive_for_a_large_job(api: Api) -> None:
    spec = large()
    name = api.create(spec)
    for answer in (
        api.report(name, RUNNING),
        api.change(name, spec={**spec, "suspend": True}),
        api.report(name, FINISHED),
    ):
        assert answer.status == 200, answer.message
    answer = api.change(name, spec={**spec, "suspend": True, "ttlSecondsAfterFinished": 1})
    assert answer.status == 200, answer.message


@pytest.mark.parametrize(("before", "after", "words"), REPORTS.values(), ids=REPORTS.keys())
def test_a_status_keeps_what_must_not_be_forgotten(api: Api, before: Any, after: Any, words: str | None) -> None:
    name = api.create(LEAST)
    assert api.report(name, before).status == 200
    answer = api.report(name, after)
    if words is None:
        assert answer.status == 200, answer.message
    else:
        assert answer.status in (400, 422), answer.body
        assert words in answer.message


def test_every_rule_has_a_row() -> None:
    rows = [
        words for *_, words in (*REFUSED.values(), *BAD_NAMES.values(), *CHANGES.values(), *REPORTS.values()) if words
    ]
    rules = [rule for name in NAMES for rule in messages(schema_of(name), name)]
    assert len(rules) > 30
    assert [(path, text) for path, text in rules if not any(words in text for words in rows)] == []


def test_the_status_is_written_through_its_subresource_alone(api: Api) -> None:
    name = api.create(LEAST)
    assert "status" not in api.change(name, status=RUNNING).body
    assert api.report(name, RUNNING).body["status"] == RUNNING
    after = api.change(name, part="status", spec=STOPPED, status=SUSPENDED).body
    assert (after["spec"]["suspend"], after["status"], after["metadata"]["generation"]) == (False, SUSPENDED, 1)


def test_a_status_with_every_field_is_kept_whole(api: Api) -> None:
    status = full_job_status()
    assert {mark(path) for path, _, _ in places(status, JOB["status"])} == set(marks(JOB["status"]))
    answer = api.report(api.create(LEAST), status)
    assert answer.status == 200, answer.message
    assert answer.body["status"] == status
    assert fields_of_status(answer.body) == {"f:status": {}}


def fields_of_status(document: Any) -> Any:
    """Who wrote what, which the API server works out and keeps at every write: one field will do for one writer."""
    [entry] = (one for one in document["metadata"]["managedFields"] if one.get("subresource") == "status")
    return entry["fieldsV1"]


def test_the_least_status_is_accepted(api: Api) -> None:
    answer = api.report(api.create(LEAST), encode(Status()))
    assert answer.status == 200, answer.message


def test_a_checkpoint_node_has_two_writers(api: Api, request: pytest.FixtureRequest) -> None:
    name = f"node-{uuid.uuid4().hex[:8]}"
    node = {"apiVersion": API_VERSION, "kind": "CheckpointNode", "metadata": {"name": name, "labels": {"a": "b"}}}
    created = api.send("POST", api.nodes(), node, fieldValidation="Strict")
    assert created.status == 201, created.message
    request.addfinalizer(lambda: api.send("DELETE", api.nodes(name)))
    status = full_node_status()
    written = api.send("PUT", api.nodes(name, "status"), {**created.body, "status": status}, fieldValidation="Strict")
    assert written.status == 200, written.message
    assert written.body["status"] == status
    assert fields_of_status(written.body) == {"f:status": {}}
    reached = {mark(path) for path, _, _ in places(status, NODE["status"])}
    assert set(marks(NODE["status"])) == reached - {"jobs.[].ranks.[].metrics.loss"}  # named by the user
    asked = {"requests": [{"namespace": "a", "name": "b", "run": "u-1", "action": word} for word in ("Flush", "Save")]}
    answer = api.send("PUT", api.nodes(name), {**written.body, "spec": asked, "status": {}}, fieldValidation="Strict")
    assert answer.status == 200, answer.message
    assert (answer.body["spec"], answer.body["status"], answer.body["metadata"]["generation"]) == (asked, status, 2)


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([{"namespace": "a", "name": "b", "run": "c", "action": "Flush"}] * 2, "Duplicate value"),
        ([{"namespace": "a", "name": "b", "run": "c", "action": "Forget"}], 'supported values: "Flush", "Save"'),
        ([{"namespace": "a", "name": "b", "action": "Flush"}], "spec.requests[0].run: Required value"),
    ],
    ids=["twice", "unknown action", "no run"],
)
def test_bad_requests_to_a_node_are_refused(api: Api, requests: Any, words: str) -> None:
    node = {
        "apiVersion": API_VERSION,
        "kind": "CheckpointNode",
        "metadata": {"name": "n"},
        "spec": {"requests": requests},
    }
    answer = api.send("POST", api.nodes(), node, dryRun="All")
    assert answer.status == 422, answer.body
    assert words in answer.message


def test_columns_show_where_a_job_stands(api: Api) -> None:
    name, status = api.create(LEAST), full_job_status()
    assert api.report(name, status).status == 200
    table = api.send("GET", api.jobs(name), accept="application/json;as=Table;v=v1;g=meta.k8s.io").body
    columns = table["columnDefinitions"]
    shown = dict(zip([column["name"] for column in columns], table["rows"][0]["cells"], strict=True))
    wide = {"Progress": 4, "ETA": 5, "Persisted-At": shown["Persisted-At"], "Last-Failure": "RankFailed"}
    narrow = {"State": "Running", "Ready": 1, "Nodes": 2, "Step": 3, "Persisted": 6, "Restarts": 7}
    assert shown == {"Name": name, **narrow, **wide, "Age": shown["Age"]}
    assert [column["name"] for column in columns if column["priority"]] == list(wide)
    assert shown["Persisted-At"].endswith(("s", "m", "h", "d", "y", "<invalid>"))


def test_jobs_are_found_by_their_state(api: Api) -> None:
    restarting, stopped = api.create(LEAST), api.create(STOPPED)
    api.report(restarting, {"state": "Restarting"})
    found = {
        selector: {
            item["metadata"]["name"] for item in api.send("GET", api.jobs(), fieldSelector=selector).body["items"]
        }
        for selector in ("status.state=Restarting", "spec.suspend=true", "spec.managedBy=stepfast.dev/operator")
    }
    assert [restarting in names for names in found.values()] == [True, False, True]
    assert [stopped in names for names in found.values()] == [False, True, True]


@pytest.mark.parametrize("alias", ["tj", "tjob", "training"])
def test_kubectl_knows_a_job_by_its_short_names(installed: Any, api: Api, alias: str) -> None:
    name = api.create(LEAST)
    wait_until(f"{alias} is known", lambda: name in installed.kubectl("get", alias, "-n", api.namespace))


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("tj", "PyTorch training that is kept going"),
        ("tj.spec.checkpoint.interval", "Young and Daly"),
        ("tj.spec.template.spec", "PodSpec"),
        ("tj.status.recoveries", "The last ten recoveries"),
        ("checkpointnodes.status.jobs.ranks", "joinedTime"),
    ],
)
@pytest.mark.usefixtures("api")
def test_kubectl_explains_fields(installed: Any, field: str, words: str) -> None:
    wait_until(f"{field} is explained", lambda: words in " ".join(installed.kubectl("explain", field).split()))
