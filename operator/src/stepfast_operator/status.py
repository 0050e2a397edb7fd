"""How a job's status follows from what is observed and decided: `next_status`. Pure; called once a pass.

First what was observed is taken in, then the decision's records, then what is shown is derived. Counters only
grow, except `restartsWithoutProgress`: it starts again from zero when a newer step is committed (invariant
I8).
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from stepfast_operator.actions import (
    AmendFailure,
    BeginLeave,
    BeginStop,
    BeginSuspend,
    Decision,
    DeleteJob,
    EndAttempt,
    FlushRun,
    ForgetFlushAsked,
    LaunchGang,
    LeaveQueue,
    MarkComplete,
    MarkFailed,
    MarkResumed,
    MarkSuspended,
    NoteFlushAsked,
    NoteFlushed,
    NoteHang,
    NotePartsWritten,
    NoteSuccess,
    PlanAttempt,
    ReadSteps,
    Record,
    RequestSave,
    RequeueAfter,
    SetSpares,
    StartAgent,
    StopGang,
    SupersedeAfter,
)
from stepfast_operator.conditions import conditions_of, refused_conditions
from stepfast_operator.failurepolicy import RuleAction
from stepfast_operator.goodput import goodput_of
from stepfast_operator.intake import take_in
from stepfast_operator.observed import Failure, Observed
from stepfast_operator.policies import exclusion, queueing
from stepfast_operator.record import (
    MAX_RECOVERIES,
    NO_FAILURES,
    Attempt,
    Cause,
    FailedReason,
    LastFailure,
    Recovery,
    State,
    Status,
    TrainerStatus,
    Verdict,
)
from stepfast_operator.sentences import with_seen_first

# What the API calls what follows a failure.
_ACTIONS = {
    Verdict.RESTART: RuleAction.RESTART_JOB,
    Verdict.RESTART_UNCOUNTED: RuleAction.RESTART_IGNORING_MAX,
    Verdict.FAIL: RuleAction.FAIL_JOB,
}


def next_status(observed: Observed, decision: Decision) -> Status:
    """The status to write after this pass. Equal to the old one when nothing changed."""
    before = observed.status
    status = replace(before if before.is_terminal else take_in(observed), observed_generation=observed.generation)
    for action in decision.actions:
        match action:
            case LaunchGang() | StopGang() | StartAgent() | FlushRun() | RequestSave() | SupersedeAfter():
                pass
            case ReadSteps() | RequeueAfter() | SetSpares() | LeaveQueue() | DeleteJob():
                pass
            case _:
                status = _fold(status, action, observed)
    if before.is_terminal:
        return status
    status = replace(status, state=_state_of(status))
    return replace(status, conditions=conditions_of(status, observed))


def refuse(status: Status, message: str, now: float, generation: int | None = None) -> Status:
    """The status of a job whose spec makes no sense: failed for good (InvalidSpec), with why. A job that is over stays
    as it is.
    """
    if status.is_terminal:
        return status
    record = MarkFailed(reason=FailedReason.INVALID_SPEC, message=message)
    after = _fail(replace(status, observed_generation=generation), record, now)
    after = replace(after, state=_state_of(after))
    return replace(after, conditions=refused_conditions(after, status, now))


def _fold(status: Status, record: Record, observed: Observed) -> Status:
    now, current = observed.now, status.current
    match record:
        case PlanAttempt():
            return _plan(status, record, now)
        case EndAttempt():
            return _with_fault(_end(status, record, now), record, observed)
        case AmendFailure():
            return _with_fault(_amend(status, record), record, observed)
        case MarkSuspended():
            return _suspend(status, now)
        case MarkResumed():
            return _resume(status, now)
        case MarkComplete():
            return replace(_finish(_ended(status, now), now), terminal_state=State.COMPLETE)
        case MarkFailed():
            return _fail(status, record, now)
        case _:
            return replace(status, current=current and _note(current, record, now))


def _note(
    current: Attempt,
    record: BeginSuspend
    | BeginLeave
    | BeginStop
    | NoteSuccess
    | NoteFlushAsked
    | NotePartsWritten
    | ForgetFlushAsked
    | NoteFlushed
    | NoteHang,
    now: float,
) -> Attempt:
    """Records that only note a time in the current attempt."""
    match record:
        case BeginSuspend():
            return replace(current, suspending_time=now)
        case BeginLeave():
            return replace(current, leaving=record.leaving)
        case BeginStop():
            return replace(current, stopping_time=now)
        case NoteSuccess():
            return replace(current, succeeded_time=now)
        case NoteFlushAsked():
            return replace(current, flush_asked_time=now)
        case NotePartsWritten():
            return replace(current, parts_written_time=now)
        case ForgetFlushAsked():
            return replace(current, flush_asked_time=None, parts_written_time=None)
        case NoteFlushed():
            return replace(current, flushed_time=now, flush_timed_out=record.timed_out)
        case NoteHang():
            return replace(current, hang_notified_time=now)
        case _:
            assert_never(record)


def _fail(status: Status, record: MarkFailed, now: float) -> Status:
    """The job is over; one that never had an attempt gets one without a number, which says why."""
    current = status.current or Attempt(attempt=0, run="", resume_step=0, planned_time=now)
    current = replace(current, fail_reason=record.reason, fail_message=record.message)
    status = replace(status, current=current, recoveries=_followed(status.recoveries, current))
    return replace(_finish(_ended(status, now), now), terminal_state=State.FAILED)


def _followed(recoveries: tuple[Recovery, ...], last: Attempt) -> tuple[Recovery, ...]:
    """Without that of the last attempt, which no other follows."""
    return tuple(
        recovery for recovery in recoveries if recovery.attempt != last.attempt or recovery.in_place_restart is not None
    )


def _ended(status: Status, now: float) -> Status:
    """Without an open attempt. What its gang has waited in a queue until now is counted: nobody will admit it."""
    current = status.open_attempt
    if current is None:
        return status
    queued = queueing.queued_seconds(status, now)
    return replace(status, queued_seconds=queued, current=replace(current, ended_time=now))


def _end(status: Status, record: EndAttempt, now: float) -> Status:
    """The attempt is over. A failure is kept as the last one; a restart opens a recovery."""
    status = _ended(status, now)
    failure, current = record.failure, status.current
    if current is None:
        return status
    current = replace(
        current,
        verdict=record.verdict,
        flush_asked_time=None,
        parts_written_time=None,
        fail_reason=record.fail_reason,
        fail_message=record.fail_message,
    )
    status = replace(status, current=current)
    if record.verdict is Verdict.SUSPEND:
        return status
    last = LastFailure(
        attempt=current.attempt,
        failure_time=failure.time,
        reason=failure.cause,
        rule=record.rule,
        action=_ACTIONS.get(record.verdict),
        pod=failure.pod,
        node=failure.node,
        rank=failure.rank,
        exit_code=failure.exit_code,
        message=failure.message,
    )
    status = replace(status, last_failure=last)
    if record.verdict is Verdict.FAIL:
        return status
    recovery = _recovery_from(current, failure, failure.time, now)
    return replace(status, recoveries=(*status.recoveries, recovery)[-MAX_RECOVERIES:])


def _with_fault(status: Status, record: EndAttempt | AmendFailure, observed: Observed) -> Status:
    """With what the attempt's end says of the node that it happened on."""
    if record.verdict is Verdict.SUSPEND or status.current is None:
        return status
    rule = record.rule if record.excludes_node else None
    policy = observed.spec.node_exclusion_policy
    return exclusion.with_fault(status, status.current.attempt, record.failure, rule, policy)


def _amend(status: Status, record: AmendFailure) -> Status:
    """Puts the blame for the last attempt's end right. What it was taken for is still told."""
    failure, current, last = record.failure, status.current, status.last_failure
    if current is None or last is None:
        return status
    last = replace(
        last,
        reason=failure.cause,
        rule=record.rule,
        action=_ACTIONS.get(record.verdict),
        pod=failure.pod,
        node=failure.node,
        rank=None,
        exit_code=failure.exit_code,
        message=with_seen_first(failure.message or "its node was lost", last),
    )
    current = replace(
        current, verdict=record.verdict, fail_reason=record.fail_reason, fail_message=record.fail_message
    )  # fmt: skip
    recoveries = _followed(status.recoveries, current)
    if record.verdict is not Verdict.FAIL:
        opened = next((entry for entry in status.recoveries if entry not in recoveries), None)
        opened = opened or _recovery_from(current, failure, last.failure_time, current.ended_time or last.failure_time)
        is_counted = record.verdict is Verdict.RESTART
        opened = replace(opened, cause=failure.cause, node=failure.node, rank=None, counted=is_counted)
        recoveries = (*recoveries, opened)[-MAX_RECOVERIES:]
    return replace(status, current=current, last_failure=last, recoveries=recoveries)


def _recovery_from(current: Attempt, failure: Failure, failed: float, detected: float) -> Recovery:
    return Recovery(
        attempt=current.attempt,
        cause=failure.cause,
        node=failure.node,
        rank=failure.rank,
        counted=current.verdict is Verdict.RESTART,
        failure_time=failed,
        detected_time=detected,
        step_before=current.reached_step,
    )


def _plan(status: Status, plan: PlanAttempt, now: float) -> Status:
    """The next attempt; the one before it is settled: what it lost and what it was good for."""
    ended = status.current
    attempt = Attempt(
        attempt=plan.attempt,
        run=plan.run,
        resume_step=plan.resume_step,
        planned_time=now,
        nodes=plan.nodes,
        shrinks=plan.shrinks,
        shrunk_from=plan.shrunk_from,
        step_before=plan.resume_step if ended is None else ended.reached_step,
        step_seconds_before=0.0 if ended is None else ended.step_seconds,
    )
    status = _settle(status, attempt)
    is_restart = plan.after not in (None, Cause.SUSPENDED)
    trainer = TrainerStatus(global_step=plan.resume_step or None)
    checkpoint = status.checkpoint
    if plan.is_rolled_back:
        # What was committed above it counts as progress no more.
        checkpoint = replace(checkpoint, latest_persisted_step=plan.resume_step or None, size_bytes=None)
    return replace(
        status,
        state=State.STARTING,
        attempt=plan.attempt,
        restarts=status.restarts + is_restart,
        interruptions=status.interruptions + (is_restart and plan.after not in NO_FAILURES),
        restarts_count_towards_max=status.restarts_count_towards_max + plan.counted,
        restarts_without_progress=plan.without_progress,
        start_time=status.start_time if status.start_time is not None else now,
        progress_step=plan.progress_step,
        resume_request=plan.resume_request,
        excluded_nodes=plan.excluded_nodes,
        spared_nodes=plan.spared_nodes,
        current=attempt,
        trainer_status=trainer,
        checkpoint=replace(
            checkpoint,
            earlier_saves=checkpoint.saves,
            restored_step=None,
            restored_tier=None,
            latest_memory_step=None,
            persist_lag_steps=None,
            persist_lag_seconds=None,
            pending_bytes=0,
        ),
    )


def _settle(status: Status, following: Attempt) -> Status:
    """The attempt before the following one is over: what it lost, and how long it trained for what is kept."""
    ended = status.current
    if ended is None:
        return status
    lost = following.steps_lost
    recoveries = status.recoveries
    if recoveries and recoveries[-1].is_ended_by(following):
        last = recoveries[-1]
        last = replace(
            last, flushed_time=ended.flushed_time, resumed_from_step=following.resume_step, steps_lost=lost
        )  # fmt: skip
        recoveries = (*recoveries[:-1], last)
    productive = status.productive_seconds + ended.trained_seconds - lost * ended.step_seconds
    return replace(
        status,
        recoveries=recoveries,
        steps_lost=status.steps_lost + lost,
        trained_seconds=status.trained_seconds + ended.trained_seconds,
        productive_seconds=max(0.0, productive),
    )


def _suspend(status: Status, now: float) -> Status:
    """Nobody waits for a recovery that is under way: the next attempt begins when the job is resumed."""
    current = status.current
    recoveries = status.recoveries if current is None else _followed(status.recoveries, current)
    return _close_stretch(replace(status, state=State.SUSPENDED, recoveries=recoveries), now)


def _close_stretch(status: Status, now: float) -> Status:
    """A stretch of activity ends: its deadline begins anew when the job is resumed."""
    if status.start_time is None:
        return status
    earlier = status.earlier_seconds + now - status.start_time - queueing.queued_seconds(status, now)
    return replace(status, earlier_seconds=earlier, start_time=None, queued_seconds=0.0)


def _resume(status: Status, now: float) -> Status:
    """Another stretch begins. A flush that took too long before is due again: memory may still hold steps that
    nothing else does.
    """
    current = status.current
    if current is not None and current.flush_timed_out:
        current = replace(
            current, flush_asked_time=None, parts_written_time=None, flushed_time=None, flush_timed_out=False
        )
    return replace(status, state=State.PENDING, start_time=now, current=current)


def _finish(status: Status, now: float) -> Status:
    """Notes when it was over, and the goodput as it is then."""
    return replace(status, completion_time=now, goodput_ratio=goodput_of(status, now))


def _state_of(status: Status) -> State:
    current = status.current
    if status.terminal_state is not None:
        return State(status.terminal_state)
    if status.state in (State.SUSPENDED, State.PENDING) or current is None:
        return status.state
    if current.ended_time is not None:
        return State.SUSPENDING if current.verdict is Verdict.SUSPEND else State.RESTARTING
    if current.suspending_time is not None:
        return State.SUSPENDING
    if current.leaving is not None:
        return State.RESTARTING
    if current.pods_ready_time is not None:
        return State.RUNNING
    if current.in_place_restarts:
        return State.RESTARTING
    return State.RUNNING if status.is_up_without_ranks else State.STARTING
