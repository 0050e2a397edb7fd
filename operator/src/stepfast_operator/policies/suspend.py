"""How a gang that runs is suspended. Pure."""

from __future__ import annotations

from stepfast_operator.actions import BeginSuspend, Decision, EndAttempt, RequeueAfter, StopGang, StopMode
from stepfast_operator.observed import Failure, Intent, Observed
from stepfast_operator.policies.ending import end_in_order
from stepfast_operator.record import Attempt, Cause, Verdict


def suspend(observed: Observed, attempt: Attempt) -> Decision:
    """Save on request, wait until that is committed, ask the gang to end, and kill what does not."""
    if observed.intent is Intent.STOP_NOW:
        return stopped(observed, attempt, "stopped at once, as asked")
    if attempt.suspending_time is None:
        return Decision(actions=(BeginSuspend(), RequeueAfter(seconds=0)), why="asked to suspend")
    until = attempt.suspending_time + observed.spec.checkpoint.graceful_suspend_seconds
    return end_in_order(observed, attempt, lambda why: stopped(observed, attempt, why), save_until=until)


def stopped(observed: Observed, attempt: Attempt, why: str) -> Decision:
    """The attempt ends as asked, whatever of its gang still lives."""
    failure = Failure(cause=Cause.SUSPENDED, time=observed.now)
    # Killed before the end is recorded: a kill of the operator in between leaves a dead gang, whose end is
    # seen again.
    stop = StopGang(runs=(attempt.run,), mode=StopMode.KILL)
    end = EndAttempt(failure=failure, verdict=Verdict.SUSPEND)
    return Decision(actions=(stop, end, RequeueAfter(seconds=0)), why=why)
