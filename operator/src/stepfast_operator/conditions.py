"""The status conditions: metav1 words with closed sets of reasons, derived from the rest of the status.
Pure.
"""

from __future__ import annotations

from dataclasses import replace

from stepfast_operator.record import Condition, ConditionType, State, Status

_READY_STATES = frozenset({State.RUNNING, State.SUSPENDING})


def conditions_of(status: Status, before: Status, now: float) -> tuple[Condition, ...]:
    """The conditions of that status; one that did not change keeps its transition time."""
    found = [_suspended(status), _pods_ready(status), _restarting(status), _fresh(status)]
    if status.current is not None:
        found.append(_progressing(status))
    terminal = _terminal(status)
    if terminal is not None:
        found.append(terminal)
    generation = status.observed_generation
    return tuple(_dated(condition, before.condition(condition.type), now, generation) for condition in found)


def _dated(condition: Condition, old: Condition | None, now: float, generation: int | None) -> Condition:
    since = old.last_transition_time if old is not None and old.status == condition.status else now
    return replace(condition, last_transition_time=since, observed_generation=generation)


def _make(kind: ConditionType, holds: bool, reason: str, message: str = "") -> Condition:
    return Condition(type=kind, status="True" if holds else "False", reason=reason, message=message)


def _suspended(status: Status) -> Condition:
    is_suspended = status.state is State.SUSPENDED
    return _make(ConditionType.SUSPENDED, is_suspended, "Suspended" if is_suspended else "Resumed")


def _pods_ready(status: Status) -> Condition:
    current = status.current
    is_ready = status.state in _READY_STATES and current is not None and current.pods_ready_time is not None
    return _make(ConditionType.PODS_READY, is_ready, "PodsReady" if is_ready else "PodsNotReady")


def _restarting(status: Status) -> Condition:
    failure = status.last_failure
    is_restarting = status.state is State.RESTARTING and failure is not None
    reason = str(failure.reason) if is_restarting and failure is not None else "NotRestarting"
    return _make(ConditionType.RESTARTING, is_restarting, reason)


def _progressing(status: Status) -> Condition:
    is_hung = status.current is not None and status.current.hang_notified_time is not None
    reason = "ProgressDeadlineExceeded" if is_hung else "StepAdvanced"
    return _make(ConditionType.PROGRESSING, not is_hung, reason)


def _fresh(status: Status) -> Condition:
    checkpoint = status.checkpoint
    kind = ConditionType.CHECKPOINT_FRESH
    if checkpoint.persist_error is not None:
        return _make(kind, False, "PersistFailed", checkpoint.persist_error)
    if checkpoint.latest_persisted_step is None:
        return _make(kind, False, "NoCheckpoint")
    return _make(kind, True, "Fresh")


def _terminal(status: Status) -> Condition | None:
    if status.terminal_state == State.COMPLETE:
        return _make(ConditionType.COMPLETE, True, "Completed")
    if status.terminal_state == State.FAILED and status.current is not None and status.current.fail_reason is not None:
        return _make(ConditionType.FAILED, True, status.current.fail_reason, status.current.fail_message)
    return None
