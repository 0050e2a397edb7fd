"""What to do next: `decide(observed)`, purely. Level-triggered: it knows nothing but what it is shown, so it
decides the same after a restart of the operator in the middle of anything.

Invariants owned here:
 I8 A terminal job is never run again; counters never reset by themselves.
 I9 At most one live gang per job: nothing is launched while any process or pod of any run of the job lives.

    no attempt, or ended ─► flush ─► budget, backoff ─► read steps ─► plan ─► launch ─► watch ─┐
             ▲                                                                                 │ failure,
             hang, deadline └────────────────────── end of the attempt, gang killed
             ◄─────────────────────────┘
"""

from __future__ import annotations

from stepfast.step import run_id
from stepfast_operator.actions import (
    Action,
    BeginStop,
    BeginSuspend,
    Decision,
    EndAttempt,
    FlushRun,
    ForgetFlushAsked,
    LaunchGang,
    MarkComplete,
    MarkFailed,
    MarkResumed,
    MarkSuspended,
    NoteFlushAsked,
    NoteFlushed,
    NoteHang,
    NoteSuccess,
    PlanAttempt,
    ReadSteps,
    RequestSave,
    RequeueAfter,
    StartAgent,
    StopGang,
    StopMode,
    SupersedeAfter,
)
from stepfast_operator.observed import AgentState, Failure, Intent, Observed, WorkerPhase
from stepfast_operator.policies import deadline, progress, restart, resume
from stepfast_operator.record import Attempt, Cause, FailedReason, State, Verdict
from stepfast_operator.spec import HangAction

STOP_GRACE_SECONDS = 10.0
AGENT_START_SECONDS = 15.0
_SOON_SECONDS = 0.1
_FLUSH_POLL_SECONDS = 0.25
# An agent that answers is asked what is left even when there is no time to wait for it; one that does not, no longer.
_ASK_SECONDS = 5.0
_STORAGE_RETRY_SECONDS = 2.0
_IDLE_SECONDS = 5.0


def decide(observed: Observed) -> Decision:
    """The actions that bring the job closer to what is wanted, and why. Records among them are folded into
    the status.
    """
    status = observed.status
    attempt = status.open_attempt
    stray = observed.live_runs - ({attempt.run} if attempt is not None and observed.gang is not None else set())
    if stray:
        stop = StopGang(runs=tuple(sorted(stray)), mode=StopMode.KILL)
        return _decision("processes of an earlier run still live", stop, RequeueAfter(seconds=_SOON_SECONDS))
    if status.is_terminal:
        return _decision(f"the job is {status.terminal_state}")
    if attempt is None:
        return _between(observed)
    if observed.gang is None:
        return _launch(observed, attempt)
    return _watch(observed, attempt)


def _decision(why: str, *actions: Action) -> Decision:
    return Decision(actions=actions, why=why)


def _between(observed: Observed) -> Decision:
    """No attempt is open and nothing of any run lives."""
    status, ended = observed.status, observed.status.current
    if status.state is State.SUSPENDED and observed.intent is Intent.RUN:
        return _decision("asked to go on", MarkResumed(), RequeueAfter(seconds=0))
    if ended is not None and ended.ended_time is not None and ended.flushed_time is None:
        waiting = _flush(observed, ended, ended.ended_time)
        if waiting is not None:
            return waiting
        left = observed.has_pending(ended.run) or observed.agent in (
            AgentState.GONE,
            AgentState.STARTING,
        )
        return _decision("the failed run is flushed", NoteFlushed(timed_out=left), RequeueAfter(seconds=0))
    if ended is not None and ended.verdict is Verdict.FAIL:
        reason = ended.fail_reason or FailedReason.FAILURE_POLICY
        return _decision("the attempt's end ends the job", MarkFailed(reason=reason, message=ended.fail_message))
    if observed.intent is not Intent.RUN:
        if status.state is State.SUSPENDED:
            return _decision("suspended")
        return _decision("the gang has stopped as asked", MarkSuspended())
    if deadline.is_active_exceeded(observed):
        return _decision("activeDeadlineSeconds are over", _deadline_failed(observed))
    if observed.storage_error is not None:
        return _without_storage(observed, observed.storage_error)
    if observed.committed is None:
        return _decision("the committed steps decide how to go on", ReadSteps())
    return _plan(observed)


def _deadline_failed(observed: Observed) -> MarkFailed:
    seconds = observed.spec.active_deadline_seconds or 0.0
    return MarkFailed(
        reason=FailedReason.DEADLINE_EXCEEDED, message=f"was active for {seconds:g} s (activeDeadlineSeconds)"
    )


def _without_storage(observed: Observed, error: str) -> Decision:
    status = observed.status
    if observed.is_storage_forbidden and status.attempt == 0:
        # Nothing was trained that waiting could save, and whoever can mend it has just typed the command.
        failed = MarkFailed(reason=FailedReason.CHECKPOINT_UNAVAILABLE, message=error)
        return _decision("the storage refuses", failed)
    ended = status.current.ended_time if status.current is not None else None
    since = ended if ended is not None else status.start_time
    if since is not None and observed.now - _since(observed, since) >= observed.spec.startup_deadline_seconds:
        failed = MarkFailed(reason=FailedReason.CHECKPOINT_UNAVAILABLE, message=error)
        return _decision("the storage did not answer until the start deadline", failed)
    return _decision(f"the storage does not answer: {error}", RequeueAfter(seconds=_STORAGE_RETRY_SECONDS))


def _plan(observed: Observed) -> Decision:
    """Fixes attempt, run and resume step, if the budget allows another attempt and the backoff is over."""
    status, ended = observed.status, observed.status.current
    cause = None if ended is None else _cause(observed)
    counted, without = False, status.restarts_without_progress
    if ended is not None and ended.ended_time is not None and cause is not None:
        policy = observed.spec.failure_policy
        steps = observed.committed or ()
        budget = restart.budget_of(policy, status, cause, steps[-1].step if steps else None)
        if budget.denied is not None:
            return _decision("the budget is spent", MarkFailed(reason=budget.denied, message=budget.message))
        backoff = (
            0.0 if cause in restart.UNCOUNTED else restart.backoff_seconds(policy.backoff, budget.without_progress)
        )
        wait = ended.ended_time + backoff - observed.now
        if wait > 0:
            return _decision("backing off", RequeueAfter(seconds=wait))
        counted, without = budget.counted, budget.without_progress
    start = resume.resume_of(observed)
    if start.unavailable is not None:
        failed = MarkFailed(reason=FailedReason.CHECKPOINT_UNAVAILABLE, message=start.unavailable)
        return _decision("there is nothing to start from", failed)
    number = status.attempt + 1
    plan = PlanAttempt(
        attempt=number,
        run=run_id(observed.uid, number),
        resume_step=start.step,
        progress_step=start.progress_step,
        after=cause,
        counted=counted,
        without_progress=without,
        resume_request=start.request,
        is_rolled_back=start.supersede_after is not None,
    )
    # Rolled back before the plan is written: a kill in between rolls back once more, which changes nothing.
    roll_back = () if start.supersede_after is None else (SupersedeAfter(step=start.supersede_after),)
    return _decision(f"attempt {number} starts from step {start.step}", *roll_back, plan, RequeueAfter(seconds=0))


def _cause(observed: Observed) -> Cause:
    """Why the attempt before this one ended."""
    status = observed.status
    current = status.current
    if current is None or current.verdict is Verdict.SUSPEND or status.state is State.PENDING:
        return Cause.SUSPENDED
    failure = status.last_failure
    return failure.reason if failure is not None and failure.attempt == current.attempt else Cause.SUSPENDED


def _flush(observed: Observed, attempt: Attempt, since: float) -> Decision | None:
    """What is to be done until nothing of the run is pending any more; None when that is so, or the time is
    up.
    """
    left = _since(observed, since) + observed.spec.failure_policy.flush_timeout_seconds - observed.now
    is_answering = observed.agent not in (AgentState.GONE, AgentState.STARTING)
    if left <= 0 and not (is_answering and attempt.flush_asked_time is None and left > -_ASK_SECONDS):
        return None
    wait = RequeueAfter(seconds=min(max(left, 0.0), _FLUSH_POLL_SECONDS))
    if not is_answering:
        # Whatever the one before it said of what is left: this one is asked anew.
        forget = () if attempt.flush_asked_time is None else (ForgetFlushAsked(),)
        if observed.agent is AgentState.STARTING:
            return _decision("the agent, which may hold staged steps, is starting", *forget, wait)
        return _decision("the agent is gone and may hold staged steps", StartAgent(), *forget, wait)
    if attempt.flush_asked_time is None:
        # Only what is reported after the request tells what is left: before it, staged steps need not be due.
        return _decision(
            "what is staged is flushed", FlushRun(run=attempt.run), NoteFlushAsked(), RequeueAfter(seconds=0)
        )
    if observed.has_pending(attempt.run):
        return _decision("what is staged is being persisted", FlushRun(run=attempt.run), wait)
    return None


def _since(observed: Observed, time: float) -> float:
    """That time, or when somebody began to look again: hours in which a job was suspended are no time to wait."""
    return max(time, observed.began_time, observed.status.start_time or 0.0)


def _launch(observed: Observed, attempt: Attempt) -> Decision:
    """An attempt is planned, and its gang was never launched."""
    if observed.intent is not Intent.RUN:
        failure = Failure(cause=Cause.SUSPENDED, time=observed.now)
        return _decision("stopped before the launch", EndAttempt(failure=failure, verdict=Verdict.SUSPEND))
    if resume.is_asked(observed):
        failure = Failure(cause=Cause.SUSPENDED, time=observed.now)
        end = EndAttempt(failure=failure, verdict=Verdict.SUSPEND)
        return _decision("another step is asked for since the attempt was planned", end, RequeueAfter(seconds=0))
    if deadline.is_active_exceeded(observed):
        return _decision("activeDeadlineSeconds are over", _deadline_failed(observed))
    wait = attempt.planned_time + AGENT_START_SECONDS - observed.now
    if wait > 0 and observed.agent is AgentState.GONE:
        return _decision("the agent comes first", StartAgent(), RequeueAfter(seconds=_SOON_SECONDS))
    if wait > 0 and observed.agent is AgentState.STARTING:
        return _decision("waiting for the agent", RequeueAfter(seconds=_SOON_SECONDS))
    launch = LaunchGang(attempt=attempt.attempt, run=attempt.run, resume_step=attempt.resume_step)
    return _decision(f"attempt {attempt.attempt} is due", launch, RequeueAfter(seconds=_SOON_SECONDS))


def _watch(observed: Observed, attempt: Attempt) -> Decision:
    """The attempt's gang was launched."""
    gang = observed.gang
    phases = {worker.phase for worker in gang.workers} if gang is not None else set()
    is_over = phases <= {WorkerPhase.SUCCEEDED, WorkerPhase.FAILED}
    if attempt.succeeded_time is not None and is_over:
        # Ranks that ended well without a goodbye look dead to the agent: that fails nobody who has succeeded.
        return _succeed(observed, attempt)
    failure = restart.failure_of(observed)
    # Once asked to, the gang saves and waits to be stopped: changing one's mind then means to resume it
    # afterwards.
    is_to_stop = observed.intent is not Intent.RUN or attempt.suspending_time is not None
    if is_to_stop and (failure is not None or (is_over and attempt.stopping_time is not None)):
        return _end(attempt, Failure(cause=Cause.SUSPENDED, time=observed.now), Verdict.SUSPEND, "stopped as asked")
    if failure is not None:
        return _fail(observed, attempt, failure)
    if is_over:
        return _succeed(observed, attempt)
    if is_to_stop:
        return _suspend(observed, attempt)
    return _check_deadlines(observed, attempt)


def _end(
    attempt: Attempt,
    failure: Failure,
    verdict: Verdict,
    why: str,
    *,
    rule: str | None = None,
    fail_reason: FailedReason | None = None,
    fail_message: str = "",
) -> Decision:
    end = EndAttempt(failure=failure, verdict=verdict, rule=rule, fail_reason=fail_reason, fail_message=fail_message)
    # Killed before the end is recorded: a kill of the operator in between leaves a dead gang, whose end is
    # seen again.
    stop = StopGang(runs=(attempt.run,), mode=StopMode.KILL)
    return _decision(why, stop, end, RequeueAfter(seconds=0))


def _fail(observed: Observed, attempt: Attempt, failure: Failure) -> Decision:
    judged = restart.judge(observed.spec.failure_policy, failure)
    fail_reason = FailedReason.FAILURE_POLICY if judged.verdict is Verdict.FAIL else None
    return _end(
        attempt,
        failure,
        judged.verdict,
        f"the attempt failed: {failure.cause}",
        rule=judged.rule,
        fail_reason=fail_reason,
        fail_message=judged.fail_message,
    )


def _succeed(observed: Observed, attempt: Attempt) -> Decision:
    if attempt.succeeded_time is None:
        return _decision("every worker succeeded", NoteSuccess(), RequeueAfter(seconds=0))
    waiting = _flush(observed, attempt, attempt.succeeded_time)
    if waiting is not None:
        return waiting
    if not _may_hold_more(observed, attempt):
        return _decision("every worker succeeded, nothing is pending", MarkComplete())
    failed = MarkFailed(reason=FailedReason.CHECKPOINT_UNAVAILABLE, message=_unpersisted(observed, attempt))
    return _decision("every worker succeeded, but memory alone holds the last steps", failed)


def _may_hold_more(observed: Observed, attempt: Attempt) -> bool:
    """Whether memory may hold steps that the storage has not; nobody tells when no agent answers."""
    if observed.has_pending(attempt.run):
        return True
    is_told = observed.agent not in (AgentState.GONE, AgentState.STARTING) and attempt.flush_asked_time is not None
    return not is_told and observed.status.checkpoint.latest_memory_step is not None


def _unpersisted(observed: Observed, attempt: Attempt) -> str:
    reports = observed.reports_of(attempt.run)
    steps = sorted({step for report in reports for step in report.pending_steps})
    which = f"step {steps[-1]} is" if steps else "the last steps may be"
    error = next((report.persist_error for report in reports if report.persist_error), None)
    return (
        f"training succeeded, but {which} in memory only: not persisted within "
        f"{observed.spec.failure_policy.flush_timeout_seconds:g} s (flushTimeoutSeconds)"
        f"{f': {error}' if error else ''}; the same command persists what is left before all else"
    )


def _suspend(observed: Observed, attempt: Attempt) -> Decision:
    """Save on request, wait until that is committed, ask the gang to end, and kill what does not."""
    failure = Failure(cause=Cause.SUSPENDED, time=observed.now)
    if observed.intent is Intent.STOP_NOW:
        return _end(attempt, failure, Verdict.SUSPEND, "stopped at once, as asked")
    if attempt.suspending_time is None:
        return _decision("asked to suspend", BeginSuspend(), RequeueAfter(seconds=0))
    if attempt.stopping_time is not None:
        left = attempt.stopping_time + STOP_GRACE_SECONDS - observed.now
        if left <= 0:
            return _end(attempt, failure, Verdict.SUSPEND, "the gang did not end when asked")
        return _decision("the gang is ending", RequeueAfter(seconds=left))
    left = attempt.suspending_time + observed.spec.checkpoint.graceful_suspend_seconds - observed.now
    if left > 0 and not _is_final_saved(observed, attempt):
        again = RequeueAfter(seconds=min(left, 1.0))
        if observed.agent is AgentState.GONE:
            return _decision("the agent is gone while the last save is awaited", StartAgent(), again)
        return _decision("waiting for the last save to be committed", RequestSave(run=attempt.run), again)
    stop = StopGang(runs=(attempt.run,), mode=StopMode.TERMINATE)
    return _decision("the gang may end", stop, BeginStop(), RequeueAfter(seconds=_SOON_SECONDS))


def _is_final_saved(observed: Observed, attempt: Attempt) -> bool:
    """Whether the save that was asked for is committed, or there is nobody to save."""
    if observed.agent in (AgentState.GONE, AgentState.STARTING):
        return False
    reports = observed.reports_of(attempt.run)
    if not any(rank.alive for report in reports for rank in report.ranks):
        return True
    finals = [report.final_step for report in reports if report.final_step is not None]
    persisted = max((report.latest_persisted_step or 0 for report in reports), default=0)
    return bool(finals) and persisted >= max(finals)


def _check_deadlines(observed: Observed, attempt: Attempt) -> Decision:
    if deadline.is_active_exceeded(observed):
        failed = _deadline_failed(observed)
        failure = Failure(cause=Cause.DEADLINE, time=observed.now, message=failed.message)
        return _end(
            attempt,
            failure,
            Verdict.FAIL,
            failed.message,
            fail_reason=failed.reason,
            fail_message=failed.message,
        )
    late = deadline.startup_exceeded(observed, attempt)
    if late is not None:
        message = f"{late} within {observed.spec.startup_deadline_seconds:g} s (startupDeadlineSeconds)"
        failure = Failure(cause=Cause.DEADLINE, time=observed.now, message=message)
        reason = FailedReason.STARTUP_DEADLINE_EXCEEDED
        return _end(attempt, failure, Verdict.FAIL, message, fail_reason=reason, fail_message=message)
    hang_left = progress.hang_left_seconds(observed, attempt)
    if hang_left is not None and hang_left <= 0:
        return _hung(observed, attempt)
    heal: tuple[Action, ...] = (StartAgent(),) if observed.agent is AgentState.GONE else ()
    waits = [
        _IDLE_SECONDS,
        deadline.active_left_seconds(observed),
        _ahead(deadline.startup_left_seconds(observed, attempt)),
        hang_left,
        restart.next_check_seconds(observed),
    ]
    nearest = min(max(wait, 0.01) for wait in waits if wait is not None)
    return _decision("training goes on", *heal, RequeueAfter(seconds=nearest))


def _ahead(seconds: float) -> float | None:
    """A deadline that has passed, and was found met, needs no second look."""
    return seconds if seconds > 0 else None


def _hung(observed: Observed, attempt: Attempt) -> Decision:
    policy = observed.spec.progress_policy
    message = f"no new step for {policy.progress_deadline_seconds:g} s (progressDeadlineSeconds)"
    if policy.action is HangAction.NOTIFY:
        again = RequeueAfter(seconds=_IDLE_SECONDS)
        if attempt.hang_notified_time is not None:
            return _decision(f"{message}; said already", again)
        return _decision(message, NoteHang(), again)
    failure = Failure(cause=Cause.HANG_DETECTED, time=observed.now, message=message)
    return _fail(observed, attempt, failure)
