"""Manifests are read strictly: every mistake names its field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stepfast.errors import SpecError
from stepfast.footprint import ANNOTATION
from stepfast.step import OnBusy
from stepfast_operator.failurepolicy import ExitCodeOperator, RuleAction
from stepfast_operator.podtemplate import EnvVar
from stepfast_operator.quantities import parse_quantity
from stepfast_operator.spec import (
    API_VERSION,
    HangAction,
    Interval,
    MemoryAction,
    ResumePolicy,
    TrainingJob,
    parse_interval,
    parse_manifest,
    settings_text,
)
from stepfast_operator.torchrunoptions import script_of


def parse(*, metadata: Any = None, **spec: Any) -> TrainingJob:
    manifest = {
        "apiVersion": API_VERSION,
        "kind": "TrainingJob",
        "metadata": {"name": "gpt", **(metadata or {})},
        "spec": {"trainer": {"command": ["torchrun", "train.py"]}, **spec},
    }
    return parse_manifest(manifest, default_namespace="local")


def test_full_manifest_is_read() -> None:
    job = parse(
        activeDeadlineSeconds=100,
        startupDeadlineSeconds=60,
        trainer={
            "command": ["torchrun"],
            "args": ["train.py", "--lr", 0.1],
            "env": [{"name": "A", "value": "1"}, {"name": "B"}],
            "workingDir": "/data",
            "numNodes": 2,
            "numProcPerNode": 8,
        },
        failurePolicy={
            "maxRestarts": 5,
            "maxRestartsWithoutProgress": 2,
            "backoff": {"baseSeconds": 2, "maxSeconds": 10},
            "flushTimeoutSeconds": 7,
            "rules": [{"name": "r", "action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [1, 2]}}],
        },
        progressPolicy={"progressDeadlineSeconds": 30, "action": "Notify"},
        checkpoint={
            "storageUri": "memory://x",
            "resumePolicy": "Step",
            "resumeFromStep": 5,
            "interval": {"seconds": 30},
            "memory": {"sizeLimit": "64Gi", "onBusy": "Skip"},
            "persistent": {"intervalSeconds": 0, "maxToKeep": 1},
            "gracefulSuspendSeconds": 3,
        },
    )
    spec = job.spec
    assert str(job.job) == "local/gpt"
    assert spec.trainer.args == ("train.py", "--lr", "0.1")
    assert spec.trainer.env == (EnvVar(name="A", value="1"), EnvVar(name="B"))
    assert (spec.trainer.num_nodes, spec.trainer.num_proc_per_node) == (2, 8)
    rule = spec.failure_policy.rules[0]
    assert rule.on_exit_codes is not None
    assert (rule.action, rule.on_exit_codes.operator) == (RuleAction.FAIL_JOB, ExitCodeOperator.NOT_IN)
    assert rule.on_exit_codes.matches(3)
    assert not rule.on_exit_codes.matches(2)
    assert spec.progress_policy.action is HangAction.NOTIFY
    assert spec.checkpoint.resume_policy is ResumePolicy.STEP
    assert spec.checkpoint.memory.size_limit == 64 * 2**30
    assert spec.checkpoint.memory.on_busy is OnBusy.SKIP
    assert spec.checkpoint.persistent.interval_seconds == 0


def test_defaults_are_those_of_the_api() -> None:
    spec = parse().spec
    policy = spec.failure_policy
    assert (policy.max_restarts, policy.max_restarts_without_progress, policy.flush_timeout_seconds) == (
        10,
        3,
        120,
    )
    assert (policy.backoff.base_seconds, policy.backoff.max_seconds) == (1, 300)
    assert (spec.startup_deadline_seconds, spec.active_deadline_seconds) == (900, None)
    assert (spec.progress_policy.progress_deadline_seconds, spec.progress_policy.action) == (
        600,
        HangAction.RESTART_JOB,
    )
    assert (spec.checkpoint.persistent.interval_seconds, spec.checkpoint.persistent.max_to_keep) == (2, 5)
    assert spec.checkpoint.interval == Interval()
    assert spec.trainer.num_proc_per_node is None


@pytest.mark.parametrize(
    ("spec", "field", "hint"),
    [
        pytest.param({"failurPolicy": {}}, "spec.failurPolicy", "failurePolicy", id="unknown-top"),
        pytest.param(
            {"failurePolicy": {"maxRestart": 1}}, "spec.failurePolicy.maxRestart", "maxRestarts", id="unknown"
        ),
        pytest.param(
            {"failurePolicy": {"maxRestarts": -1}},
            "spec.failurePolicy.maxRestarts",
            "less than",
            id="negative",
        ),
        pytest.param(
            {"failurePolicy": {"maxRestarts": "5"}},
            "spec.failurePolicy.maxRestarts",
            "whole number",
            id="text",
        ),
        pytest.param({"failurePolicy": {"maxRestarts": True}}, "spec.failurePolicy.maxRestarts", "whole", id="bool"),
        pytest.param({"failurePolicy": []}, "spec.failurePolicy", "object", id="list-for-object"),
        pytest.param({"checkpoint": {"resumePolicy": "latest"}}, "spec.checkpoint.resumePolicy", "Latest", id="enum"),
        pytest.param({"checkpoint": {"resumeFromStep": 3}}, "spec.checkpoint.resumeFromStep", "Step", id="step-alone"),
        pytest.param({"checkpoint": {"resumePolicy": "Step"}}, "spec.checkpoint.resumeFromStep", "Step", id="no-step"),
        pytest.param(
            {"checkpoint": {"secretRef": {"name": "s"}, "resumePolicy": "Never"}},
            "spec.checkpoint.resumePolicy",
            "must be Latest",
            id="secret-never",
        ),
        pytest.param(
            {"checkpoint": {"secretRef": {"name": "s"}, "resumePolicy": "Step", "resumeFromStep": 5}},
            "spec.checkpoint.resumePolicy",
            "which the operator cannot read",
            id="secret-step",
        ),
        pytest.param({"checkpoint": {"interval": "5m"}}, "spec.checkpoint.interval", "10s", id="interval-text"),
        pytest.param(
            {"checkpoint": {"interval": {"steps": 1, "seconds": 1}}},
            "spec.checkpoint.interval",
            "one of",
            id="both",
        ),
        pytest.param(
            {"checkpoint": {"memory": {"sizeLimit": "64GB"}}},
            "spec.checkpoint.memory.sizeLimit",
            "64Gi",
            id="quantity",
        ),
        pytest.param(
            {"trainer": {"command": ["x"], "numProcPerNode": 2}, "checkpoint": {"memory": {"sizeLimit": "9Mi"}}},
            "spec.checkpoint.memory.sizeLimit",
            "2 ranks need at least",
            id="memory",
        ),
        pytest.param(
            {"checkpoint": {"memory": {"mirrors": 2}}}, "spec.checkpoint.memory.mirrors", "more than 1", id="mirrors"
        ),
        pytest.param({"trainer": {}}, "spec.trainer.command", "required", id="no-command"),
        pytest.param(
            {"trainer": {"command": ["x"], "numProcPerNode": "all"}},
            "spec.trainer.numProcPerNode",
            "auto",
            id="processes",
        ),
        pytest.param({"trainer": {"command": "x"}}, "spec.trainer.command", "list", id="command-text"),
        pytest.param(
            {"trainer": {"command": ["x"], "env": [{"name": "a b"}]}},
            "spec.trainer.env[0].name",
            "variable",
            id="env",
        ),
        pytest.param(
            {"failurePolicy": {"rules": [{"name": "x", "action": "FailJob", "onExitCodes": {"operator": "In"}}]}},
            "spec.failurePolicy.rules[0].onExitCodes.values",
            "required",
            id="rule",
        ),
    ],
)
def test_mistake_names_its_field(spec: dict[str, Any], field: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(**spec)
    assert caught.value.field == field
    assert hint in caught.value.reason


@pytest.mark.parametrize(
    ("words", "option", "instead"),
    [
        (["torchrun", "--nproc-per-node=2", "train.py"], "--nproc-per-node", "spec.trainer.numProcPerNode"),
        (["torchrun", "--nproc_per_node", "2", "train.py"], "--nproc_per_node", "spec.trainer.numProcPerNode"),
        (["torchrun", "--nproc", "2", "train.py"], "--nproc", "spec.trainer.numProcPerNode"),
        (["/opt/bin/torchrun", "--tee", "3", "--nnodes=2", "train.py"], "--nnodes", "spec.trainer.numNodes"),
        (["torchrun", "-t", "3", "-m", "--max-restarts", "3", "pkg"], "--max-restarts", "spec.failurePolicy.max"),
        (["torchrun", "--standalone", "train.py"], "--standalone", "leave it out"),
        (["torchrun", "--node_rank=0", "train.py"], "--node_rank", "leave it out"),
        (["torchrun", "--master-addr", "h", "train.py"], "--master-addr", "leave it out"),
        (["torchrun", "--master_port=1", "train.py"], "--master_port", "leave it out"),
        (["torchrun", "--rdzv-backend=c10d", "train.py"], "--rdzv-backend", "leave it out"),
        (["torchrun", "--rdzv_endpoint", "h:1", "train.py"], "--rdzv_endpoint", "leave it out"),
        (["python", "-m", "torch.distributed.run", "--nnodes", "2", "train.py"], "--nnodes", "numNodes"),
        (["python3.12", "-u", "-W", "error", "-m", "torch.distributed.run", "--rdzv-id", "x", "t.py"], "--rdzv-id", ""),
    ],
)
@pytest.mark.parametrize("split", [1, None])
def test_option_that_would_override_ours_is_refused_by_name(
    words: list[str], option: str, instead: str, split: int | None
) -> None:
    trainer = {"command": words[:split], "args": words[split:] if split else []}
    with pytest.raises(SpecError) as caught:
        parse(trainer=trainer)
    assert caught.value.field == ("spec.trainer.args" if split else "spec.trainer.command")
    assert caught.value.reason.startswith(f"{option} ")
    assert instead in caught.value.reason


@pytest.mark.parametrize(
    "words",
    [
        ["torchrun", "train.py", "--nnodes", "2"],
        ["torchrun", "--", "train.py", "--max-restarts", "2"],
        ["torchrun", "--tee", "3", "--log-dir=logs", "--role", "x", "-r3", "train.py", "--standalone"],
        ["torchrun", "--no-python", "--module", "pkg", "--rdzv-id", "x"],
        ["python", "train.py", "--nproc-per-node", "2"],
        ["python", "-m", "pkg.train", "--nnodes", "2"],
        ["deepspeed", "--master_port", "1", "train.py"],
    ],
)
def test_options_of_the_script_and_of_other_programs_are_their_own(words: list[str]) -> None:
    assert parse(trainer={"command": words}).spec.trainer.command == tuple(words)


def test_variable_that_would_override_ours_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"spec\.trainer\.env.*PET_NPROC_PER_NODE.*numProcPerNode"):
        parse(trainer={"command": ["torchrun", "t.py"], "env": [{"name": "PET_NPROC_PER_NODE", "value": "2"}]})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        pytest.param({"apiVersion": "stepfast.dev/v1"}, "apiVersion", id="version"),
        pytest.param({"kind": "TrainJob"}, "kind", id="kind"),
        pytest.param({"metadata": {}}, "metadata.name", id="no-name"),
        pytest.param({"metadata": {"name": "No_Good"}}, "metadata.name", id="bad-name"),
        pytest.param({"specs": {}}, "specs", id="unknown"),
        pytest.param({"spec": None}, "spec", id="no-spec"),
    ],
)
def test_mistake_around_the_spec_names_its_field(change: dict[str, Any], field: str) -> None:
    manifest = {
        "apiVersion": API_VERSION,
        "kind": "TrainingJob",
        "metadata": {"name": "x"},
        "spec": {},
        **change,
    }
    with pytest.raises(SpecError) as caught:
        parse_manifest(manifest, default_namespace="local")
    assert caught.value.field == field


def test_fields_for_a_cluster_are_named() -> None:
    job = parse(
        suspend=True,
        ttlSecondsAfterFinished=0,
        trainer={"command": ["x"], "image": "i", "resourcesPerNode": {}},
        failurePolicy={
            "rules": [
                {"name": "a", "action": "FailJob", "onExitCodes": {"operator": "In", "values": [1]}},
                {"name": "b", "action": "FailJob", "onReasons": ["OOMKilled"]},
                {"name": "c", "action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget"}]},
            ]
        },
        checkpoint={"maxStalenessSeconds": 5, "secretRef": {"name": "s"}},
    )
    assert set(job.cluster_only) == {
        "spec.suspend",
        "spec.ttlSecondsAfterFinished",
        "spec.checkpoint.secretRef",
        "spec.trainer.image",
        "spec.trainer.resourcesPerNode",
        "spec.failurePolicy.rules[1].onReasons",
        "spec.failurePolicy.rules[2].onPodConditions",
    }


def test_fields_that_ask_for_nothing_need_no_notice() -> None:
    assert parse(suspend=False, template={}, spot={}).cluster_only == ()


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1", 1),
        (200000000, 200000000),
        ("64Gi", 64 * 2**30),
        ("1.5Ki", 1536),
        ("2k", 2000),
        ("3M", 3 * 10**6),
        ("1E", 10**18),
    ],
)
def test_quantities_are_those_of_kubernetes(text: object, size_bytes: int) -> None:
    assert parse_quantity(text, "x") == size_bytes


@pytest.mark.parametrize("text", ["", "-1", "1m", "Gi", "1 Gi", True, None])
def test_what_is_no_quantity_is_refused(text: object) -> None:
    with pytest.raises(SpecError):
        parse_quantity(text, "x")


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("auto", Interval()),
        ("10s", Interval(seconds=10)),
        ("50steps", Interval(steps=50)),
        ({"steps": 3}, Interval(steps=3)),
    ],
)
def test_intervals_as_in_manifests_and_on_the_command_line(text: object, interval: Interval) -> None:
    assert parse_interval(text, "x") == interval


def test_settings_for_the_sdk() -> None:
    spec = parse(checkpoint={"interval": "50steps", "persistent": {"intervalSeconds": 1}}).spec
    assert json.loads(settings_text(spec, node=3, ranks_per_agent=4)) == {
        "persistIntervalSeconds": 1.0,
        "maxToKeep": 5,
        "onBusy": "Wait",
        "interval": {"steps": 50},
        "node": 3,
        "ranksPerAgent": 4,
        "plannedTime": 0.0,
        "interruptions": 0,
        "trainedSeconds": 0.0,
    }


@pytest.mark.parametrize(
    ("words", "script"),
    [
        (["torchrun", "train.py", "--nnodes"], "train.py"),
        (["torchrun", "--", "train.py", "x.py"], "train.py"),
        (["torchrun", "--tee", "3", "--log-dir=logs", "-r3", "train.py"], "train.py"),
        (["torchrun", "-m", "pkg"], None),
        (["torchrun", "--tee", "3"], None),
        (["torchrun", "--no-python", "echo"], None),
        (["python3", "-m", "torch.distributed.run", "train.py"], "train.py"),
        (["python", "-W", "error", "train.py"], "train.py"),
        (["python", "-m", "pkg"], None),
        (["./train.sh", "x.py"], None),
    ],
)
def test_script_is_found_in_the_command(words: list[str], script: str | None) -> None:
    assert script_of(words[:1], words[1:]) == script


def test_memory_policy_warns_unless_told_otherwise() -> None:
    policy = parse().spec.memory_policy
    assert (policy.action, policy.device_memory) == (MemoryAction.WARN, None)
    policy = parse(memoryPolicy={"action": "Refuse", "deviceMemory": "16Gi"}).spec.memory_policy
    assert (policy.action, policy.device_memory) == (MemoryAction.REFUSE, 16 << 30)
    with pytest.raises(
        SpecError, match=r"spec\.memoryPolicy\.action: 'Refused' is none of Warn, Refuse \(did you mean"
    ):
        parse(memoryPolicy={"action": "Refused"})
    with pytest.raises(SpecError, match=r"spec\.memoryPolicy\.deviceMemory: '16GB' is no size"):
        parse(memoryPolicy={"deviceMemory": "16GB"})
    with pytest.raises(SpecError, match=r"spec\.memoryPolicy\.deviceMemory: must be more than nothing"):
        parse(memoryPolicy={"deviceMemory": 0})


def test_prediction_is_taken_as_it_is_written() -> None:
    assert parse(metadata={"annotations": {ANNOTATION: "{not read here"}}).anatomy == "{not read here"
    assert parse(metadata={"annotations": {"other": "a"}}).anatomy is None
    assert parse(metadata={"annotations": None}).anatomy is None


@pytest.mark.parametrize("annotations", [["a"], {ANNOTATION: {"format": 1}}], ids=["a list", "an object"])
def test_annotation_that_the_api_server_would_refuse_is_refused_here_too(annotations: Any) -> None:
    with pytest.raises(SpecError, match=r"metadata\.annotations.*: expected"):
        parse(metadata={"annotations": annotations})
