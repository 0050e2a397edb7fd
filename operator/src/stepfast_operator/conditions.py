"""The status conditions: metav1 words with closed sets of reasons, derived from the rest of the status.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stepfast_operator import sentences
from stepfast_operator.observed import Observed
from stepfast_operator.policies import deadline, freshness, memory, queueing
from stepfast_operator.record import Condition, ConditionType, State, Status

_READY_STATES = frozenset({State.RUNNING, State.SUSPENDING})
_WORDS = {True: "True", False: "False", None: "Unknown"}


def conditions_of(status: Status, observed: Observed) -> tuple[Condition, ...]:
    """The conditions of that status, which follows from what was observed."""
    found = [_suspended(status), _pods_ready(status, observed), _restarting(status), _fresh(status, observed)]
    if status.current is not None:
        found.append(_progressing(status))
    excluded = _nodes_excluded(status, observed)
    if excluded is not None:
        found.append(excluded)
    fits = _fits_memory(observed)
    if fits is not None:
        found.append(fits)
    terminal = _terminal(status)
    if terminal is not None:
        found.append(terminal)
    return dated(found, status, observed.status, observed.now)


def refused_conditions(status: Status, before: Status, now: float) -> tuple[Condition, ...]:
    """Those of a job whose spec makes no sense: what was said of it before, and that it has failed."""
    terminal = _terminal(status)
    kept = [condition for condition in before.conditions if condition.type is not ConditionType.FAILED]
    return dated([*kept, terminal] if terminal is not None else kept, status, before, now)


def dated(found: Sequence[Condition], status: Status, before: Status, now: float) -> tuple[Condition, ...]:
    """One that did not change keeps its transition time."""
    generation = status.observed_generation
    return tuple(_dated(condition, before.condition(condition.type), now, generation) for condition in found)


def _dated(condition: Condition, old: Condition | None, now: float, generation: int | None) -> Condition:
    since = old.last_transition_time if old is not None and old.status == condition.status else now
    return replace(condition, last_transition_time=since, observed_generation=generation)


def _make(kind: ConditionType, holds: bool | None, reason: str, message: str = "") -> Condition:
    return Condition(type=kind, status=_WORDS[holds], reason=reason, message=message)


def _suspended(status: Status) -> Condition:
    is_suspended = status.state is State.SUSPENDED
    return _make(ConditionType.SUSPENDED, is_suspended, "Suspended" if is_suspended else "Resumed")


def _pods_ready(status: Status, observed: Observed) -> Condition:
    kind = ConditionType.PODS_READY
    if status.state in _READY_STATES and status.is_gang_up:
        return _make(kind, True, "PodsReady", sentences.PODS_WITHOUT_RANKS if status.is_up_without_ranks else "")
    if status.open_attempt is not None and observed.queue.refusal:
        return _make(kind, False, queueing.REFUSED, observed.queue.refusal)
    if status.open_attempt is not None and observed.queue.is_waiting:
        return _make(kind, False, queueing.QUEUED, observed.queue.message)
    pending = deadline.describe_pending(observed) if status.open_attempt is not None else None
    return _make(kind, False, "PodsNotReady" if pending is None else "PodsPending", pending or "")


def _restarting(status: Status) -> Condition:
    kind = ConditionType.RESTARTING
    if status.state is not State.RESTARTING:
        return _make(kind, False, "NotRestarting")
    leaving = status.open_attempt.leaving if status.open_attempt is not None else None
    if leaving is not None:
        return _make(kind, True, str(leaving.cause), leaving.message)
    is_in_place = status.open_attempt is not None and bool(status.recoveries)
    if is_in_place:
        return _make(kind, True, str(status.recoveries[-1].cause), "torchrun starts the ranks anew in place")
    return _make(kind, True, str(status.last_failure.reason) if status.last_failure is not None else "Restarting")


def _progressing(status: Status) -> Condition:
    is_hung = status.current is not None and status.current.hang_notified_time is not None
    reason = "ProgressDeadlineExceeded" if is_hung else "StepAdvanced"
    return _make(ConditionType.PROGRESSING, not is_hung, reason)


def _fresh(status: Status, observed: Observed) -> Condition:
    checkpoint = status.checkpoint
    kind, error = ConditionType.CHECKPOINT_FRESH, checkpoint.persist_error
    left = freshness.left_seconds(observed, status)
    if left is not None and left <= 0:
        limit = observed.spec.checkpoint.max_staleness_seconds or 0.0
        message = f"no step was committed for {limit:g} s (maxStalenessSeconds)"
        return _make(kind, False, "Stale", f"{message}: {error}" if error is not None else message)
    if error is not None:
        return _make(kind, False, "PersistFailed", error)
    if checkpoint.latest_persisted_step is None:
        return _make(kind, False, "NoCheckpoint")
    return _make(kind, True, "Fresh")


def _nodes_excluded(status: Status, observed: Observed) -> Condition | None:
    """Of a job that never kept off a node, nor should have, nothing is said."""
    kind = ConditionType.NODES_EXCLUDED
    excluded = [node for node in status.excluded_nodes if node.until_time > observed.now]
    told = [*map(sentences.describe_excluded, excluded), *map(sentences.describe_spared, status.spared_nodes)]
    if not told:
        return None if observed.status.condition(kind) is None else _make(kind, False, "NoneExcluded")
    return _make(kind, bool(excluded), "LimitReached" if status.spared_nodes else "Excluded", "; ".join(told))


def _fits_memory(observed: Observed) -> Condition | None:
    kind = ConditionType.FITS_MEMORY
    if observed.anatomy is not None and not memory.is_due(observed.status, observed.gang):
        return observed.status.condition(kind)
    fit = memory.fit_of(observed)
    return None if fit is None else _make(kind, fit.fits, fit.reason, fit.message)


def _terminal(status: Status) -> Condition | None:
    if status.terminal_state == State.COMPLETE:
        return _make(ConditionType.COMPLETE, True, "Completed")
    if status.terminal_state == State.FAILED and status.current is not None and status.current.fail_reason is not None:
        return _make(ConditionType.FAILED, True, status.current.fail_reason, status.current.fail_message)
    return None
