"""`TrainingJob.status` as frozen values: the operator's whole memory. Pure; how it changes is in `status.py`.

Everything that a decision needs to survive a restart of the operator stands here. Times are seconds since
the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

MAX_RECOVERIES = 10
MAX_NODE_FAULTS = 50


class State(StrEnum):
    """What `kubectl get` shows."""

    PENDING = "Pending"
    SUSPENDED = "Suspended"
    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDING = "Suspending"
    COMPLETE = "Complete"
    FAILED = "Failed"


class FailedReason(StrEnum):
    """Why a job failed for good: the reasons of the terminal condition `Failed`."""

    MAX_RESTARTS_REACHED = "MaxRestartsReached"
    NO_PROGRESS = "NoProgress"
    FAILURE_POLICY = "FailurePolicy"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    STARTUP_DEADLINE_EXCEEDED = "StartupDeadlineExceeded"
    INVALID_SPEC = "InvalidSpec"
    CHECKPOINT_UNAVAILABLE = "CheckpointUnavailable"
    DOES_NOT_FIT_MEMORY = "DoesNotFitMemory"


class Cause(StrEnum):
    """Why an attempt ended."""

    RANK_FAILED = "RankFailed"  # a rank exited with an error or was killed
    WORKER_FAILED = "WorkerFailed"  # a node's torchrun ended without a rank to blame
    OOM_KILLED = "OOMKilled"  # a container went over its memory limit
    POD_DELETED = "PodDeleted"  # by somebody else than the operator
    POD_EVICTED = "PodEvicted"  # preempted, drained, evicted: condition DisruptionTarget
    NODE_LOST = "NodeLost"  # the pod's node is NotReady or gone, or was restarted
    EVICTION_NOTICE = "EvictionNotice"  # the cloud has announced that it takes a node away
    NODE_UNHEALTHY = "NodeUnhealthy"  # the node has a condition that a rule asks about
    RESIZED = "Resized"  # an elastic gang goes on with another number of nodes
    NODE_AVAILABLE = "NodeAvailable"  # a gang without a place may go to a node again that its pods keep off
    HANG_DETECTED = "HangDetected"
    SUPERVISOR_RESTARTED = "SupervisorRestarted"  # `stepfast run` itself was killed, its gang with it
    DEADLINE = "Deadline"
    SUSPENDED = "Suspended"


# Nothing has failed then: the gang is better launched anew.
NO_FAILURES = frozenset({Cause.RESIZED, Cause.NODE_AVAILABLE})


class Verdict(StrEnum):
    """What follows the end of an attempt."""

    RESTART = "Restart"
    RESTART_UNCOUNTED = "RestartUncounted"  # does not count towards maxRestarts
    FAIL = "Fail"
    SUSPEND = "Suspend"


class ConditionType(StrEnum):
    SUSPENDED = "Suspended"
    PODS_READY = "PodsReady"
    PROGRESSING = "Progressing"
    RESTARTING = "Restarting"
    CHECKPOINT_FRESH = "CheckpointFresh"
    FITS_MEMORY = "FitsMemory"
    NODES_EXCLUDED = "NodesExcluded"
    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    type: ConditionType
    status: str  # True | False | Unknown, as metav1
    reason: str
    message: str = ""
    last_transition_time: float = 0.0
    observed_generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    desired: int = 0
    ready: int = 0
    active: int = 0
    succeeded: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus:
    global_step: int | None = None
    progress_percentage: int | None = None  # of the steps that the script says it will make
    estimated_remaining_seconds: int | None = None
    steps_per_second: float | None = None
    metrics: tuple[Metric, ...] = ()
    last_updated_time: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavesStatus:
    """How often was saved and how long training stood still for it (seconds)."""

    count: int = 0
    stall_seconds_total: float = 0.0
    stall_seconds_mean: float = 0.0
    stall_seconds_max: float = 0.0
    stall_seconds_last: float = 0.0
    skipped: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStatus:
    latest_memory_step: int | None = None
    latest_persisted_step: int | None = None
    latest_persisted_time: float | None = None
    latest_persisted_uri: str | None = None
    size_bytes: int | None = None
    persist_lag_steps: int | None = None
    persist_lag_seconds: float | None = None
    persist_error: str | None = None
    storage_error: str | None = None  # why the committed steps cannot be read
    storage_error_time: float | None = None  # since when they cannot
    restored_step: int | None = None
    restored_tier: str | None = None
    pending_bytes: int = 0
    saves: SavesStatus = SavesStatus()
    earlier_saves: SavesStatus = SavesStatus()  # of the attempts before this one


@dataclass(frozen=True, slots=True, kw_only=True)
class LastFailure:
    attempt: int
    failure_time: float = field(metadata={"name": "time"})
    reason: Cause
    rule: str | None = None
    action: str | None = None
    pod: str | None = None
    node: str | None = None
    rank: int | None = None
    exit_code: int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One recovery, from the failure to the first new step. Times that are not known yet are None."""

    attempt: int  # that failed
    in_place_restart: int | None = None  # the attempt went on: torchrun started its ranks anew for the n-th time
    cause: Cause
    node: str | None = None
    rank: int | None = None
    counted: bool = True
    failure_time: float
    detected_time: float
    flushed_time: float | None = None
    launched_time: float | None = None
    pods_ready_time: float | None = None
    restored_time: float | None = None
    resumed_time: float | None = None
    restored_tier: str | None = None
    step_before: int | None = None
    resumed_from_step: int | None = None
    steps_lost: int | None = None
    duration_seconds: float | None = None

    def is_same(self, other: Recovery) -> bool:
        """Whether both tell of one recovery. Several may have failed at one time: that of a node that was lost."""
        return (self.attempt, self.in_place_restart) == (other.attempt, other.in_place_restart)

    def is_ended_by(self, attempt: Attempt) -> bool:
        """Whether this attempt, as it stands, is the one that the recovery leads to."""
        if self.in_place_restart is not None:
            return (attempt.attempt, attempt.in_place_restarts) == (self.attempt, self.in_place_restart)
        return attempt.attempt == self.attempt + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFault:
    """An attempt's end that speaks against the node that it happened on. `rule`: the one that excludes it for that."""

    node: str
    attempt: int
    fault_time: float = field(metadata={"name": "time"})
    reason: Cause
    rule: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedNode:
    """A node that the gang keeps off."""

    name: str
    reason: str
    since_time: float = field(metadata={"name": "since"})
    until_time: float = field(metadata={"name": "until"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SparedNode:
    """A node that it would keep off for that reason, if it were not for the limit."""

    name: str
    reason: str
    limit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Why a gang that lives is to save, to end and to be launched anew, and until when its save is waited for. `nodes`:
    how many the next one has; None: as many.
    """

    cause: Cause
    begin_time: float
    save_until_time: float
    nodes: int | None = None
    node: str | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One launch of the gang. `run` and `resume_step` are fixed before it is launched and never change."""

    attempt: int
    run: str
    resume_step: int  # 0: from scratch
    planned_time: float
    nodes: int = 0  # 0: not noted, by an operator that knew of no other number than `numNodes`
    shrinks: int = 0  # how often, one after another, there was no place for a whole gang
    shrunk_from: int = 0  # the nodes of the largest of these gangs
    step_before: int | None = None  # where training stood when it was planned
    step_seconds_before: float = 0.0  # how long a step took in the attempt before it
    launched_time: float | None = None  # when all pods of its gang were made
    in_place_restarts: int = 0  # the times below are those since the last of them
    restarted_time: float | None = None  # when the last of them was seen
    queued_time: float | None = None  # when its pods were seen to wait in a queue
    dequeued_time: float | None = None  # when they were seen to wait no more
    pods_ready_time: float | None = None
    restored_time: float | None = None  # when the last rank had restored
    restored_step: int | None = None  # that the ranks really restored; 0: none; None: not known yet
    first_step: int | None = None  # the first new step that was seen
    first_step_time: float | None = None
    newest_step: int | None = None  # highest step that any rank reported
    newest_step_time: float | None = None
    steady_step: int | None = None  # the highest step that every rank has reached
    steady_step_time: float | None = None
    hang_notified_time: float | None = None
    suspending_time: float | None = None
    leaving: Leaving | None = None
    stopping_time: float | None = None
    succeeded_time: float | None = None
    flush_asked_time: float | None = None
    parts_written_time: float | None = None  # when no agent had bytes of it left to persist, at most steps to commit
    ended_time: float | None = None  # None: open
    flushed_time: float | None = None  # when nothing more of it was waited for
    flush_timed_out: bool = False
    verdict: Verdict | None = None
    fail_reason: FailedReason | None = None
    fail_message: str = ""

    @property
    def start_step(self) -> int:
        """The step that training went on from: the planned one until it is known what was restored."""
        return self.resume_step if self.restored_step is None else self.restored_step

    @property
    def reached_step(self) -> int:
        """Where training stands."""
        if self.newest_step is not None:
            return self.newest_step
        is_unknown = self.restored_step is None and self.in_place_restarts > 0
        return (self.step_before or 0) if is_unknown else self.start_step

    @property
    def went_back(self) -> bool:
        """Whether the ranks could not restore the planned step, and restored an older one."""
        return self.restored_time is not None and self.start_step < self.resume_step

    @property
    def steps_lost(self) -> int:
        """How far training went back when this attempt began."""
        return max(0, (self.step_before or 0) - self.start_step)

    @property
    def trained_seconds(self) -> float:
        """How long it made steps: from when it was restored to its newest step."""
        ready = self.restored_time if self.restored_time is not None else self.pods_ready_time
        # An agent that is busy hears of a restore late, and of a step with the time when it was made.
        begin = min((time for time in (ready, self.first_step_time) if time is not None), default=None)
        if begin is None or self.newest_step_time is None:
            return 0.0
        return max(0.0, self.newest_step_time - begin)

    @property
    def step_seconds(self) -> float:
        """How long a step took on average; 0 while nothing tells."""
        steps = (self.newest_step or 0) - self.start_step
        return self.trained_seconds / steps if steps > 0 else 0.0

    @property
    def is_queued(self) -> bool:
        """Whether the gang was seen to wait in a queue, and not yet to wait no more."""
        return self.queued_time is not None and self.dequeued_time is None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRequest:
    """A step that was asked for, and by which command; None: by the manifest."""

    step: int
    command: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    observed_generation: int | None = None  # of the spec that this status follows from; None on one machine
    state: State = State.PENDING
    attempt: int = 0
    restarts: int = 0
    restarts_count_towards_max: int = 0
    restarts_without_progress: int = 0
    terminal_state: str | None = None  # Complete | Failed
    start_time: float | None = None  # of this stretch: begins again when a suspended job resumes
    earlier_seconds: float = 0.0  # length of the stretches before this one
    queued_seconds: float = 0.0  # of this stretch, that gangs which were admitted then had waited in a queue
    completion_time: float | None = None
    nodes: Nodes = Nodes()
    trainer_status: TrainerStatus = TrainerStatus()
    checkpoint: CheckpointStatus = CheckpointStatus()
    last_failure: LastFailure | None = None
    recoveries: tuple[Recovery, ...] = ()
    node_faults: tuple[NodeFault, ...] = ()  # within nodeExclusionPolicy.ttlSeconds, oldest first
    excluded_nodes: tuple[ExcludedNode, ...] = ()  # as of the newest attempt, oldest first
    spared_nodes: tuple[SparedNode, ...] = ()
    steps_lost: int = 0
    interruptions: int = 0  # of training: restarts of the gang, and those in place
    trained_seconds: float = 0.0  # of attempts that ended, also the steps that were lost
    productive_seconds: float = 0.0  # of attempts that ended, without the steps that were lost
    goodput_ratio: float | None = None
    progress_step: int | None = None  # highest committed step when the last attempt was planned
    resume_request: ResumeRequest | None = None  # that was honoured
    current: Attempt | None = None
    conditions: tuple[Condition, ...] = ()

    @property
    def is_terminal(self) -> bool:
        return self.terminal_state is not None

    @property
    def open_attempt(self) -> Attempt | None:
        """The attempt whose gang runs or is about to; None between attempts."""
        return self.current if self.current is not None and self.current.ended_time is None else None

    @property
    def is_queued(self) -> bool:
        """Whether the gang waits in a queue to be admitted."""
        return self.open_attempt is not None and self.open_attempt.is_queued

    @property
    def is_up_without_ranks(self) -> bool:
        """Whether the current attempt is taken to be up though its ranks were never all here: its script seems not to
        use the SDK. Once suspended it is what it was before.
        """
        current = self.current
        if current is None or current.pods_ready_time is not None or current.in_place_restarts > 0:
            return False
        was_ready = self.condition(ConditionType.PODS_READY)
        is_suspending = self.state is State.SUSPENDING and was_ready is not None and was_ready.status == "True"
        return self.state is State.RUNNING or is_suspending

    @property
    def is_gang_up(self) -> bool:
        """Whether all ranks of the current attempt have joined, or it is taken to be up without them."""
        is_ready = self.current is not None and self.current.pods_ready_time is not None
        return is_ready or self.is_up_without_ranks

    def condition(self, kind: ConditionType) -> Condition | None:
        return next((condition for condition in self.conditions if condition.type is kind), None)
