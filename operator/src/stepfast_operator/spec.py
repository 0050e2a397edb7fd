"""The TrainingJob manifest as frozen values, checked. Pure; past this module no `Any`.

Fields of the API whose behaviour needs a cluster are accepted, so that one manifest runs in both places, and
named in `cluster_only` for a notice; anything else that is unknown is refused with its path and the nearest
known name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from stepfast.errors import SpecError
from stepfast.layout import CHUNK_BYTES
from stepfast.slot import CONTROL_BYTES
from stepfast.step import JobKey, OnBusy
from stepfast_operator.document import JSON, decode
from stepfast_operator.torchrunoptions import check_command, check_environment

API_VERSION = "stepfast.dev/v1alpha1"
KIND = "TrainingJob"

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([KMGTPE]i|[kMGTPE]|m|)")
_FACTORS = {"": 1, "k": 10**3, **{unit: 10 ** (3 * power) for power, unit in enumerate("MGTPE", 2)}}
_FACTORS |= {f"{unit}i": 2 ** (10 * power) for power, unit in enumerate("KMGTPE", 1)}
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_CLUSTER_ONLY = frozenset(
    {"managedBy", "ttlSecondsAfterFinished", "elasticPolicy", "template", "podGroupPolicy", "spot",
     "nodeExclusionPolicy", "suspend"}
)  # fmt: skip
_CLUSTER_ONLY_INNER = {
    "trainer": frozenset({"image", "resourcesPerNode"}),
    "failurePolicy": frozenset({"restartStrategy", "maxInPlaceRestarts", "podDeletionGraceSeconds"}),
    "checkpoint": frozenset({"secretRef", "maxStalenessSeconds"}),
}


class RuleAction(StrEnum):
    """What a failure rule does."""

    FAIL_JOB = "FailJob"
    RESTART_JOB = "RestartJob"
    RESTART_IGNORING_MAX = "RestartJobAndIgnoreMaxRestarts"


class HangAction(StrEnum):
    """What happens when no step was made for `progressDeadlineSeconds`."""

    RESTART_JOB = "RestartJob"
    NOTIFY = "Notify"


class ResumePolicy(StrEnum):
    """Where attempts start. STEP: the first from `resumeFromStep`, later ones from the latest. NEVER: from
    scratch.
    """

    LATEST = "Latest"
    STEP = "Step"
    NEVER = "Never"


class ExitCodeOperator(StrEnum):
    IN = "In"
    NOT_IN = "NotIn"


def parse_quantity(value: JSON, path: str) -> int:
    """A Kubernetes quantity (`64Gi`, `500M`, `200000000`) in bytes. Raises SpecError."""
    match = _QUANTITY.fullmatch(str(value).strip()) if not isinstance(value, bool) else None
    if match is None or match.group(2) == "m":
        raise SpecError(path, f"{value!r} is no size: write bytes, or as in 64Gi or 500M")
    return int(float(match.group(1)) * _FACTORS[match.group(2)])


def check_memory(size_bytes: int, ranks: int, path: str) -> None:
    """Raises SpecError when so much memory is too little for that many ranks: each needs room for one chunk."""
    least = ranks * (CHUNK_BYTES + CONTROL_BYTES)
    if size_bytes < least:
        share = "a rank needs" if ranks == 1 else f"{ranks} ranks need"
        raise SpecError(path, f"{size_bytes} bytes are too little: {share} at least {least} ({-(-least // 2**20)}Mi)")


def parse_processes(value: JSON, path: str) -> int | None:
    """`auto` (None: one process per GPU, one without) or how many. Raises SpecError."""
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(path, f"{value!r} is neither auto nor a whole number of at least 1")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """How often to save: every so many steps or seconds, or (both None) as often as pays off."""

    steps: int | None = field(default=None, metadata={"least": 1})
    seconds: float | None = field(default=None, metadata={"least": 0.001})

    def to_document(self) -> str | dict[str, float]:
        """As in `checkpoint.interval` and STEPFAST_SETTINGS."""
        if self.steps is not None:
            return {"steps": self.steps}
        return {"seconds": self.seconds} if self.seconds is not None else "auto"


def parse_interval(value: JSON, path: str) -> Interval:
    """`auto`, `{steps: n}`, `{seconds: s}`, or as on the command line `10s`, `50steps`. Raises SpecError."""
    if value == "auto":
        return Interval()
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|steps)", value)
        if match is None:
            raise SpecError(path, f"{value!r} is none of auto, 10s, 50steps")
        number, unit = match.groups()
        value = {"seconds": float(number)} if unit == "s" else {"steps": int(float(number))}
    interval = decode(Interval, value, path)
    if (interval.steps is None) == (interval.seconds is None):
        raise SpecError(path, "needs exactly one of steps and seconds")
    return interval


def _strings(value: JSON, path: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str | int | float) for item in value):
        raise SpecError(path, f"expected a list of strings, not {value!r}")
    return tuple(str(item) for item in value)


def _env(value: JSON, path: str) -> tuple[tuple[str, str], ...]:
    """A container's `env`: a list of {name, value}."""
    if not isinstance(value, list | tuple):
        raise SpecError(path, f"expected a list of {{name, value}}, not {value!r}")
    pairs = []
    for index, item in enumerate(value):
        where = f"{path}[{index}]"
        if not isinstance(item, Mapping) or set(item) - {"name", "value"} or "name" not in item:
            raise SpecError(where, f"expected {{name, value}}, not {item!r}")
        name = str(item["name"])
        if not _ENV_NAME.fullmatch(name):
            raise SpecError(f"{where}.name", f"{name!r} is no environment variable's name")
        pairs.append((name, str(item.get("value", ""))))
    return tuple(pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    command: tuple[str, ...] = field(default=(), metadata={"parse": _strings})
    args: tuple[str, ...] = field(default=(), metadata={"parse": _strings})
    env: tuple[tuple[str, str], ...] = field(default=(), metadata={"parse": _env})
    working_dir: str | None = None
    num_nodes: int = field(default=1, metadata={"least": 1})
    num_proc_per_node: int | None = field(default=None, metadata={"parse": parse_processes})  # None: auto


@dataclass(frozen=True, slots=True, kw_only=True)
class OnExitCodes:
    operator: ExitCodeOperator
    values: tuple[int, ...]

    def matches(self, exit_code: int) -> bool:
        return (exit_code in self.values) == (self.operator is ExitCodeOperator.IN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    name: str
    action: RuleAction
    on_exit_codes: OnExitCodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    base_seconds: float = field(default=1.0, metadata={"least": 0})
    max_seconds: float = field(default=300.0, metadata={"least": 0})


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    max_restarts: int = field(default=10, metadata={"least": 0})
    max_restarts_without_progress: int = field(default=3, metadata={"least": 0})
    backoff: Backoff = Backoff()
    flush_timeout_seconds: float = field(default=120.0, metadata={"least": 0})
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressPolicy:
    progress_deadline_seconds: float = field(default=600.0, metadata={"least": 0.001})
    action: HangAction = HangAction.RESTART_JOB


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    size_limit: int | None = field(default=None, metadata={"parse": parse_quantity})
    on_busy: OnBusy = OnBusy.WAIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Persistent:
    interval_seconds: float = field(default=2.0, metadata={"least": 0})
    max_to_keep: int = field(default=5, metadata={"least": 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    storage_uri: str | None = None
    resume_policy: ResumePolicy = ResumePolicy.LATEST
    resume_from_step: int | None = field(default=None, metadata={"least": 0})
    interval: Interval = field(default=Interval(), metadata={"parse": parse_interval})
    memory: Memory = Memory()
    persistent: Persistent = Persistent()
    graceful_suspend_seconds: float = field(default=60.0, metadata={"least": 0})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """`TrainingJob.spec`, as far as one machine needs it."""

    trainer: Trainer
    active_deadline_seconds: float | None = field(default=None, metadata={"least": 0})
    startup_deadline_seconds: float = field(default=900.0, metadata={"least": 0})
    failure_policy: FailurePolicy = FailurePolicy()
    progress_policy: ProgressPolicy = ProgressPolicy()
    checkpoint: Checkpoint = Checkpoint()

    def __post_init__(self) -> None:
        if not self.trainer.command and not self.trainer.args:
            raise SpecError("spec.trainer.command", "is required: what the gang runs, as in [torchrun, train.py]")
        check_command(self.trainer.command, self.trainer.args)
        check_environment(self.trainer.env)
        checkpoint = self.checkpoint
        if checkpoint.memory.size_limit is not None:
            ranks = self.trainer.num_proc_per_node or 1
            check_memory(checkpoint.memory.size_limit, ranks, "spec.checkpoint.memory.sizeLimit")
        if (checkpoint.resume_policy is ResumePolicy.STEP) != (checkpoint.resume_from_step is not None):
            raise SpecError(
                "spec.checkpoint.resumeFromStep",
                "goes with resumePolicy: Step, and resumePolicy: Step with it; on the command line "
                "--resume-from-step says both",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    job: JobKey
    spec: TrainingSpec
    command: str | None = None  # names the command that asks for `resumeFromStep`; None when the manifest does
    cluster_only: tuple[str, ...] = ()  # paths of fields that have no meaning on one machine


def parse_manifest(document: JSON, *, default_namespace: str) -> TrainingJob:
    """Reads a manifest (what YAML or JSON gave). Raises SpecError naming the field."""
    if not isinstance(document, Mapping):
        raise SpecError("manifest", f"expected an object with kind: {KIND}")
    for key, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        if document.get(key) != expected:
            raise SpecError(key, f"expected {expected}, not {document.get(key)!r}")
    for key in document:
        if key not in ("apiVersion", "kind", "metadata", "spec", "status"):
            raise SpecError(str(key), "unknown field; known here: apiVersion, kind, metadata, spec")
    metadata = document.get("metadata")
    if not isinstance(metadata, Mapping) or not isinstance(metadata.get("name"), str):
        raise SpecError("metadata.name", "is required")
    job = JobKey(namespace=str(metadata.get("namespace") or default_namespace), name=metadata["name"])
    spec, cluster_only = _without_cluster_only(document.get("spec"))
    return TrainingJob(job=job, spec=decode(TrainingSpec, spec, "spec"), cluster_only=cluster_only)


def _without_cluster_only(spec: JSON) -> tuple[JSON, tuple[str, ...]]:
    if not isinstance(spec, Mapping):
        raise SpecError("spec", "is required")
    kept: dict[str, Any] = {}
    dropped = []
    for key, value in spec.items():
        if key in _CLUSTER_ONLY:
            dropped.append(f"spec.{key}")
            continue
        inner = _CLUSTER_ONLY_INNER.get(key, frozenset())
        if inner and isinstance(value, Mapping):
            dropped += [f"spec.{key}.{name}" for name in value if name in inner]
            value = {name: item for name, item in value.items() if name not in inner}  # noqa: PLW2901 - the rest of it
        kept[key] = value
    return kept, tuple(dropped)


def settings_text(spec: TrainingSpec, *, node: int, ranks_per_agent: int) -> str:
    """STEPFAST_SETTINGS: what of the spec the SDK acts on, as JSON. `node` is the index of the agent's node."""
    checkpoint = spec.checkpoint
    return json.dumps(
        {
            "persistIntervalSeconds": checkpoint.persistent.interval_seconds,
            "maxToKeep": checkpoint.persistent.max_to_keep,
            "onBusy": str(checkpoint.memory.on_busy),
            "interval": checkpoint.interval.to_document(),
            "node": node,
            "ranksPerAgent": ranks_per_agent,
        }
    )
