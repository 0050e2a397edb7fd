"""What a pass brought about, as Kubernetes Events: the job's story for `kubectl describe`. Pure.

Each is said once, by the pass that brought it about. What goes on without a change of its kind (steps, commits, an
error that is worded anew) is no event: the status shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from stepfast_operator import sentences
from stepfast_operator.actions import BeginLeave, LaunchGang, MarkResumed, NoteHang
from stepfast_operator.policies import queueing
from stepfast_operator.reconcile import Pass
from stepfast_operator.record import Attempt, Cause, Condition, ConditionType, FailedReason, State, Status, Verdict

NORMAL, WARNING = "Normal", "Warning"


class EventReason(StrEnum):
    """What may be said of a job."""

    PODS_CREATED = "PodsCreated"
    QUEUED = "Queued"
    QUEUE_REFUSED = "QueueRefused"
    ADMITTED = "Admitted"
    PODS_READY = "PodsReady"
    RESTARTING = "Restarting"
    RECOVERED = "Recovered"
    REACHED_MAX_RESTARTS = "ReachedMaxRestarts"
    NO_PROGRESS = "NoProgress"
    HANG_DETECTED = "HangDetected"
    EVICTION_NOTICE = "EvictionNotice"
    SCALING_DOWN = "ScalingDown"
    SCALING_UP = "ScalingUp"
    NODE_EXCLUDED = "NodeExcluded"
    NODE_SPARED = "NodeSpared"
    CHECKPOINT_RESTORED = "CheckpointRestored"
    DOES_NOT_FIT_MEMORY = "DoesNotFitMemory"
    CHECKPOINT_STALE = "CheckpointStale"
    PERSIST_FAILED = "PersistFailed"
    STORAGE_UNAVAILABLE = "StorageUnavailable"
    FLUSH_TIMED_OUT = "FlushTimedOut"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    COMPLETED = "Completed"
    FAILED = "Failed"
    RECONCILE_FAILED = "ReconcileFailed"  # of no pass: it ended in an error


_BUDGETS = {
    FailedReason.MAX_RESTARTS_REACHED: EventReason.REACHED_MAX_RESTARTS,
    FailedReason.NO_PROGRESS: EventReason.NO_PROGRESS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """`type` is Normal or Warning."""

    type: str
    reason: EventReason
    message: str


def events_of(seen: Pass) -> tuple[JobEvent, ...]:
    """In the order in which they came about."""
    if seen.before.is_terminal:
        return ()
    return tuple([*_begun(seen), *_failed(seen), *_lived(seen), *_endangered(seen), *_rested(seen)])


def events_of_refusal(before: Status, after: Status) -> tuple[JobEvent, ...]:
    """The same of a job whose spec was refused, without a pass."""
    return tuple(_over(before, after))


def _normal(reason: EventReason, message: str) -> JobEvent:
    return JobEvent(type=NORMAL, reason=reason, message=message)


def _warning(reason: EventReason, message: str) -> JobEvent:
    return JobEvent(type=WARNING, reason=reason, message=message)


def _begun(seen: Pass) -> Iterator[JobEvent]:
    after = seen.after
    yield from _queued(seen)
    fits = after.condition(ConditionType.FITS_MEMORY)
    unfit = sentences.describe_fit(seen.before, after)
    if unfit is not None and fits is not None and fits.status == "False":
        yield _warning(EventReason.DOES_NOT_FIT_MEMORY, unfit)
    yield from _kept_off(seen)
    for action in seen.decision.actions:
        if isinstance(action, MarkResumed):
            yield _normal(EventReason.RESUMED, "the job goes on")
        if isinstance(action, LaunchGang) and after.current is not None:
            pods = sentences.count_text(after.nodes.desired, "pod")
            text = f"{sentences.describe_plan(after.current, after)}: {pods}, run {action.run}"
            yield _normal(EventReason.PODS_CREATED, text)


def _kept_off(seen: Pass) -> Iterator[JobEvent]:
    """The nodes that are excluded from now on, or would be but for a limit."""
    before, after = seen.before, seen.after
    known = {node.name for node in before.excluded_nodes}
    for node in after.excluded_nodes:
        if node.name not in known:
            yield _warning(EventReason.NODE_EXCLUDED, sentences.describe_excluded(node))
    for spared in after.spared_nodes:
        if spared not in before.spared_nodes:
            yield _warning(EventReason.NODE_SPARED, sentences.describe_spared(spared))


def _queued(seen: Pass) -> Iterator[JobEvent]:
    """That the gang waits to be admitted, or cannot even do that; said once for each attempt."""
    after, ready = seen.after.current, seen.after.condition(ConditionType.PODS_READY)
    refusal = queueing.refusal_of(seen.after)
    if refusal and not queueing.refusal_of(seen.before):
        yield _warning(EventReason.QUEUE_REFUSED, refusal)
    before = seen.before.current
    if before is None or after is None or before.attempt != after.attempt:
        return
    if after.queued_time is not None and before.queued_time is None and ready is not None:
        yield _normal(EventReason.QUEUED, f"attempt {after.attempt} {ready.message}")
    if after.dequeued_time is not None and before.dequeued_time is None and after.suspending_time is None:
        waited = sentences.span_text(after.dequeued_time - (after.queued_time or after.dequeued_time))
        yield _normal(EventReason.ADMITTED, f"attempt {after.attempt} was admitted after {waited}")


def _failed(seen: Pass) -> Iterator[JobEvent]:
    """The attempt's end, and what follows: told anew when it turns out to have had another cause."""
    failure, current = seen.after.last_failure, seen.after.current
    if any(isinstance(action, NoteHang) for action in seen.decision.actions):
        yield _warning(EventReason.HANG_DETECTED, f"{seen.decision.why}; the policy is to say so")
    yield from _leaving(seen)
    if failure is None or failure == seen.before.last_failure or current is None:
        return
    told = sentences.describe_failure(failure)
    if failure.reason is Cause.HANG_DETECTED:
        yield _warning(EventReason.HANG_DETECTED, told)
    if current.verdict in (Verdict.RESTART, Verdict.RESTART_UNCOUNTED):
        uncounted = "" if current.verdict is Verdict.RESTART else "; not counted towards maxRestarts"
        yield _warning(EventReason.RESTARTING, f"{told}{uncounted}")


def _leaving(seen: Pass) -> Iterator[JobEvent]:
    """That the gang is to save and go elsewhere."""
    for action in seen.decision.actions:
        if not isinstance(action, BeginLeave) or seen.after.current is None:
            continue
        leaving, size = action.leaving, seen.after.nodes.desired
        if leaving.nodes is None:
            yield _warning(EventReason.EVICTION_NOTICE, f"{leaving.message}: the gang saves and leaves")
            continue
        text = (
            f"the gang goes on with {sentences.count_text(leaving.nodes, 'node')} in place of {size}: {leaving.message}"
        )
        if leaving.nodes < size:
            yield _warning(EventReason.SCALING_DOWN, text)
        else:
            yield _normal(EventReason.SCALING_UP, text)


def _lived(seen: Pass) -> Iterator[JobEvent]:
    """What the gang did."""
    before, after, status = seen.before.current, seen.after.current, seen.after
    if before is None or after is None or before.attempt != after.attempt:
        return
    is_restarted = after.in_place_restarts > before.in_place_restarts
    if is_restarted:
        yield _warning(EventReason.RESTARTING, sentences.describe_in_place(status.recoveries[-1]))
    if after.pods_ready_time is not None and (before.pods_ready_time is None or is_restarted):
        yield _normal(EventReason.PODS_READY, sentences.ALL_RANKS)
    if status.is_up_without_ranks and not seen.before.is_up_without_ranks:
        yield _normal(EventReason.PODS_READY, sentences.PODS_WITHOUT_RANKS)
    restored = sentences.describe_restore(before, after, status)
    if restored is not None:
        is_planned = after.in_place_restarts > 0 or after.start_step >= after.resume_step
        yield JobEvent(type=NORMAL if is_planned else WARNING, reason=EventReason.CHECKPOINT_RESTORED, message=restored)
    if after.flush_timed_out and not before.flush_timed_out:
        yield _warning(EventReason.FLUSH_TIMED_OUT, _flush_timed_out(after))
    yield from _recovered(seen)


def _flush_timed_out(attempt: Attempt) -> str:
    if attempt.verdict is Verdict.SUSPEND:
        return "flushing took too long: what is left stays in the nodes' memory, and is persisted on resume"
    return "flushing took too long: going on with what is committed"


def _recovered(seen: Pass) -> Iterator[JobEvent]:
    before, after = seen.before.recoveries, seen.after.recoveries
    if not after or after[-1].duration_seconds is None:
        return
    old = next((one for one in before if one.is_same(after[-1])), None)
    if old is None or old.duration_seconds is None:
        yield _normal(EventReason.RECOVERED, sentences.describe_recovery(after[-1]))


def _endangered(seen: Pass) -> Iterator[JobEvent]:
    """Checkpoints that do not come about as promised."""
    before, after = seen.before, seen.after
    fresh = after.condition(ConditionType.CHECKPOINT_FRESH)
    if _is_stale(fresh) and not _is_stale(before.condition(ConditionType.CHECKPOINT_FRESH)) and fresh is not None:
        yield _warning(EventReason.CHECKPOINT_STALE, fresh.message)
    error = after.checkpoint.persist_error
    if error is not None and before.checkpoint.persist_error is None:
        yield _warning(EventReason.PERSIST_FAILED, f"persisting fails, and is tried again: {error}")
    error = after.checkpoint.storage_error
    if error is not None and before.checkpoint.storage_error is None and not after.is_terminal:
        yield _warning(EventReason.STORAGE_UNAVAILABLE, f"waiting for the storage: {error}")


def _is_stale(condition: Condition | None) -> bool:
    return condition is not None and condition.reason == "Stale"


def _rested(seen: Pass) -> Iterator[JobEvent]:
    before, after = seen.before, seen.after
    if after.state is State.SUSPENDED and before.state is not State.SUSPENDED:
        step = after.checkpoint.latest_persisted_step
        text = f"suspended; it will go on from step {step}" if step is not None else "suspended; nothing is committed"
        yield _normal(EventReason.SUSPENDED, text)
    yield from _over(before, after)


def _over(before: Status, after: Status) -> Iterator[JobEvent]:
    if after.terminal_state is None or before.terminal_state is not None:
        return
    if after.terminal_state == State.COMPLETE:
        yield _normal(EventReason.COMPLETED, sentences.describe_end(after))
        return
    current, failure = after.current, after.last_failure
    if current is not None and current.fail_reason in _BUDGETS:
        yield _warning(_BUDGETS[current.fail_reason], current.fail_message)
    told = sentences.describe_end(after)
    if failure is not None and current is not None and failure.attempt == current.attempt:
        told = f"{told}; {sentences.describe_failure(failure)}"
    yield _warning(EventReason.FAILED, told)
