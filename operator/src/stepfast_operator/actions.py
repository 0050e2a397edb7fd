"""What a decision may ask for: a closed set. Effects change the world and may be applied twice; records
change the status alone (`status.py` folds them in). Pure values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from stepfast_operator.observed import Failure
from stepfast_operator.record import Cause, ExcludedNode, FailedReason, Leaving, ResumeRequest, SparedNode, Verdict


class StopMode(StrEnum):
    """TERMINATE asks (SIGTERM, pod deletion); KILL leaves no choice."""

    TERMINATE = "Terminate"
    KILL = "Kill"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchGang:
    """Start the gang of the attempt that the status already names, on so many nodes, on none of those to be avoided."""

    attempt: int
    run: str
    resume_step: int
    nodes: int
    planned_time: float = 0.0
    interruptions: int = 0  # what was seen of the job until it was planned
    trained_seconds: float = 0.0
    avoided_nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StopGang:
    """End every process of these runs."""

    runs: tuple[str, ...]
    mode: StopMode


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAgent:
    """Start the agent, which is gone; it adopts the memory that it finds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushRun:
    """Have the agents persist all they hold of the run, and of it after its in-place restarts."""

    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSave:
    """Have the gang, which an in-place restart may have renamed, save at its next agreed step and wait there."""

    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SupersedeAfter:
    """Roll the storage back to this step; -1 rolls everything back."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetSpares:
    """Have so many spares wait for places into which the gang may grow, on none of the nodes to be avoided."""

    count: int
    avoided_nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveQueue:
    """Tell whoever admits the gang that nothing of it will run again, so that others get its quota. `attempt`:
    the last one.
    """

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteJob:
    """Delete the job's object: it has been over for `ttlSecondsAfterFinished`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSteps:
    """Read the committed steps and decide again in the same pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAttempt:
    """Record: the next attempt, its run and the step it starts from, fixed from here on."""

    attempt: int
    run: str
    resume_step: int
    nodes: int
    shrinks: int
    shrunk_from: int
    progress_step: int | None  # what a later step must exceed to count as progress
    after: Cause | None  # None: the first attempt
    counted: bool
    without_progress: int
    resume_request: ResumeRequest | None = None  # that this attempt, or one before it, honours
    is_rolled_back: bool = False  # to the resume step
    excluded_nodes: tuple[ExcludedNode, ...] = ()
    spared_nodes: tuple[SparedNode, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAttempt:
    """Record: the attempt is over, why, and what follows. `excludes_node`: its rule keeps later ones off the node."""

    failure: Failure
    verdict: Verdict
    rule: str | None = None
    excludes_node: bool = False
    fail_reason: FailedReason | None = None
    fail_message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AmendFailure:
    """Record: the attempt that ended last ended for another reason than it seemed, and this follows."""

    failure: Failure
    verdict: Verdict
    rule: str | None = None
    excludes_node: bool = False
    fail_reason: FailedReason | None = None
    fail_message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginSuspend:
    """Record: the gang was asked to save and stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginLeave:
    """Record: the gang was asked to save and stop, to be launched anew."""

    leaving: Leaving


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginStop:
    """Record: the gang was asked to end; after a grace it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteSuccess:
    """Record: every worker has succeeded; what is staged is being flushed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteFlushAsked:
    """Record: the agents were asked to flush; what they report from here on is what is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotePartsWritten:
    """Record: every agent has persisted all its bytes; a step that is not committed soon will never be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetFlushAsked:
    """Record: the agent that was asked to flush is gone; the one after it is to be asked, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteFlushed:
    """Record: nothing more of the failed run is waited for."""

    timed_out: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteHang:
    """Record: no new step for too long, and the policy only wants it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkSuspended:
    """Record: stopped, to be resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkResumed:
    """Record: a suspended job goes on; what could not be flushed when it was suspended is to be flushed now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkComplete:
    """Record: terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkFailed:
    """Record: terminal."""

    reason: FailedReason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueAfter:
    """Look again after so many seconds at the latest."""

    seconds: float


Effect: TypeAlias = (
    LaunchGang | StopGang | StartAgent | FlushRun | RequestSave | SupersedeAfter | SetSpares | LeaveQueue | DeleteJob
)
Record: TypeAlias = (
    PlanAttempt
    | EndAttempt
    | AmendFailure
    | BeginSuspend
    | BeginLeave
    | BeginStop
    | NoteSuccess
    | NoteFlushAsked
    | NotePartsWritten
    | ForgetFlushAsked
    | NoteFlushed
    | NoteHang
    | MarkSuspended
    | MarkResumed
    | MarkComplete
    | MarkFailed
)
Action: TypeAlias = Effect | Record | ReadSteps | RequeueAfter


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do now, in order, and why."""

    actions: tuple[Action, ...]
    why: str

    @property
    def requeue_seconds(self) -> float | None:
        """How soon to look again even if nothing changes; None: only when something does."""
        waits = [action.seconds for action in self.actions if isinstance(action, RequeueAfter)]
        return min(waits, default=None)
