"""What a decision sees of a pod, a node and a node's report: trimmed out of the API's JSON. Pure.

What is looked at here has to be among what is read (podfields.py).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from stepfast.errors import SpecError
from stepfast.nodestatus import EvictionNotice, JobStatus, NodeStatus, by_another_clock, from_document
from stepfast.step import JobKey
from stepfast_operator import labels
from stepfast_operator.document import JSON
from stepfast_operator.groupmember import GroupMember, member_of
from stepfast_operator.observed import NodeCondition
from stepfast_operator.quantities import parse_quantity

_SAME_CLOCK_SECONDS = 10.0  # a request that is slow looks like a clock that is behind
_TERMINAL = frozenset({"Succeeded", "Failed"})
_SCHEDULED = "PodScheduled"
_UNSCHEDULABLE = "node.kubernetes.io/unschedulable"  # the taint that its controller adds to a cordoned node, later


@dataclass(frozen=True, slots=True, kw_only=True)
class Termination:
    """How the trainer's container ended. `message` is what its launcher wrote, or the last lines of its log."""

    exit_code: int
    reason: str
    message: str
    finished_time: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """A pod of a gang, or a spare, which is no attempt's. Times are seconds since the epoch; the API server gives whole
    ones.
    """

    namespace: str
    name: str
    uid: str
    job: str
    job_uid: str
    run: str
    attempt: int
    index: int
    node: str | None
    phase: str
    reason: str
    message: str
    conditions: tuple[tuple[str, str, str, str], ...]  # type, status, reason, message
    created_time: float
    deleted_time: float | None  # when somebody asked for its end
    waiting: str  # why its container has not started
    termination: Termination | None
    running_since: float | None = None  # when the trainer's container began to run, if it does
    other_failure: str = ""  # how a container beside the trainer's failed, or one before it
    clock_ahead_seconds: float = 0.0  # of its node, as in NodeReport
    is_gated: bool = False  # somebody keeps it from the scheduler
    is_spare: bool = False  # `index` is its number then
    placed_time: float | None = None  # when the scheduler found a node for it
    member: GroupMember | None = None  # of a group of Kueue's
    avoided_nodes: tuple[str, ...] = ()  # that it was made to keep off

    @property
    def key(self) -> tuple[str, str]:
        return (self.namespace, self.name)

    @property
    def has_ended(self) -> bool:
        """Whether its phase says so."""
        return self.phase in _TERMINAL

    @property
    def is_alive(self) -> bool:
        """Whether its container may still run, or may be started. A pod that is deleted never gets a node: its record
        is there only because somebody's finalizer keeps it.
        """
        return not self.has_ended and (self.deleted_time is None or self.node is not None)

    def condition(self, kind: str) -> tuple[str, str, str, str] | None:
        return next((condition for condition in self.conditions if condition[0] == kind), None)

    def has_condition(self, kind: str) -> bool:
        found = self.condition(kind)
        return found is not None and found[1] == "True"

    @property
    def is_unschedulable(self) -> bool:
        """Whether the scheduler has looked for a node for it, and has found none."""
        found = self.condition(_SCHEDULED)
        return self.node is None and found is not None and (found[1], found[2]) == ("False", "Unschedulable")


@dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """What keeps pods off a node that do not tolerate it."""

    key: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node. `not_ready_time` is since when it is not Ready; None while it is. `is_silent`: its kubelet has said
    nothing since then, rather than that it is not. `allocatable_bytes`: of its memory. `gpus`: how many
    `nvidia.com/gpu` pods may have of it (0 where it says nothing). `taints`: of one that is cordoned that, too.
    `conditions`: all others.
    """

    name: str
    not_ready_time: float | None
    is_silent: bool = False
    ready_message: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    allocatable_bytes: int | None = None
    gpus: int = 0
    taints: tuple[Taint, ...] = ()
    conditions: tuple[NodeCondition, ...] = ()

    def conditions_in(self, wanted: Container[tuple[str, str]]) -> tuple[NodeCondition, ...]:
        """Those of its conditions whose type and status are among these."""
        return tuple(condition for condition in self.conditions if (condition.type, condition.status) in wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What a node's agent reports, and which generation of the operator's requests that takes in. `memory_limit_bytes`:
    what it may take for slots; None while it does not say. `notice`: that the cloud is about to take the node away.
    `gangs`: what it was told of those that mirror their steps; `mirror_address`: where other agents reach it, if it
    takes part in that. Times are by the API server's clock; `clock_ahead_seconds`: how far the node's is ahead of it
    (negative: behind). `progress_seconds`: how long it may keep a step to itself.
    """

    node: str
    uid: str
    generation: int
    observed_generation: int
    requests: tuple[Mapping[str, str], ...]
    jobs: Sequence[JobStatus]
    memory_limit_bytes: int | None = None
    notice: EvictionNotice | None = None
    gangs: tuple[Mapping[str, JSON], ...] = ()
    mirror_address: str | None = None
    clock_ahead_seconds: float = 0.0
    progress_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentView:
    """A node's agent, as its pod."""

    pod: str
    node: str | None
    is_ready: bool


def pod_of(pod: JSON) -> PodView | None:
    """None for a pod that is no gang's: one that its job does not control has its labels from somebody else."""
    metadata = pod["metadata"]
    marks, notes = metadata.get("labels") or {}, metadata.get("annotations") or {}
    status = pod.get("status") or {}
    is_spare = labels.SPARE in marks
    try:
        job, job_uid = marks[labels.JOB], marks[labels.JOB_UID]
        attempt, run = (0, "") if is_spare else (int(marks[labels.ATTEMPT]), notes[labels.RUN])
        index = int(marks[labels.SPARE if is_spare else labels.NODE_INDEX])
    except (KeyError, ValueError):
        return None
    if not _is_controlled(metadata, job_uid):
        return None
    containers, before = status.get("containerStatuses") or (), status.get("initContainerStatuses") or ()
    ours: JSON = next((one for one in containers if one["name"] == labels.CONTAINER), {})
    others = [*before, *(one for one in containers if one is not ours)]
    state = ours.get("state") or {}
    return PodView(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        job=job,
        job_uid=job_uid,
        run=run,
        attempt=attempt,
        index=index,
        node=(pod.get("spec") or {}).get("nodeName"),
        is_gated=bool((pod.get("spec") or {}).get("schedulingGates")),
        is_spare=is_spare,
        placed_time=_placed_time(status),
        member=member_of(metadata),
        avoided_nodes=tuple(filter(None, str(notes.get(labels.AVOIDED_NODES) or "").split(","))),
        phase=status.get("phase") or "Pending",
        reason=status.get("reason") or "",
        message=status.get("message") or "",
        conditions=_conditions(status),
        created_time=_time(metadata.get("creationTimestamp")) or 0.0,
        deleted_time=_deleted_time(metadata),
        waiting=_waiting_before(before) or _waiting(state),
        termination=_termination(state.get("terminated")),
        running_since=_time((state.get("running") or {}).get("startedAt")),
        other_failure=next(filter(None, map(_failed, others)), ""),
    )


def node_of(node: JSON) -> NodeView:
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready: Mapping[str, str] = next((one for one in conditions if one["type"] == "Ready"), {})
    is_ready = ready.get("status") == "True"
    return NodeView(
        name=node["metadata"]["name"],
        not_ready_time=None if is_ready else _time(ready.get("lastTransitionTime")) or 0.0,
        is_silent=ready.get("status") == "Unknown",
        labels=node["metadata"].get("labels") or {},
        allocatable_bytes=_allocatable(node, "memory"),
        gpus=_allocatable(node, "nvidia.com/gpu") or 0,
        taints=_taints(node.get("spec") or {}),
        conditions=tuple(_node_condition(one) for one in conditions if one["type"] != "Ready"),
        ready_message="" if is_ready else f"{ready.get('reason', 'NotReady')}: {ready.get('message', '')}".rstrip(": "),
    )


def _node_condition(condition: JSON) -> NodeCondition:
    said = (condition.get("reason") or "", condition.get("message") or "")
    return NodeCondition(
        type=condition["type"],
        status=condition["status"],
        since=_time(condition.get("lastTransitionTime")) or 0.0,
        message=": ".join(filter(None, said)),
    )


def _taints(spec: JSON) -> tuple[Taint, ...]:
    told = [
        Taint(key=one["key"], value=one.get("value") or "", effect=one["effect"]) for one in spec.get("taints") or ()
    ]
    if spec.get("unschedulable"):
        told.append(Taint(key=_UNSCHEDULABLE, value="", effect="NoSchedule"))
    return tuple(told)


def _allocatable(node: JSON, resource: str) -> int | None:
    amount = ((node.get("status") or {}).get("allocatable") or {}).get(resource)
    try:
        return None if amount is None else parse_quantity(amount, f"status.allocatable.{resource}")
    except SpecError:
        return None  # in thousandths, say: nobody says it


def report_of(document: JSON) -> NodeReport:
    """A CheckpointNode; one whose status does not make sense reports nothing."""
    metadata, spec, status = document["metadata"], document.get("spec") or {}, document.get("status") or {}
    try:
        told = from_document({"node": metadata["name"], "memory": {"limitBytes": 0, "usedBytes": 0}, **status})
        ahead = _clock_ahead_seconds(told, metadata)
        told = by_another_clock(told, ahead) if ahead else told
    except (KeyError, TypeError, ValueError, SpecError):
        told, ahead = NodeStatus(node=metadata["name"], memory_limit_bytes=0, memory_used_bytes=0, jobs=()), 0.0
    return NodeReport(
        node=metadata["name"],
        uid=str(metadata["uid"]),
        generation=int(metadata.get("generation") or 0),
        observed_generation=int(status.get("observedGeneration") or 0),
        requests=tuple(dict(request) for request in spec.get("requests") or ()),
        jobs=told.jobs,
        memory_limit_bytes=told.memory_limit_bytes or None,
        notice=told.notice,
        gangs=tuple(dict(gang) for gang in spec.get("gangs") or ()),
        mirror_address=told.mirror_address,
        clock_ahead_seconds=ahead,
        progress_seconds=told.progress_seconds or 0.0,
    )


def _clock_ahead_seconds(told: NodeStatus, metadata: JSON) -> float:
    """By when the agent wrote its status and when the API server took it, in whole seconds. A small difference is taken
    for none.
    """
    taken = [one.get("time") for one in metadata.get("managedFields") or () if one.get("subresource") == "status"]
    times = [time for time in map(_time, taken) if time is not None]
    if told.written_time is None or not times:
        return 0.0
    ahead = float(round(told.written_time - max(times)))
    return ahead if abs(ahead) > _SAME_CLOCK_SECONDS else 0.0


def agent_of(pod: JSON) -> AgentView:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return AgentView(
        pod=pod["metadata"]["name"],
        node=(pod.get("spec") or {}).get("nodeName"),
        is_ready=any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
        and not pod["metadata"].get("deletionTimestamp"),
    )


def jobs_of(report: NodeReport) -> frozenset[JobKey]:
    return frozenset(status.job for status in report.jobs)


def _is_controlled(metadata: JSON, uid: str) -> bool:
    """Whether the TrainingJob of that uid is its controller."""
    group = f"{labels.PREFIX}/"
    return any(
        owner.get("controller") is True
        and owner.get("kind") == "TrainingJob"
        and str(owner.get("apiVersion")).startswith(group)
        and owner.get("uid") == uid
        for owner in metadata.get("ownerReferences") or ()
    )


def _conditions(status: JSON) -> tuple[tuple[str, str, str, str], ...]:
    return tuple(
        (one["type"], one["status"], one.get("reason") or "", one.get("message") or "")
        for one in status.get("conditions") or ()
    )


def _placed_time(status: JSON) -> float | None:
    conditions = status.get("conditions") or ()
    found = (one for one in conditions if (one["type"], one["status"]) == (_SCHEDULED, "True"))
    condition: JSON = next(found, {})
    return _time(condition.get("lastTransitionTime"))


def _waiting(state: JSON) -> str:
    waiting = state.get("waiting") or {}
    return f"{waiting.get('reason', '')}: {waiting.get('message', '')}".strip(": ")


def _waiting_before(containers: Sequence[JSON]) -> str:
    """Why a container that has to end, or to run, before the trainer's does not start."""
    found = ((one["name"], _waiting(one.get("state") or {})) for one in containers)
    # Those behind the one that is under way wait for their turn, and say no more than that.
    told = ((name, text) for name, text in found if text and text != "PodInitializing")
    return next((f"container {name}: {text}" for name, text in told), "")


def _failed(container: JSON) -> str:
    """How it failed; empty for one that did not."""
    ended = _termination((container.get("state") or {}).get("terminated"))
    if ended is None or ended.exit_code == 0:
        return ""
    text = f"container {container['name']} ended with exit code {ended.exit_code} ({ended.reason})"
    return f"{text}: {ended.message.strip()}" if ended.message.strip() else text


def _termination(terminated: JSON) -> Termination | None:
    if not terminated:
        return None
    return Termination(
        exit_code=int(terminated.get("exitCode") or 0),
        reason=terminated.get("reason") or "",
        message=terminated.get("message") or "",
        finished_time=_time(terminated.get("finishedAt")),
    )


def _deleted_time(metadata: JSON) -> float | None:
    """The API gives the end of the grace period; the request came before it."""
    end = _time(metadata.get("deletionTimestamp"))
    return None if end is None else end - float(metadata.get("deletionGracePeriodSeconds") or 0)


def _time(text: str | None) -> float | None:
    return None if not text else datetime.fromisoformat(text).timestamp()
