"""How a gang that runs is suspended: a last save, then the end in order. Pure."""

from __future__ import annotations

from stepfast_operator.actions import (
    BeginStop,
    BeginSuspend,
    Decision,
    EndAttempt,
    RequestSave,
    RequeueAfter,
    StartAgent,
    StopGang,
    StopMode,
)
from stepfast_operator.observed import AgentState, Failure, Intent, Observed
from stepfast_operator.policies import deadline
from stepfast_operator.record import Attempt, Cause, Verdict

STOP_GRACE_SECONDS = 10.0
_SOON_SECONDS = 0.1


def suspend(observed: Observed, attempt: Attempt) -> Decision:
    """Save on request, wait until that is committed, ask the gang to end, and kill what does not."""
    if observed.intent is Intent.STOP_NOW:
        return stopped(observed, attempt, "stopped at once, as asked")
    if attempt.suspending_time is None:
        return Decision(actions=(BeginSuspend(), RequeueAfter(seconds=0)), why="asked to suspend")
    if attempt.stopping_time is not None:
        left = attempt.stopping_time + STOP_GRACE_SECONDS - observed.now
        if left <= 0:
            return stopped(observed, attempt, "the gang did not end when asked")
        return Decision(actions=(RequeueAfter(seconds=left),), why="the gang is ending")
    left = attempt.suspending_time + observed.spec.checkpoint.graceful_suspend_seconds - observed.now
    if left > 0 and not _is_final_saved(observed, attempt):
        again = RequeueAfter(seconds=min(left, 1.0))
        if observed.agent is AgentState.GONE:
            return Decision(actions=(StartAgent(), again), why="the agent is gone while the last save is awaited")
        return Decision(actions=(RequestSave(run=attempt.run), again), why="waiting for the last save to be committed")
    stop = StopGang(runs=(attempt.run,), mode=StopMode.TERMINATE)
    return Decision(actions=(stop, BeginStop(), RequeueAfter(seconds=_SOON_SECONDS)), why="the gang may end")


def stopped(observed: Observed, attempt: Attempt, why: str) -> Decision:
    """The attempt ends as asked, whatever of its gang still lives."""
    failure = Failure(cause=Cause.SUSPENDED, time=observed.now)
    # Killed before the end is recorded: a kill of the operator in between leaves a dead gang, whose end is
    # seen again.
    stop = StopGang(runs=(attempt.run,), mode=StopMode.KILL)
    end = EndAttempt(failure=failure, verdict=Verdict.SUSPEND)
    return Decision(actions=(stop, end, RequeueAfter(seconds=0)), why=why)


def _is_final_saved(observed: Observed, attempt: Attempt) -> bool:
    """Whether the save that was asked for is committed, or there is nobody to save."""
    if observed.agent in (AgentState.GONE, AgentState.STARTING):
        return False
    if _is_nobody_to_save(observed, attempt):
        return True
    reports = observed.reports_of(attempt.run)
    finals = [report.final_step for report in reports if report.final_step is not None]
    persisted = max((report.latest_persisted_step or 0 for report in reports), default=0)
    return bool(finals) and persisted >= max(finals)


def _is_nobody_to_save(observed: Observed, attempt: Attempt) -> bool:
    """Whether all ranks have ended, or never were all here and made no step.

    That no report tells of a living rank does not say so: an agent that was restarted knows none until they come back.
    """
    if any(rank.alive for report in observed.reports_of(attempt.run) for rank in report.ranks):
        return False
    if attempt.pods_ready_time is None and attempt.newest_step is None:
        return True
    known, world_size = deadline.joined_ranks(observed, attempt.run)
    return 0 < world_size <= known
