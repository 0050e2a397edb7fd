"""The CRDs in `crds/` and the dataclasses that read and write these objects say the same, field by field.

What a dataclass cannot say (a maximum, a closed set of a plain `str`) stands in the tables below, so that a new
difference is never taken for an old one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import yaml

from stepfast import nodestatus
from stepfast.layout import CHUNK_BYTES
from stepfast.nodestatus import EvictionNotice, JobStatus, MirrorStatus, NodeStatus, RankStatus, SaveStatus
from stepfast.slot import CONTROL_BYTES
from stepfast.step import JobKey, Tier
from stepfast_operator import torchrunoptions
from stepfast_operator.document import camel, decode
from stepfast_operator.failurepolicy import RuleAction
from stepfast_operator.podtemplate import EnvVar, parse_env, parse_pod_spec, parse_resources
from stepfast_operator.quantities import parse_processes, parse_quantity, parse_strings
from stepfast_operator.record import MAX_RECOVERIES, ConditionType, State, Status
from stepfast_operator.spec import API_VERSION, KIND, MANAGED_BY, Interval, TrainingSpec, parse_interval, parse_manifest

FOLDER = Path(__file__).resolve().parents[2] / "crds"
NAMES = ("trainingjobs", "checkpointnodes")
KEYWORDS = frozenset(
    {"type", "format", "description", "default", "enum", "minimum", "maximum", "minLength", "maxLength", "pattern",
     "minItems", "maxItems", "minProperties", "maxProperties", "required", "properties", "additionalProperties",
     "items", "anyOf", "allOf", "not", "nullable", "x-kubernetes-validations", "x-kubernetes-list-type",
     "x-kubernetes-map-type", "x-kubernetes-list-map-keys", "x-kubernetes-int-or-string",
     "x-kubernetes-preserve-unknown-fields"}
)  # fmt: skip
RULE_KEYWORDS = frozenset({"rule", "message", "messageExpression", "reason", "fieldPath"})

TEXT = {"type": "string"}
INT_OR_STRING = {"x-kubernetes-int-or-string": True}
QUANTITIES = {"type": "object", "additionalProperties": INT_OR_STRING}
# What a field's own parser takes. An Interval is text or an object; its properties are compared below.
PARSED: dict[Any, dict[str, Any]] = {
    parse_strings: {"type": "array", "items": TEXT},
    parse_quantity: INT_OR_STRING,
    parse_processes: INT_OR_STRING,
    parse_resources: {"type": "object", "properties": {"limits": QUANTITIES, "requests": QUANTITIES}},
    parse_pod_spec: {
        "type": "object",
        "additionalProperties": {"x-kubernetes-preserve-unknown-fields": True, "nullable": True},
    },
}
# `auto` the code writes None. The template is always there, so that a rule can compare it.
DEFAULTS = {"spec.trainer.numProcPerNode": "auto", "spec.checkpoint.interval": "auto", "spec.template": {}}

# Closed sets that the code writes as plain text.
CONDITION_STATUS = ["True", "False", "Unknown"]
CLOSED = {
    "status.terminalState": [State.COMPLETE, State.FAILED],
    "status.checkpoint.restoredTier": list(Tier),
    "status.recoveries[].restoredTier": list(Tier),
    "status.lastFailure.action": list(RuleAction),
    "status.conditions[].status": CONDITION_STATUS,
    "spec.failurePolicy.rules[].onPodConditions[].status": CONDITION_STATUS,
    "spec.failurePolicy.rules[].onNodeConditions[].status": CONDITION_STATUS,
}
# As metav1.Condition requires them; the code always writes them.
ALWAYS_WRITTEN = {"status.conditions[]": {"message", "lastTransitionTime"}}
# Bounds that the code has no word for, and why.
MINIMA = {"spec.failurePolicy.rules[].onExitCodes.values[]": 0}  # exit statuses go from 0 to 255
MAXIMA = {
    "spec.failurePolicy.rules[].onExitCodes.values[]": 255,
    "spec.trainer.numNodes": 10_000,  # four digits of a pod's name
    "spec.elasticPolicy.minNodes": 10_000,
    "spec.elasticPolicy.maxNodes": 10_000,
    "spec.nodeExclusionPolicy.maxExcludedNodes": 64,  # each is a requirement in the affinity of every pod
    "spec.checkpoint.memory.mirrors": 1,
    "spec.checkpoint.interval": 0,  # with minimum 1: no number at all
}
MINIMA["spec.checkpoint.interval"] = 1


def crd_of(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.stepfast.dev.yaml").read_text())
    return document


def schema_of(name: str) -> dict[str, Any]:
    (version,) = crd_of(name)["spec"]["versions"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


@pytest.fixture
def job() -> dict[str, Any]:
    return schema_of("trainingjobs")["properties"]  # type: ignore[no-any-return]  # YAML


@pytest.fixture
def node() -> dict[str, Any]:
    return schema_of("checkpointnodes")["properties"]  # type: ignore[no-any-return]  # YAML


def test_the_spec_is_what_the_operator_reads(job: dict[str, Any]) -> None:
    assert list(differences(job["spec"], TrainingSpec, "spec")) == []


def test_the_status_is_what_the_operator_writes(job: dict[str, Any]) -> None:
    assert list(differences(job["status"], Status, "status")) == []


def test_a_variable_is_what_the_operator_reads(job: dict[str, Any]) -> None:
    env = job["spec"]["properties"]["trainer"]["properties"]["env"]
    assert (env["type"], env["x-kubernetes-list-map-keys"]) == ("array", ["name"])
    variable = env["items"]
    # `valueFrom` is Kubernetes' own, kept as it is; here it has the fields that Kubernetes gives it.
    types = {name: schema["type"] for name, schema in variable["properties"].items()}
    assert types == {"name": "string", "value": "string", "valueFrom": "object"}
    assert set(types) == {camel(field.name) for field in fields(EnvVar)}
    assert variable["required"] == ["name"]


def test_an_interval_is_what_the_operator_reads(job: dict[str, Any]) -> None:
    interval = job["spec"]["properties"]["checkpoint"]["properties"]["interval"]
    assert list(differences({"type": "object", **interval}, Interval, "spec.checkpoint.interval")) == []
    assert parse_interval(interval["default"], "") == Interval()


@pytest.mark.parametrize(
    "manifest",
    [
        {"trainer": {"command": ["train"]}},
        {"trainer": {"args": ["train"]}, "failurePolicy": {"backoff": {"baseSeconds": 2}}, "template": {"spec": {}}},
        {"trainer": {"args": ["train"]}, "checkpoint": {"interval": {"steps": 3}, "memory": {"sizeLimit": "1Gi"}}},
    ],
    ids=["least", "half a backoff", "half a checkpoint"],
)
def test_defaults_of_the_api_server_change_nothing(job: dict[str, Any], manifest: dict[str, Any]) -> None:
    filled = with_defaults(manifest, job["spec"])
    assert filled != manifest
    assert decode(TrainingSpec, filled, "spec") == decode(TrainingSpec, manifest, "spec")
    assert filled["managedBy"] == MANAGED_BY
    assert with_defaults(filled, job["spec"]) == filled


def test_a_node_status_is_what_an_agent_writes(node: dict[str, Any]) -> None:
    status = node["status"]
    document = nodestatus.to_document(full_status())
    del document["node"]  # the object's name
    assert set(status["properties"]) == {*document, "conditions", "observedGeneration"}
    found = list(document_differences(status, {**document}, "status", ignored={"conditions", "observedGeneration"}))
    assert found == []


def test_what_an_agent_always_writes_is_required(node: dict[str, Any]) -> None:
    document = nodestatus.to_document(least_status())
    status = node["status"]["properties"]
    job, memory = status["jobs"]["items"], status["memory"]
    assert set(memory["required"]) == set(document["memory"])
    assert set(job["required"]) == set(document["jobs"][0])
    assert set(job["properties"]["ranks"]["items"]["required"]) == set(document["jobs"][0]["ranks"][0])
    assert set(job["properties"]["saves"]["required"]) == set(document["jobs"][0]["saves"])


def test_times_of_a_node_status_are_date_times(node: dict[str, Any]) -> None:
    job = node["status"]["properties"]["jobs"]["items"]["properties"]
    dated = {
        name
        for properties in (job, job["ranks"]["items"]["properties"])
        for name, schema in properties.items()
        if schema.get("format") == "date-time"
    }
    times = {field.name for kind in (JobStatus, RankStatus) for field in fields(kind) if field.name.endswith("_time")}
    assert dated == {camel(name) for name in times - {"step_time"}} | {"time"}


def test_a_rank_restores_from_a_tier_or_from_none(node: dict[str, Any]) -> None:
    rank = node["status"]["properties"]["jobs"]["items"]["properties"]["ranks"]["items"]["properties"]
    assert rank["restoredTier"]["enum"] == [*Tier, "None"]


def test_conditions_of_both_kinds_are_metav1_conditions(job: dict[str, Any], node: dict[str, Any]) -> None:
    of_job, of_node = job["status"]["properties"]["conditions"], node["status"]["properties"]["conditions"]
    assert of_node["items"]["properties"]["type"].pop("enum") == ["Ready"]
    assert of_job["items"]["properties"]["type"].pop("enum") == list(ConditionType)
    inner = [
        {name: {**schema, "description": ""} for name, schema in conditions["items"]["properties"].items()}
        for conditions in (of_job, of_node)
    ]
    assert inner[0] == inner[1]
    assert of_job["items"]["required"] == of_node["items"]["required"]
    assert of_job["x-kubernetes-list-map-keys"] == of_node["x-kubernetes-list-map-keys"] == ["type"]


def test_requests_to_an_agent_are_keyed_by_all_that_they_say(node: dict[str, Any]) -> None:
    requests = node["spec"]["properties"]["requests"]
    said = ["namespace", "name", "run", "action"]
    assert requests["x-kubernetes-list-map-keys"] == said
    assert requests["items"]["required"] == list(requests["items"]["properties"]) == said
    assert requests["items"]["properties"]["action"]["enum"] == ["Flush", "Save"]


@pytest.mark.parametrize("name", NAMES)
def test_every_field_is_described_and_every_keyword_known(name: str) -> None:
    assert list(undescribed(schema_of(name), "")) == []


@pytest.mark.parametrize("name", NAMES)
def test_there_is_one_version_with_a_status_subresource(name: str) -> None:
    crd = crd_of(name)
    (version,) = crd["spec"]["versions"]
    assert crd["metadata"]["name"] == f"{name}.{crd['spec']['group']}" == (FOLDER / f"{name}.stepfast.dev.yaml").stem
    assert f"{crd['spec']['group']}/{version['name']}" == API_VERSION
    assert version["subresources"] == {"status": {}}
    assert (version["served"], version["storage"]) == (True, True)


def test_a_job_has_its_names() -> None:
    names = crd_of("trainingjobs")["spec"]["names"]
    assert (names["kind"], names["shortNames"], names["categories"]) == (KIND, ["tj", "tjob"], ["training"])


def test_every_column_shows_a_field() -> None:
    for name in NAMES:
        (version,) = crd_of(name)["spec"]["versions"]
        for column in version["additionalPrinterColumns"]:
            path = re.sub(r"\[[^]]*\]", "[]", column["jsonPath"])
            schema: dict[str, Any] | None = version["schema"]["openAPIV3Schema"]
            if not path.startswith(".metadata."):
                assert schema_at(schema, path) is not None, f"{column['name']}: no field {path}"


def test_variables_that_are_ours_are_those_that_torchrun_reads(job: dict[str, Any]) -> None:
    env = job["spec"]["properties"]["trainer"]["properties"]["env"]["items"]
    named = {name for rule in env["x-kubernetes-validations"] for name in re.findall(r"PET_[A-Z_]+", rule["rule"])}
    assert named == {f"PET_{name.upper().replace('-', '_')}" for name in torchrunoptions._OURS}


def test_constants_in_rules_are_those_of_the_code(job: dict[str, Any]) -> None:
    rule = next(one for one in job["spec"]["x-kubernetes-validations"] if "sizeLimit" in one["fieldPath"])
    assert f"{CHUNK_BYTES + CONTROL_BYTES}.0 *" in rule["rule"]
    assert str(CHUNK_BYTES + CONTROL_BYTES) in rule["message"]
    assert job["status"]["properties"]["recoveries"]["maxItems"] == MAX_RECOVERIES


@pytest.mark.parametrize("path", sorted(FOLDER.parent.glob("examples/*/job.yaml")), ids=lambda path: path.parent.name)
def test_examples_use_fields_of_the_schema_alone(job: dict[str, Any], path: Path) -> None:
    manifest = yaml.safe_load(path.read_text())
    parse_manifest(manifest, default_namespace="local")
    assert list(unknown(manifest["spec"], job["spec"], "spec")) == []


# What makes the comparison


def differences(schema: Mapping[str, Any], kind: Any, path: str) -> Iterator[str]:
    """Where the schema of an object is not that dataclass."""
    hints, known = get_type_hints(kind), {outside(field): field for field in fields(kind)}
    properties = schema.get("properties", {})
    yield from differ(f"{path}: type", schema.get("type"), "object")
    yield from differ(f"{path}: fields only in the schema", sorted(set(properties) - set(known)), [])
    yield from differ(f"{path}: fields only in {kind.__name__}", sorted(set(known) - set(properties)), [])
    needed = {name for name, field in known.items() if is_needed(field)} | ALWAYS_WRITTEN.get(path, set())
    yield from differ(f"{path}: required", sorted(schema.get("required", [])), sorted(needed))
    for name in [name for name in known if name in properties]:
        field, where, property_ = known[name], f"{path}.{name}", properties[name]
        yield from differ(f"{where}: minimum", property_.get("minimum"), MINIMA.get(where, field.metadata.get("least")))
        yield from differ(f"{where}: maximum", property_.get("maximum"), MAXIMA.get(where))
        if path.startswith("spec"):
            yield from differ(f"{where}: default", property_.get("default"), DEFAULTS.get(where, default_of(field)))
        else:
            yield from differ(f"{where}: a default in the status", property_.get("default"), None)
        yield from field_differences(property_, field, hints[field.name], where)


def field_differences(schema: Mapping[str, Any], field: Field[Any], hint: Any, path: str) -> Iterator[str]:
    parse = field.metadata.get("parse")
    if parse in (parse_env, parse_interval):
        return  # compared in tests of their own
    if parse is not None:
        yield from lacking(schema, PARSED[parse], path)
    elif field.name.endswith("_time"):
        yield from lacking(schema, {**TEXT, "format": "date-time"}, path)
    else:
        yield from type_differences(schema, hint, path)


def type_differences(schema: Mapping[str, Any], hint: Any, path: str) -> Iterator[str]:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        (hint,) = [arg for arg in get_args(hint) if arg is not type(None)]
        origin = get_origin(hint)
    if origin is tuple:
        yield from differ(f"{path}: type", schema.get("type"), "array")
        items = schema.get("items", {})
        yield from differ(f"{path}[]: minimum", items.get("minimum"), MINIMA.get(f"{path}[]"))
        yield from differ(f"{path}[]: maximum", items.get("maximum"), MAXIMA.get(f"{path}[]"))
        yield from type_differences(items, get_args(hint)[0], f"{path}[]")
    elif origin is not None:
        yield from differ(f"{path}: type", schema.get("type"), "object")
        yield from type_differences(schema.get("additionalProperties", {}), get_args(hint)[1], f"{path}.*")
    elif is_dataclass(hint):
        yield from differences(schema, hint, path)
    else:
        words = {bool: "boolean", int: "integer", float: "number"}
        yield from differ(f"{path}: type", schema.get("type"), words.get(hint, "string"))
        closed = [str(word) for word in (hint if issubclass(hint, StrEnum) else CLOSED.get(path, ()))]
        yield from differ(f"{path}: enum", schema.get("enum", []), closed)


def document_differences(
    schema: Mapping[str, Any], value: Any, path: str, ignored: set[str] | frozenset[str] = frozenset()
) -> Iterator[str]:
    """Where a schema is not that of a document that has every field."""
    if isinstance(value, dict):
        yield from differ(f"{path}: type", schema.get("type"), "object")
    if isinstance(value, dict) and "additionalProperties" in schema:
        for key, item in value.items():
            yield from document_differences(schema["additionalProperties"], item, f"{path}.{key}")
    elif isinstance(value, dict):
        properties = {name: inner for name, inner in schema["properties"].items() if name not in ignored}
        yield from differ(f"{path}: fields", sorted(properties), sorted(value))
        for key in set(properties) & set(value):
            yield from document_differences(properties[key], value[key], f"{path}.{key}")
    elif isinstance(value, list):
        yield from differ(f"{path}: type", schema.get("type"), "array")
        for item in value:
            yield from document_differences(schema["items"], item, f"{path}[]")
    else:
        words = {bool: "boolean", int: "integer", float: "number", str: "string"}
        yield from differ(f"{path}: type", schema.get("type"), words[type(value)])


def differ(what: str, got: object, expected: object) -> Iterator[str]:
    if got != expected:
        yield f"{what}: {got!r} in the schema, {expected!r} in the code"


def lacking(schema: Any, expected: Any, path: str) -> Iterator[str]:
    """What of the expected fragment the schema has not. Properties are the same ones, no more."""
    if not isinstance(expected, dict):
        yield from differ(path, schema, expected)
        return
    for key, inner in expected.items():
        yield from lacking((schema or {}).get(key), inner, f"{path}:{key}")
    if "properties" in expected:
        yield from differ(f"{path}: fields", sorted((schema or {})["properties"]), sorted(expected["properties"]))


def outside(field: Field[Any]) -> str:
    return str(field.metadata.get("name") or camel(field.name))


def is_needed(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def default_of(field: Field[Any]) -> object:
    """What the schema fills in. Of objects: an empty one, which its own fields' defaults fill; nothing for nothing."""
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if value is MISSING or value in (None, "", (), {}):
        return None
    if is_dataclass(value):
        return {} if any(default_of(inner) is not None for inner in fields(value)) else None
    return str(value) if isinstance(value, StrEnum) else value


def with_defaults(value: Any, schema: Mapping[str, Any]) -> Any:
    """As the API server fills in defaults: of an object that is there, before its own fields."""
    if isinstance(value, list):
        return [with_defaults(item, schema.get("items", {})) for item in value]
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    given = {name: inner["default"] for name, inner in schema["properties"].items() if "default" in inner} | value
    return {name: with_defaults(item, schema["properties"].get(name, {})) for name, item in given.items()}


def undescribed(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    unknown_words = sorted(set(schema) - KEYWORDS)
    yield from (f"{path}: no keyword {word}" for word in unknown_words)
    for rule in schema.get("x-kubernetes-validations", ()):
        yield from (f"{path}: no keyword {word} of a rule" for word in sorted(set(rule) - RULE_KEYWORDS))
        if not rule.get("message", "").strip():
            yield f"{path}: a rule without a message"
    is_root_metadata = path == ".metadata"  # which the API server describes itself
    text = schema.get("description", "")
    if not is_root_metadata and (not text or text != text.strip() or not text.endswith(".")):
        yield f"{path}: no description that is a sentence"
    for name, inner in schema.get("properties", {}).items():
        yield from undescribed(inner, f"{path}.{name}")
    for keyword, mark in (("items", "[]"), ("additionalProperties", ".*")):
        if keyword in schema:
            yield from undescribed(schema[keyword], path + mark)


def unknown(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from unknown(item, schema["items"], f"{path}[]")
    elif isinstance(value, dict) and "properties" in schema:
        for key, item in value.items():
            if key in schema["properties"]:
                yield from unknown(item, schema["properties"][key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"


def schema_at(schema: dict[str, Any] | None, path: str) -> dict[str, Any] | None:
    for word in path.strip(".").split("."):
        name, is_list = word.removesuffix("[]"), word.endswith("[]")
        schema = (schema or {}).get("properties", {}).get(name)
        schema = (schema or {}).get("items") if is_list else schema
    return schema


def full_status() -> NodeStatus:
    """Every field has a value."""
    values: dict[Any, Any] = {int: 3, float: 2.5, bool: True, str: "text"}

    def sample(kind: Any) -> Any:
        given = {}
        for name, hint in get_type_hints(kind).items():
            plain = [arg for arg in get_args(hint) if arg in values]
            given[name] = values[hint] if hint in values else values[plain[0]] if plain else None
        return given

    rank = RankStatus(**{**sample(RankStatus), "restored_tier": "Memory", "metrics": {"loss": 0.5}})
    saves = SaveStatus(**sample(SaveStatus))
    known = {
        "job": JobKey(namespace="a", name="b"),
        "ranks": [rank],
        "saves": saves,
        "pending_steps": [3],
        "incomplete_steps": [3],
    }
    known["mirrors"] = [MirrorStatus(**sample(MirrorStatus))]
    notice = EvictionNotice(**sample(EvictionNotice))
    status = {"jobs": [JobStatus(**{**sample(JobStatus), **known})], "notice": notice}
    return NodeStatus(**{**sample(NodeStatus), **status})


def least_status() -> NodeStatus:
    """Only what must have a value has one."""
    rank = RankStatus(rank=0, pid=1, alive=True, clean=False, joined_time=1.0)
    job = JobStatus(job=JobKey(namespace="a", name="b"), run="r-1", world_size=1, ranks=[rank], saves=SaveStatus())
    return NodeStatus(node="n", memory_limit_bytes=1, memory_used_bytes=0, jobs=[job])
