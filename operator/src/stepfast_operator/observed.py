"""Everything that a decision may depend on, the time included. Pure values; backends fill them in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from stepfast.nodestatus import EvictionNotice, JobStatus
from stepfast.step import JobKey, restarted_run, split_run
from stepfast_operator.record import Cause, Status
from stepfast_operator.spec import TrainingSpec

IDLE_SECONDS = 5.0


class WorkerPhase(StrEnum):
    """Where a node's share of the gang (a pod, a torchrun process) stands."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class AgentState(StrEnum):
    """The agents' state as far as this backend is in charge of them; ELSEWHERE when it is not."""

    READY = "Ready"
    STARTING = "Starting"
    GONE = "Gone"
    ELSEWHERE = "Elsewhere"


class Intent(StrEnum):
    """What the user wants of the job now."""

    RUN = "Run"
    SUSPEND = "Suspend"  # save, then stop in order
    STOP_NOW = "StopNow"  # stop at once; what is staged is still flushed


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What is known of the end of an attempt. `exit_code` is 128 + signal for a rank that a signal killed.

    `reason` is Kubernetes' own word, of the container or the pod (`OOMKilled`, `Evicted`), `pod_conditions` the pod's
    conditions as (type, status), `node_conditions` those of its node that some rule asks about.
    """

    cause: Cause
    time: float
    node: str | None = None
    rank: int | None = None
    exit_code: int | None = None
    message: str = ""
    pod: str | None = None
    reason: str | None = None
    pod_conditions: tuple[tuple[str, str], ...] = ()
    node_conditions: tuple[tuple[str, str], ...] = ()

    @property
    def is_vanished_pod(self) -> bool:
        """Whether it is a pod that is no more, whose end nobody saw: `time` is when it was missed."""
        return self.cause is Cause.POD_DELETED and self.pod is None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCondition:
    """A condition of a node that some rule of the job asks about, and that the node has. `since`: seconds since the
    epoch.
    """

    type: str
    status: str
    since: float
    message: str = ""

    def __str__(self) -> str:
        """`XIDErrors=True (XID 79 on GPU 3)`."""
        return f"{self.type}={self.status}" + (f" ({self.message})" if self.message else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A Ready node that the gang's pods may run on, by its labels and taints. `is_leaving`: the cloud is about to take
    it away.
    """

    name: str
    conditions: tuple[NodeCondition, ...] = ()
    is_leaving: bool = False

    @property
    def is_fit(self) -> bool:
        return not self.conditions and not self.is_leaving


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One node's share of the gang. `failure` may be there while the phase is still Running: a rank died
    already. `node` is where it runs, or the pod's name while it runs nowhere; `message` says why it is pending.
    `running_since` is when its launcher began to run, which the pull of an image may put off; None while it does not.
    `is_placed`: it has a node; `is_unschedulable`: the scheduler has found none for it. `avoided_nodes`: those that it
    may never go to.
    """

    index: int
    node: str
    phase: WorkerPhase
    failure: Failure | None = None
    pod: str | None = None
    message: str = ""
    running_since: float | None = None
    is_placed: bool = True
    is_unschedulable: bool = False
    node_conditions: tuple[NodeCondition, ...] = ()
    notice: EvictionNotice | None = None  # of its node
    avoided_nodes: tuple[str, ...] = ()

    @property
    def condition_pairs(self) -> tuple[tuple[str, str], ...]:
        return tuple((condition.type, condition.status) for condition in self.node_conditions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spare:
    """What waits for a place into which the gang may grow. `node`: where it has found one; `placed_time`: when (seconds
    since the epoch). `avoided_nodes`: those that it may never go to.
    """

    node: str | None = None
    placed_time: float | None = None
    avoided_nodes: tuple[str, ...] = ()

    def may_stay(self, avoided_nodes: Sequence[str]) -> bool:
        """Whether it serves where these nodes are kept off: it is on none of them, or waits and keeps off no others."""
        if self.node is not None:
            return self.node not in avoided_nodes
        return set(self.avoided_nodes) <= set(avoided_nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """The launched gang of one run; the backend reports it as long as anything of it is remembered."""

    run: str
    launched_time: float
    workers: Sequence[Worker]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadRank:
    """A rank whose connection to the agent ended without a goodbye and whose process is gone.

    `run` is the one that it joined: after an in-place restart not that of the attempt.
    """

    rank: int
    node: str
    ended_time: float
    run: str


def dead_ranks_of(node: str, reports: Iterable[JobStatus]) -> list[DeadRank]:
    """The ranks that a node's agent saw die: their connections ended without a goodbye."""
    return [
        DeadRank(rank=rank.rank, node=node, ended_time=rank.ended_time, run=report.run)
        for report in reports
        for rank in report.ranks
        if not rank.alive and not rank.clean and rank.ended_time is not None
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """One usable committed step in the storage."""

    step: int
    size_bytes: int
    committed_time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """What a node has (bytes; None: nobody says). `device_bytes`: each of its GPUs, or the most that a rank may get of
    one (`is_device_most`), as of a slice whose size nobody says; `device_name`: by which that is known, where nobody
    has measured it. `memory_bytes`: what pods may take. `slot_bytes`: what its agent may.
    """

    name: str
    device_bytes: int | None = None
    is_device_most: bool = False
    device_name: str = ""
    memory_bytes: int | None = None
    slot_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory that the gang is to find. `nodes`: those that it may run on. On one of them are `ranks` of the job's
    `world_size`, which share `gpus`; `limit_bytes` is what they may take together of its memory (None: all of it).
    `slice_bytes`: the most that a slice has, on whatever node, which the pods ask for by its MIG profile (None: they do
    not).
    """

    world_size: int = 1
    ranks: int = 1
    gpus: int = 0
    limit_bytes: int | None = None
    slice_bytes: int | None = None
    nodes: Sequence[NodeMemory] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """Who admits or schedules the gang as a whole. `message`: in whose words it waits, while it does; `refusal`: why
    nothing can be asked of him. `is_held`: he counts something of the job that will not run again, should the job rest.
    """

    is_waiting: bool = False
    message: str = ""
    refusal: str = ""
    is_held: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One look at the world. `now` is seconds since the epoch.

    `gang` is that of the current attempt, None when it was never launched. `live_runs` are the runs of this
    job that still have a living process or pod. `reports` are the agents' views of this job's runs, one for each node
    and run; those of nodes that are lost are left out: nobody waits for what they hold. `awaited_agents` names the
    nodes whose agents have yet to answer the last FlushRun or RequestSave: what they report is older than it.
    `dead_ranks` are dead beyond doubt; `untold_ranks` those whose pods may soon tell more than the agents have.
    `began_time` is when this operator (this `stepfast run`) began to look: what was due before it nobody could do.
    `command` names the command that asks for `resumeFromStep`, unlike any before it; None when the manifest does.
    `anatomy` is the prediction that the manifest carries, as it is written there; `room` what it is compared with,
    when `policies.memory.is_due`. `idle_seconds` is how often a gang is looked at in which nothing happens and for
    which nothing is due, `untold_seconds` how long an agent may keep a step of it to itself. `nodes` are those that the
    gang may run on; None on one machine, while a gang runs that is not to grow or has a place for all its pods, and
    where nothing depends on them.
    `committed` is None until a decision asked to read it; `storage_error` says in a line why reading failed, and
    `is_storage_forbidden` that waiting will not mend it. `generation` is the manifest's, None on one machine.
    """

    now: float
    job: JobKey
    uid: str
    spec: TrainingSpec
    status: Status
    intent: Intent = Intent.RUN
    idle_seconds: float = IDLE_SECONDS
    untold_seconds: float = 0.0
    gang: Gang | None = None
    live_runs: frozenset[str] = frozenset()
    agent: AgentState = AgentState.ELSEWHERE
    reports: Sequence[JobStatus] = ()
    awaited_agents: tuple[str, ...] = ()
    dead_ranks: Sequence[DeadRank] = ()
    untold_ranks: Sequence[DeadRank] = ()
    committed: Sequence[Committed] | None = None
    storage_error: str | None = None
    is_storage_forbidden: bool = False
    began_time: float = 0.0
    command: str | None = None
    storage_uri: str = ""
    generation: int | None = None
    anatomy: str | None = None
    room: Room = Room()
    nodes: Sequence[Candidate] | None = None
    spares: Sequence[Spare] = ()
    queue: QueueView = QueueView()

    @property
    def is_on_one_machine(self) -> bool:
        """Whether whoever wants the job has typed a command, and waits for it."""
        return self.generation is None

    def newest_run(self, run: str) -> str:
        """The run as its ranks call it now: after the newest in-place restart that an agent knows of."""
        return restarted_run(run, max((restarts for _, restarts in self._reports_and_restarts(run)), default=0))

    def reports_of(self, run: str) -> list[JobStatus]:
        """What the agents say of the run since its newest in-place restart."""
        newest = self.newest_run(run)
        return [report for report in self.reports if report.run == newest]

    def all_reports_of(self, run: str) -> list[JobStatus]:
        """What the agents say of the run and of all its in-place restarts."""
        return [report for report, _ in self._reports_and_restarts(run)]

    def _reports_and_restarts(self, run: str) -> list[tuple[JobStatus, int]]:
        split = ((report, split_run(report.run)) for report in self.reports)
        return [(report, restarts) for report, (base, restarts) in split if base == run]

    def has_pending(self, run: str) -> bool:
        """Whether the agents still have to persist or to commit something of the run.

        Bytes alone do not tell: a part that is written holds none, and is no step before its manifest is there (I1).
        """
        return any(report.pending_bytes > 0 or report.pending_steps for report in self.all_reports_of(run))

    def has_only_commits_left(self, run: str) -> bool:
        """Whether all that was staged is written, and nothing stands in the way of the manifests but parts that others
        may never have written: each agent has looked for them, and is not held up by the storage.
        """
        return all(
            not report.pending_bytes and not report.persist_error and _are_incomplete(report.pending_steps, report)
            for report in self.all_reports_of(run)
        )

    def is_rest_overtaken(self, run: str) -> bool:
        """Whether nothing is pending of the run but parts of steps behind what it has committed."""
        if not self.has_pending(run):
            return True
        reports = self.all_reports_of(run)
        settled = _settled_steps(reports)
        return self.has_only_commits_left(run) and all(
            step <= settled[report.run] for report in reports for step in report.pending_steps
        )

    def is_rest_hopeless(self, run: str) -> bool:
        """Whether no pending step is likely to become whole: all ranks are gone, and of each such step some node knows
        neither of its part nor of anything left to write it from.
        """
        launches: dict[str, list[JobStatus]] = {}
        for report in self.all_reports_of(run):
            launches.setdefault(report.run, []).append(report)
        return all(_is_hopeless(step, reports) for reports in launches.values() for step in pending_steps(reports))

    def has_all_committed(self, run: str) -> bool:
        """Whether the reports prove that nothing of the run is in memory alone, though no agent may have told of
        anything since: every rank had said goodbye, after which nobody saves, and what was held is committed.

        Without the goodbyes a report proves nothing: ranks save on, or are launched anew in place, and an agent that is
        gone tells of neither. Pending alone does not tell either: a step may be staged and not due.
        """
        newest = self.reports_of(run)
        ended = {rank.rank for report in newest for rank in report.ranks if rank.clean and not rank.alive}
        world_size = max((report.world_size for report in newest), default=0)
        if not 0 < world_size <= len(ended) or not self.is_rest_overtaken(run):
            return False
        reports = self.all_reports_of(run)
        settled = _settled_steps(reports)
        held = [report for report in reports if report.latest_memory_step is not None]
        return all((report.latest_memory_step or 0) <= settled[report.run] for report in held)


def _are_incomplete(steps: Iterable[int], report: JobStatus) -> bool:
    """Whether the agent, if it says so at all, has missed other parts of these steps."""
    return report.incomplete_steps is None or set(steps) <= set(report.incomplete_steps)


def pending_steps(reports: Iterable[JobStatus]) -> set[int]:
    """The steps that some of these agents still have to persist or to commit."""
    return {step for report in reports for step in report.pending_steps}


def _is_hopeless(step: int, reports: Sequence[JobStatus]) -> bool:
    """The step that some node of this launch waits for; a node that lists it no more has committed it, or has not got
    it.
    """
    ended = {rank.rank for report in reports for rank in report.ranks if not rank.alive}
    if len(ended) < max(report.world_size for report in reports):
        return False
    return any(step not in report.pending_steps and (report.latest_persisted_step or 0) < step for report in reports)


def _settled_steps(reports: Iterable[JobStatus]) -> dict[str, float]:
    """By launch, the step up to which nothing is missing from the storage that anybody would go on from: the newest
    committed one, or any (infinity) once a later launch, after an in-place restart, has committed some.
    """
    committed: dict[str, float] = {}
    for report in reports:
        known = report.latest_persisted_step
        committed[report.run] = max(-1 if known is None else known, committed.get(report.run, -1))
    last = max((split_run(run)[1] for run, step in committed.items() if step >= 0), default=0)
    return {run: math.inf if split_run(run)[1] < last else step for run, step in committed.items()}
