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

from dataclasses import replace

from stepfast.step import run_id
from stepfast_operator.actions import (
    Action,
    AmendFailure,
    BeginLeave,
    Decision,
    DeleteJob,
    EndAttempt,
    LaunchGang,
    LeaveQueue,
    MarkComplete,
    MarkFailed,
    MarkResumed,
    MarkSuspended,
    NoteFlushed,
    NoteHang,
    NoteSuccess,
    PlanAttempt,
    ReadSteps,
    RequeueAfter,
    StartAgent,
    StopGang,
    StopMode,
    SupersedeAfter,
)
from stepfast_operator.observed import AgentState, Failure, Intent, Observed, WorkerPhase
from stepfast_operator.policies import (
    deadline,
    elastic,
    exclusion,
    flush,
    freshness,
    leaving,
    memory,
    progress,
    queueing,
    readmission,
    restart,
    resume,
    suspend,
    ttl,
)
from stepfast_operator.policies.ending import end_in_order
from stepfast_operator.record import Attempt, Cause, FailedReason, State, Verdict
from stepfast_operator.spec import HangAction

AGENT_START_SECONDS = 15.0
_SOON_SECONDS = 0.1
_STORAGE_RETRY_SECONDS = 2.0
_LEAVE_SECONDS = 1.0
_REFUSED_SECONDS = 30.0  # what else may mend it wakes the job


def decide(observed: Observed) -> Decision:
    """The actions that bring the job closer to what is wanted, and why. Records among them are folded into
    the status.
    """
    decision, kept = _decide(observed), observed.spec.ttl_seconds_after_finished
    spares = elastic.change_of_spares(observed)
    if spares is not None:
        decision = replace(decision, actions=(spares, *decision.actions))
    if kept is not None and any(isinstance(action, MarkComplete | MarkFailed) for action in decision.actions):
        # It is over with this pass; the next one is to come when it is to be deleted.
        return replace(decision, actions=(*decision.actions, RequeueAfter(seconds=kept)))
    return decision


def _decide(observed: Observed) -> Decision:
    status = observed.status
    attempt = status.open_attempt
    amended = _amend(observed)
    if amended is not None:
        return _decision("what ended the attempt was its node", amended, RequeueAfter(seconds=0))
    stray = observed.live_runs - ({attempt.run} if attempt is not None and observed.gang is not None else set())
    if stray:
        stop = StopGang(runs=tuple(sorted(stray)), mode=StopMode.KILL)
        return _decision("processes of an earlier run still live", stop, RequeueAfter(seconds=_SOON_SECONDS))
    is_at_rest = status.is_terminal or status.state is State.SUSPENDED
    if is_at_rest and observed.queue.is_held:
        return _decision(
            "others may have its place", LeaveQueue(attempt=status.attempt), RequeueAfter(seconds=_LEAVE_SECONDS)
        )
    if status.is_terminal:
        return _over(observed)
    if attempt is None:
        return _between(observed)
    if observed.gang is None:
        return _launch(observed, attempt)
    return _watch(observed, attempt)


def _decision(why: str, *actions: Action) -> Decision:
    return Decision(actions=actions, why=why)


def _over(observed: Observed) -> Decision:
    why = f"the job is {observed.status.terminal_state}"
    left = ttl.left_seconds(observed)
    if left is None:
        return _decision(why)
    if left > 0:
        return _decision(why, RequeueAfter(seconds=left))
    return _decision(f"{why}; ttlSecondsAfterFinished are over", DeleteJob())


def _amend(observed: Observed) -> AmendFailure | None:
    """A rank's failure whose true cause shows while its gang is being ended: a node is known to be lost only when it
    has been silent for a while, or to be ill when its monitor has looked, and ranks fail long before that. What befalls
    a node once the run is flushed, or the job was suspended, explains nothing, though the failed pods' records are
    still there.
    """
    status = observed.status
    current, last = status.current, status.last_failure
    if current is None or last is None or observed.gang is None or status.is_terminal:
        return None
    if current.flushed_time is not None or status.state in (State.SUSPENDED, State.PENDING):
        return None
    if current.ended_time is None or current.attempt != last.attempt or current.verdict is Verdict.SUSPEND:
        return None
    failures = [worker.failure for worker in observed.gang.workers if worker.failure is not None]
    lost = next((failure for failure in failures if failure.cause is Cause.NODE_LOST), None)
    cause = lost or exclusion.unhealthy_of(observed)
    if cause is None or last.reason not in restart.PEERS_FAIL_WITH:
        return None
    judged = restart.judge(observed.spec.failure_policy, cause)
    if (last.node, last.rule) == (cause.node, judged.rule) and judged.rule is not None:
        return None  # it was known by then, and the rank tells more
    return AmendFailure(
        failure=cause,
        verdict=judged.verdict,
        rule=judged.rule,
        excludes_node=judged.excludes,
        fail_reason=FailedReason.FAILURE_POLICY if judged.verdict is Verdict.FAIL else None,
        fail_message=judged.fail_message,
    )


def _between(observed: Observed) -> Decision:
    """No attempt is open and nothing of any run lives."""
    status, ended = observed.status, observed.status.current
    if status.state is State.SUSPENDED and observed.intent is Intent.RUN:
        return _decision("asked to go on", MarkResumed(), RequeueAfter(seconds=0))
    if ended is not None and ended.ended_time is not None and ended.flushed_time is None:
        is_launched = observed.gang is not None  # what never ran has staged nothing
        waiting = flush.flush(observed, ended, ended.ended_time) if is_launched else None
        if waiting is not None:
            return waiting
        left = NoteFlushed(timed_out=is_launched and flush.is_left(observed, ended))
        return _decision("the failed run is flushed", left, RequeueAfter(seconds=0))
    if ended is not None and ended.verdict is Verdict.FAIL:
        reason = ended.fail_reason or FailedReason.FAILURE_POLICY
        return _decision("the attempt's end ends the job", MarkFailed(reason=reason, message=ended.fail_message))
    if observed.intent is not Intent.RUN:
        if status.state is State.SUSPENDED:
            return _decision("suspended")
        return _decision("the gang has stopped as asked", MarkSuspended())
    held_up = _held_up(observed)
    if held_up is not None:
        return held_up
    if observed.committed is None:
        return _decision("the committed steps decide how to go on", ReadSteps())
    return _plan(observed)


def _held_up(observed: Observed) -> Decision | None:
    """What stands in the way of another attempt that is wanted."""
    if deadline.is_active_exceeded(observed):
        return _decision("activeDeadlineSeconds are over", _deadline_failed(observed))
    refused = memory.refusal(observed)
    if refused is not None:
        return _without_memory(observed, refused)
    if observed.storage_error is not None:
        return _without_storage(observed, observed.storage_error)
    return None


def _deadline_failed(observed: Observed) -> MarkFailed:
    seconds = observed.spec.active_deadline_seconds or 0.0
    return MarkFailed(
        reason=FailedReason.DEADLINE_EXCEEDED, message=f"was active for {seconds:g} s (activeDeadlineSeconds)"
    )


def _without_memory(observed: Observed, message: str) -> Decision:
    """The job does not fit, and is not to be tried. In a cluster it waits, as pods do that fit no node: a node, the
    prediction or the policy may change.
    """
    if observed.is_on_one_machine:
        failed = MarkFailed(reason=FailedReason.DOES_NOT_FIT_MEMORY, message=message)
        return _decision("it does not fit this machine's memory", failed)
    return _decision(f"it does not fit its memory: {message}", RequeueAfter(seconds=_REFUSED_SECONDS))


def _without_storage(observed: Observed, error: str) -> Decision:
    status = observed.status
    if observed.is_storage_forbidden and status.attempt == 0:
        # Nothing was trained that waiting could save, and whoever can mend it has just typed the command.
        failed = MarkFailed(reason=FailedReason.CHECKPOINT_UNAVAILABLE, message=error)
        return _decision("the storage refuses", failed)
    # Not since the attempt ended: the job may have waited for something else for longer than that.
    since = status.checkpoint.storage_error_time
    waited = observed.now - flush.waiting_since(observed, since) if since is not None else 0.0
    if waited >= observed.spec.startup_deadline_seconds:
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
    number, exclude = status.attempt + 1, exclusion.exclusion_of(observed)
    shrinks, shrunk_from = elastic.shrinks_of_next(observed)
    plan = PlanAttempt(
        attempt=number,
        run=run_id(observed.uid, number),
        resume_step=start.step,
        nodes=elastic.size_of_next(observed),
        shrinks=shrinks,
        shrunk_from=shrunk_from,
        progress_step=start.progress_step,
        after=cause,
        counted=counted,
        without_progress=without,
        resume_request=start.request,
        is_rolled_back=start.supersede_after is not None,
        excluded_nodes=exclude.excluded,
        spared_nodes=exclude.spared,
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
    since = flush.waiting_since(observed, attempt.planned_time)
    if observed.now - since > observed.spec.startup_deadline_seconds:
        # Nobody lets its pods be made: a quota, an admission rule, an API server that is away.
        refusal = queueing.refusal_of(observed.status)
        return _too_late(observed, attempt, f"the gang was not launched{f' ({refusal})' if refusal else ''}")
    wait = attempt.planned_time + AGENT_START_SECONDS - observed.now
    if wait > 0 and observed.agent is AgentState.GONE:
        return _decision("the agent comes first", StartAgent(), RequeueAfter(seconds=_SOON_SECONDS))
    if wait > 0 and observed.agent is AgentState.STARTING:
        return _decision("waiting for the agent", RequeueAfter(seconds=_SOON_SECONDS))
    launch = LaunchGang(
        attempt=attempt.attempt,
        run=attempt.run,
        resume_step=attempt.resume_step,
        nodes=elastic.size_of(attempt, observed.spec),
        planned_time=attempt.planned_time,
        interruptions=observed.status.interruptions,
        trained_seconds=observed.status.trained_seconds,
        avoided_nodes=exclusion.avoided(observed),
    )
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
        return suspend.stopped(observed, attempt, "stopped as asked")
    if failure is not None:
        return _fail(observed, attempt, leaving.explained(observed, attempt, failure))
    if is_over and attempt.leaving is not None and attempt.stopping_time is not None:
        # A script may end well when it is told to end: that is not the end of its training.
        return _fail(observed, attempt, leaving.failure_of(attempt.leaving))
    if is_over:
        return _succeed(observed, attempt)
    if is_to_stop:
        return suspend.suspend(observed, attempt)
    return _leave(observed, attempt) or _check_deadlines(observed, attempt)


def _leave(observed: Observed, attempt: Attempt) -> Decision | None:
    """What is next for a gang that is to be launched anew elsewhere; None for one that stays."""
    reason = attempt.leaving
    if reason is not None:
        failure = leaving.failure_of(reason)
        return end_in_order(
            observed, attempt, lambda _: _fail(observed, attempt, failure), save_until=reason.save_until_time
        )
    reason = leaving.reason_of(observed)
    if reason is None and (available := readmission.failure_of(observed, attempt)) is not None:
        return _fail(observed, attempt, available)
    reason = reason or elastic.reason_of(observed, attempt)
    if reason is None:
        return None
    return _decision(f"the gang is to leave: {reason.message}", BeginLeave(leaving=reason), RequeueAfter(seconds=0))


def _end(
    attempt: Attempt,
    failure: Failure,
    verdict: Verdict,
    why: str,
    *,
    rule: str | None = None,
    excludes_node: bool = False,
    fail_reason: FailedReason | None = None,
    fail_message: str = "",
) -> Decision:
    end = EndAttempt(
        failure=failure,
        verdict=verdict,
        rule=rule,
        excludes_node=excludes_node,
        fail_reason=fail_reason,
        fail_message=fail_message,
    )
    # Recorded before the gang is killed, by the next pass: the operator may be killed in between, and in a gang that
    # it has half ended nobody finds the cause of the end any more.
    return _decision(why, end, RequeueAfter(seconds=0))


def _fail(observed: Observed, attempt: Attempt, failure: Failure) -> Decision:
    judged = restart.judge(observed.spec.failure_policy, failure)
    fail_reason = FailedReason.FAILURE_POLICY if judged.verdict is Verdict.FAIL else None
    return _end(
        attempt,
        failure,
        judged.verdict,
        f"the attempt failed: {failure.cause}",
        rule=judged.rule,
        excludes_node=judged.excludes,
        fail_reason=fail_reason,
        fail_message=judged.fail_message,
    )


def _succeed(observed: Observed, attempt: Attempt) -> Decision:
    if attempt.succeeded_time is None:
        return _decision("every worker succeeded", NoteSuccess(), RequeueAfter(seconds=0))
    waiting = flush.flush(observed, attempt, attempt.succeeded_time)
    if waiting is not None:
        return waiting
    if not flush.may_hold_more(observed, attempt):
        return _decision("every worker succeeded, nothing is pending", MarkComplete())
    message = flush.describe_unpersisted(observed, attempt)
    failed = MarkFailed(reason=FailedReason.CHECKPOINT_UNAVAILABLE, message=message)
    return _decision("every worker succeeded, but memory alone holds the last steps", failed)


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
        return _too_late(observed, attempt, late)
    hang_left = progress.hang_left_seconds(observed, attempt)
    if hang_left is not None and hang_left <= 0:
        return _hung(observed, attempt)
    heal: tuple[Action, ...] = (StartAgent(),) if observed.agent is AgentState.GONE else ()
    waits = [
        observed.idle_seconds,
        deadline.active_left_seconds(observed),
        _ahead(deadline.startup_left_seconds(observed, attempt)),
        hang_left,
        restart.next_check_seconds(observed),
        _ahead(elastic.next_check_seconds(observed, attempt)),
        _ahead(readmission.next_check_seconds(observed, attempt)),
        _ahead(freshness.left_seconds(observed, observed.status)),
    ]
    nearest = min(max(wait, 0.01) for wait in waits if wait is not None)
    return _decision("training goes on", *heal, RequeueAfter(seconds=nearest))


def _ahead(seconds: float | None) -> float | None:
    """A deadline that has passed, and was found met, needs no second look."""
    return seconds if seconds is not None and seconds > 0 else None


def _too_late(observed: Observed, attempt: Attempt, what: str) -> Decision:
    message = f"{what} within {observed.spec.startup_deadline_seconds:g} s (startupDeadlineSeconds)"
    failure = Failure(cause=Cause.DEADLINE, time=observed.now, message=message)
    reason = FailedReason.STARTUP_DEADLINE_EXCEEDED
    return _end(attempt, failure, Verdict.FAIL, message, fail_reason=reason, fail_message=message)


def _hung(observed: Observed, attempt: Attempt) -> Decision:
    policy = observed.spec.progress_policy
    message = f"no new step for {policy.progress_deadline_seconds:g} s (progressDeadlineSeconds)"
    if policy.action is HangAction.NOTIFY:
        again = RequeueAfter(seconds=observed.idle_seconds)
        if attempt.hang_notified_time is not None:
            return _decision(f"{message}; said already", again)
        return _decision(message, NoteHang(), again)
    failure = Failure(cause=Cause.HANG_DETECTED, time=observed.now, message=message)
    return _fail(observed, attempt, failure)
