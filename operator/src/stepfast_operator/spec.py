"""The TrainingJob manifest as frozen values, checked. Pure; past this module no `Any`.

Fields whose behaviour needs a cluster are read everywhere, so that one manifest runs in both places, and named in
`cluster_only` for a notice where there is none; anything that is unknown is refused with its path and the nearest
known name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from stepfast.errors import SpecError
from stepfast.footprint import ANNOTATION
from stepfast.step import JobKey, OnBusy
from stepfast_operator.document import JSON, decode
from stepfast_operator.failurepolicy import FailurePolicy, NodeExclusionPolicy
from stepfast_operator.podtemplate import EnvVar, PodTemplate, parse_env, parse_resources
from stepfast_operator.quantities import check_memory, parse_processes, parse_quantity, parse_strings
from stepfast_operator.torchrunoptions import check_command, check_environment

API_VERSION = "stepfast.dev/v1alpha1"
KIND = "TrainingJob"
MANAGED_BY = "stepfast.dev/operator"

# Of the API, without a meaning on one machine.
_CLUSTER_ONLY = frozenset(
    {
        "managedBy",
        "ttlSecondsAfterFinished",
        "template",
        "elasticPolicy",
        "spot",
        "suspend",
        "nodeExclusionPolicy",
        "podGroupPolicy",
    }
)
_CLUSTER_ONLY_INNER = {
    "trainer": frozenset({"image", "resourcesPerNode"}),
    "failurePolicy": frozenset({"restartStrategy", "maxInPlaceRestarts", "podDeletionGraceSeconds"}),
    "checkpoint": frozenset({"secretRef"}),
}
_CLUSTER_ONLY_IN_RULES = frozenset({"onPodConditions", "onNodeConditions", "onReasons", "excludeNode"})


class HangAction(StrEnum):
    """What happens when no step was made for `progressDeadlineSeconds`."""

    RESTART_JOB = "RestartJob"
    NOTIFY = "Notify"


class MemoryAction(StrEnum):
    """What happens to a job that, by the prediction in its manifest, does not fit its memory."""

    WARN = "Warn"
    REFUSE = "Refuse"


class ResumePolicy(StrEnum):
    """Where attempts start. STEP: the first from `resumeFromStep`, later ones from the latest. NEVER: from
    scratch.
    """

    LATEST = "Latest"
    STEP = "Step"
    NEVER = "Never"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    image: str | None = None
    command: tuple[str, ...] = field(default=(), metadata={"parse": parse_strings})
    args: tuple[str, ...] = field(default=(), metadata={"parse": parse_strings})
    env: tuple[EnvVar, ...] = field(default=(), metadata={"parse": parse_env})
    working_dir: str | None = None
    num_nodes: int = field(default=1, metadata={"least": 1})
    num_proc_per_node: int | None = field(default=None, metadata={"parse": parse_processes})  # None: auto
    resources_per_node: Mapping[str, Mapping[str, str]] = field(
        default_factory=dict, metadata={"parse": parse_resources}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressPolicy:
    progress_deadline_seconds: float = field(default=600.0, metadata={"least": 0.001})
    action: HangAction = HangAction.RESTART_JOB


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPolicy:
    """`device_memory` (bytes): what a device has, where no node says it."""

    action: MemoryAction = MemoryAction.WARN
    device_memory: int | None = field(default=None, metadata={"parse": parse_quantity})

    def __post_init__(self) -> None:
        if self.device_memory == 0:
            raise SpecError("spec.memoryPolicy.deviceMemory", "must be more than nothing: leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    size_limit: int | None = field(default=None, metadata={"parse": parse_quantity})
    on_busy: OnBusy = OnBusy.WAIT
    mirrors: int = field(default=0, metadata={"least": 0})

    def __post_init__(self) -> None:
        if self.mirrors > 1:
            raise SpecError(
                "spec.checkpoint.memory.mirrors", f"{self.mirrors} is more than 1: one other node holds a step"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Persistent:
    interval_seconds: float = field(default=2.0, metadata={"least": 0})
    max_to_keep: int = field(default=5, metadata={"least": 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretRef:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    storage_uri: str | None = None
    secret_ref: SecretRef | None = None
    resume_policy: ResumePolicy = ResumePolicy.LATEST
    resume_from_step: int | None = field(default=None, metadata={"least": 0})
    interval: Interval = field(default=Interval(), metadata={"parse": parse_interval})
    memory: Memory = Memory()
    persistent: Persistent = Persistent()
    max_staleness_seconds: float | None = field(default=None, metadata={"least": 0.001})
    graceful_suspend_seconds: float = field(default=60.0, metadata={"least": 0})


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Whether the gang's pods may go to spot nodes, which the cloud takes back at will."""

    tolerate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KueueGroup:
    queue_name: str  # a LocalQueue in the job's namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class VolcanoGroup:
    queue: str = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoschedulingGroup:
    """`schedule_timeout_seconds`: how long pods hold their places until all have one; None: the scheduler's own."""

    schedule_timeout_seconds: int | None = field(default=None, metadata={"least": 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGroupPolicy:
    """Who admits or schedules the gang as a whole: exactly one of them."""

    kueue: KueueGroup | None = None
    volcano: VolcanoGroup | None = None
    coscheduling: CoschedulingGroup | None = None

    def __post_init__(self) -> None:
        if [self.kueue, self.volcano, self.coscheduling].count(None) != 2:
            raise SpecError("spec.podGroupPolicy", "needs exactly one of kueue, volcano and coscheduling")


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticPolicy:
    """How few and how many nodes the gang may have (`max_nodes` None: `numNodes`), and how long it waits for a place
    for all its pods before it goes on with fewer.
    """

    min_nodes: int = field(default=1, metadata={"least": 1})
    max_nodes: int | None = field(default=None, metadata={"least": 1})
    scale_down_timeout_seconds: float = field(default=300.0, metadata={"least": 0})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """`TrainingJob.spec`."""

    trainer: Trainer
    suspend: bool = False
    managed_by: str = MANAGED_BY
    ttl_seconds_after_finished: float | None = field(default=None, metadata={"least": 0})
    template: PodTemplate = field(default_factory=PodTemplate)
    pod_group_policy: PodGroupPolicy | None = None
    elastic_policy: ElasticPolicy | None = None
    spot: Spot = Spot()
    active_deadline_seconds: float | None = field(default=None, metadata={"least": 0})
    startup_deadline_seconds: float = field(default=900.0, metadata={"least": 0})
    failure_policy: FailurePolicy = field(default_factory=FailurePolicy)
    node_exclusion_policy: NodeExclusionPolicy = field(default_factory=NodeExclusionPolicy)
    progress_policy: ProgressPolicy = ProgressPolicy()
    memory_policy: MemoryPolicy = MemoryPolicy()
    checkpoint: Checkpoint = Checkpoint()

    def __post_init__(self) -> None:
        if not self.trainer.command and not self.trainer.args:
            raise SpecError("spec.trainer.command", "is required: what the gang runs, as in [torchrun, train.py]")
        check_command(self.trainer.command, self.trainer.args)
        check_environment([variable.name for variable in self.trainer.env])
        self._check_elastic()
        for index, rule in enumerate(self.failure_policy.rules):
            if rule.kinds != 1:
                path = f"spec.failurePolicy.rules[{index}]"
                raise SpecError(
                    path, "needs exactly one of onExitCodes, onPodConditions, onNodeConditions and onReasons"
                )
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
        if checkpoint.secret_ref is not None and checkpoint.resume_policy is not ResumePolicy.LATEST:
            raise SpecError(
                "spec.checkpoint.resumePolicy",
                "with secretRef attempts start from the newest committed step in that storage, which the operator "
                "cannot read: must be Latest",
            )

    @property
    def min_nodes(self) -> int:
        """How few nodes the gang may have."""
        return self.trainer.num_nodes if self.elastic_policy is None else self.elastic_policy.min_nodes

    @property
    def max_nodes(self) -> int:
        """How many it may have."""
        policy = self.elastic_policy
        return self.trainer.num_nodes if policy is None or policy.max_nodes is None else policy.max_nodes

    def _check_elastic(self) -> None:
        policy, path = self.elastic_policy, "spec.elasticPolicy"
        if policy is None:
            return
        if policy.min_nodes > self.max_nodes:
            most = "trainer.numNodes" if policy.max_nodes is None else "maxNodes"
            raise SpecError(f"{path}.minNodes", f"{policy.min_nodes} is more than {most}, {self.max_nodes}")
        if policy.scale_down_timeout_seconds >= self.startup_deadline_seconds:
            limit = f"{self.startup_deadline_seconds:g}"
            raise SpecError(
                f"{path}.scaleDownTimeoutSeconds",
                f"must be less than startupDeadlineSeconds, {limit}: the job has failed by then",
            )
        if self.pod_group_policy is not None:
            raise SpecError(path, "goes with no podGroupPolicy: a group of pods has a size that stays")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    job: JobKey
    spec: TrainingSpec
    anatomy: str | None = None  # the annotation with the prediction, as it is written
    command: str | None = None  # names the command that asks for `resumeFromStep`; None when the manifest does
    cluster_only: tuple[str, ...] = ()  # paths of fields that have no meaning on one machine


def parse_manifest(document: JSON, *, default_namespace: str, ignore_unknown: bool = False) -> TrainingJob:
    """Reads a manifest (what YAML or JSON gave). Raises SpecError naming the field. `ignore_unknown`: of its spec."""
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
    spec = document.get("spec")
    if not isinstance(spec, Mapping):
        raise SpecError("spec", "is required")
    return TrainingJob(
        job=job,
        spec=decode(TrainingSpec, spec, "spec", ignore_unknown=ignore_unknown),
        anatomy=_anatomy_of(metadata),
        cluster_only=_cluster_only(spec),
    )


def _anatomy_of(metadata: Mapping[str, JSON]) -> str | None:
    """The prediction that the manifest carries. Whether it makes sense is `policies.memory`'s to say: no job fails
    for its annotation.
    """
    annotations = metadata.get("annotations") or {}
    if not isinstance(annotations, Mapping):
        raise SpecError("metadata.annotations", f"expected an object, not {annotations!r}")
    text = annotations.get(ANNOTATION)
    if text is not None and not isinstance(text, str):
        raise SpecError(f"metadata.annotations[{ANNOTATION}]", f"expected text, not {text!r}")
    return text


def _cluster_only(spec: Mapping[str, JSON]) -> tuple[str, ...]:
    """The paths of what one machine leaves alone."""
    found = []
    for key, value in spec.items():
        if key in _CLUSTER_ONLY and value is not None and value is not False and value != {}:
            found.append(f"spec.{key}")
        inner = _CLUSTER_ONLY_INNER.get(key, frozenset())
        if isinstance(value, Mapping):
            found += [f"spec.{key}.{name}" for name in value if name in inner]
    for index, rule in enumerate((spec.get("failurePolicy") or {}).get("rules") or ()):
        given = [name for name, value in rule.items() if name in _CLUSTER_ONLY_IN_RULES and value]
        found += [f"spec.failurePolicy.rules[{index}].{name}" for name in given]
    return tuple(found)


def settings_text(
    spec: TrainingSpec,
    *,
    node: int,
    ranks_per_agent: int,
    planned_time: float = 0.0,
    interruptions: int = 0,
    trained_seconds: float = 0.0,
) -> str:
    """STEPFAST_SETTINGS: what of the spec and of the job's past the SDK acts on, as JSON. `node` is the index of the
    agent's node.
    """
    checkpoint = spec.checkpoint
    return json.dumps(
        {
            "persistIntervalSeconds": checkpoint.persistent.interval_seconds,
            "maxToKeep": checkpoint.persistent.max_to_keep,
            "onBusy": str(checkpoint.memory.on_busy),
            "interval": checkpoint.interval.to_document(),
            "node": node,
            "ranksPerAgent": ranks_per_agent,
            "plannedTime": planned_time,
            "interruptions": interruptions,
            "trainedSeconds": trained_seconds,
        }
    )
