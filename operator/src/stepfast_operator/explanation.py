"""Why a job is as it is, in sentences: why it restarted, what that cost, what it waits for. Pure.

The words are those of Events and `stepfast status`; what comes next is `outlook.py`'s to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stepfast_operator.failurepolicy import RuleAction
from stepfast_operator.goodput import goodput_of
from stepfast_operator.limits import Limits
from stepfast_operator.outlook import describe_next
from stepfast_operator.record import Attempt, Condition, ConditionType, LastFailure, Recovery, State, Status
from stepfast_operator.recoveryphases import phases_of
from stepfast_operator.sentences import (
    count_text,
    describe_end,
    describe_excluded,
    describe_failure,
    describe_spared,
    span_text,
)

_NAMED = 5  # pods in one answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What is seen beside the status. `pending`: pods of the current gang that do not run, each with why, as far as
    they may be read; `notes`: what the status does not say, as `stepfast status` shows it.
    """

    pending: tuple[str, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph:
    heading: str
    sentences: tuple[str, ...]


def explain(status: Status, limits: Limits | None, seen: Surroundings, now: float) -> tuple[Paragraph, ...]:
    """`limits`: None where the spec is not known; `now` in seconds since the epoch. A paragraph that has nothing to say
    is left out.
    """
    told = (
        ("now", [_describe_now(status, now)]),
        ("why it restarted", list(_why_restarted(status, now))),
        ("what that cost", list(_what_it_cost(status, now))),
        ("what it waits for", list(_what_it_waits_for(status, limits, seen, now))),
        ("what comes next", list(describe_next(status, limits, now))),
    )
    return tuple(Paragraph(heading=heading, sentences=tuple(said)) for heading, said in told if said)


def _describe_now(status: Status, now: float) -> str:
    current = status.current
    match status.state:
        case State.COMPLETE | State.FAILED:
            ended = f", {span_text(now - status.completion_time)} ago" if status.completion_time is not None else ""
            return f"{describe_end(status)}{ended}"
        case State.SUSPENDED:
            return "suspended: nothing of it runs"
        case State.PENDING:
            return "no attempt has begun" if current is None else "asked to go on, and no attempt has begun since"
        case State.RESTARTING if current is not None and current.ended_time is not None:
            return f"attempt {current.attempt} has ended {span_text(now - current.ended_time)} ago; the next one is due"
        case State.SUSPENDING:
            return f"attempt {status.attempt} is ending, as asked"
        case _:
            return _describe_attempt(status, now)


def _describe_attempt(status: Status, now: float) -> str:
    """The gang that runs, or is being started."""
    current, trainer = status.current, status.trainer_status
    if current is None:
        return str(status.state)
    if current.leaving is not None:
        return f"attempt {current.attempt} saves and leaves: {current.leaving.message}"
    if status.state is not State.RUNNING or trainer.global_step is None or current.first_step_time is None:
        start = f"step {current.start_step}" if current.start_step else "scratch"
        since = current.planned_time if current.restarted_time is None else current.restarted_time
        return f"attempt {current.attempt} starts from {start}, planned {span_text(now - since)} ago"
    pace = f", {trainer.steps_per_second:.2f} steps/s" if trainer.steps_per_second is not None else ""
    left = trainer.estimated_remaining_seconds
    rest = f", {span_text(left)} left" if left is not None else ""
    return f"attempt {current.attempt} trains: step {trainer.global_step}{pace}{rest}"


def _why_restarted(status: Status, now: float) -> Iterator[str]:
    """The remembered restarts, the newest last, which tells most."""
    if status.last_failure is None and not status.recoveries:
        if not status.is_terminal and status.attempt:
            is_leaving = status.open_attempt is not None and status.open_attempt.leaving is not None
            yield "it is about to, for the first time" if is_leaving else "it has not restarted"
        return
    whole = [recovery for recovery in status.recoveries if recovery.in_place_restart is None]
    older = status.restarts - len(whole)
    if older > 0:
        yield f"{count_text(older, 'older restart')}, of which no more is remembered"
    failure = status.last_failure
    for recovery in status.recoveries:
        is_last = failure is not None and recovery.in_place_restart is None and recovery.attempt == failure.attempt
        if not is_last:
            yield _describe_recovery(recovery, now)
    if failure is not None:
        rule = f"; rule {failure.rule} says {failure.action}" if failure.rule is not None else ""
        yield f"{describe_failure(failure)}, {span_text(now - failure.failure_time)} ago{rule}{_not_counted(failure)}"


def _describe_recovery(recovery: Recovery, now: float) -> str:
    who = f"rank {recovery.rank}" if recovery.rank is not None else recovery.node
    where = f" ({who})" if who is not None else ""
    ago = f"{span_text(now - recovery.failure_time)} ago"
    if recovery.in_place_restart is not None:
        times = f"restart {recovery.in_place_restart} in place"
        return f"attempt {recovery.attempt}: {recovery.cause}{where}, {ago}; torchrun started all ranks anew ({times})"
    counted = "" if recovery.counted else "; not counted towards maxRestarts"
    return f"attempt {recovery.attempt} failed: {recovery.cause}{where}, {ago}{counted}"


def _not_counted(failure: LastFailure) -> str:
    is_uncounted = failure.action == RuleAction.RESTART_IGNORING_MAX
    return "; not counted towards maxRestarts" if is_uncounted else ""


def _what_it_cost(status: Status, now: float) -> Iterator[str]:
    if status.restarts or status.steps_lost or status.interruptions:
        lost = (
            f"{count_text(status.steps_lost, 'step')} had to be made again" if status.steps_lost else "no step was lost"
        )
        yield f"{lost}, in {count_text(max(status.restarts, status.interruptions), 'restart')}"
    for recovery in status.recoveries[-1:]:
        yield _cost_of(recovery)
    goodput = goodput_of(status, now)
    if goodput is not None:
        yield f"goodput {goodput:.1%}: that share of the time that it was active went into training that is kept"


def _cost_of(recovery: Recovery) -> str:
    """The last recovery, and what of it took longest."""
    if recovery.resumed_time is None:
        return "the last recovery is not over yet"
    phases = phases_of(recovery)
    longest = max(phases, key=lambda phase: phase.seconds, default=None)
    most = f", most of it to {longest.name} ({span_text(longest.seconds)})" if longest is not None else ""
    lost = recovery.steps_lost or 0
    told = f"; {count_text(lost, 'step')} lost" if lost else "; nothing lost"
    return f"the last recovery took {span_text(recovery.resumed_time - recovery.failure_time)}{most}{told}"


def _what_it_waits_for(status: Status, limits: Limits | None, seen: Surroundings, now: float) -> Iterator[str]:
    for name, text in seen.notes:
        yield f"{name}: {text}"
    if status.is_terminal:
        return
    checkpoint = status.checkpoint
    if checkpoint.storage_error is not None:
        yield f"for the storage: {checkpoint.storage_error}"
    if checkpoint.persist_error is not None:
        yield f"for the storage to take what is staged: {checkpoint.persist_error}"
    fits = status.condition(ConditionType.FITS_MEMORY)
    if status.open_attempt is None and fits is not None and fits.status == "False":
        yield f"for a place that it fits: {fits.message}"
    if status.current is not None:
        yield from _attempt_waits_for(status, status.current, limits, seen, now)


def _attempt_waits_for(
    status: Status, current: Attempt, limits: Limits | None, seen: Surroundings, now: float
) -> Iterator[str]:
    if current.ended_time is not None:
        if current.flushed_time is None and status.state in (State.RESTARTING, State.SUSPENDING):
            yield f"for what attempt {current.attempt} has staged to be persisted{_flush_left(current, limits, now)}"
        return
    if current.suspending_time is not None:
        yield f"for a last checkpoint to be committed{_suspend_left(current, limits, now)}"
        return
    if current.leaving is not None:
        left = current.leaving.save_until_time - now
        yield f"for a last checkpoint to be committed{f', for at most {span_text(left)} more' if left > 0 else ''}"
        return
    if current.succeeded_time is not None:
        yield "for the last steps to be persisted: every worker has succeeded"
        return
    if not status.is_gang_up:
        yield from _pods(status, seen)
        yield from (describe_excluded(node) for node in status.excluded_nodes)
        yield from (describe_spared(node) for node in status.spared_nodes)


def _pods(status: Status, seen: Surroundings) -> Iterator[str]:
    """Which pods do not run; where none may be read, what the operator saw."""
    for pod in seen.pending[:_NAMED]:
        yield f"for pod {pod}"
    if len(seen.pending) > _NAMED:
        yield f"and for {count_text(len(seen.pending) - _NAMED, 'more pod')}"
    if seen.pending:
        return
    ready: Condition | None = status.condition(ConditionType.PODS_READY)
    yield ready.message if ready is not None and ready.message else "for all ranks to join"


def _flush_left(current: Attempt, limits: Limits | None, now: float) -> str:
    if limits is None or current.ended_time is None:
        return ""
    return _at_most(current.ended_time + limits.failure_policy.flush_timeout_seconds - now, "flushTimeoutSeconds")


def _suspend_left(current: Attempt, limits: Limits | None, now: float) -> str:
    if limits is None or current.suspending_time is None:
        return ""
    return _at_most(current.suspending_time + limits.graceful_suspend_seconds - now, "gracefulSuspendSeconds")


def _at_most(left: float, setting: str) -> str:
    return f", for at most {span_text(left)} more ({setting})" if left > 0 else f"; {setting} are over"


def text_of(paragraphs: Sequence[Paragraph]) -> str:
    """For a terminal: each heading, and its sentences below it."""
    return "\n".join(
        "\n".join([paragraph.heading, *(f"  - {sentence}" for sentence in paragraph.sentences)])
        for paragraph in paragraphs
    )
