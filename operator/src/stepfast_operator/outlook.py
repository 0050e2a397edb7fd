"""What will happen to a job next, and when: deadlines, budgets, the step that it would go on from. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from stepfast_operator.limits import Limits
from stepfast_operator.policies import elastic, queueing
from stepfast_operator.policies.restart import UNCOUNTED, backoff_seconds, has_progress
from stepfast_operator.record import Attempt, State, Status
from stepfast_operator.sentences import count_text, span_text
from stepfast_operator.spec import HangAction, ResumePolicy


def describe_next(status: Status, limits: Limits | None, now: float) -> Iterator[str]:
    """`limits`: None where the spec is not known, and nothing is said of what it bounds."""
    if status.is_terminal:
        yield from _over(status, limits, now)
        return
    if status.state is State.SUSPENDED:
        yield f"it stays so until it is resumed; then it goes on from {_start(status, limits)}"
        return
    if status.state is State.SUSPENDING:
        yield "it is suspended then"
        return
    current = status.current
    if current is None:
        yield "attempt 1 begins when nothing stands in its way"
    elif status.state is State.RESTARTING and current.ended_time is not None:
        yield from _following(status, limits, now)
    elif current.leaving is not None:
        nodes = current.leaving.nodes
        where = f"with {count_text(nodes, 'node')}" if nodes is not None else "on other nodes"
        yield f"attempt {status.attempt + 1} starts {where} once this one has saved and ended"
        return
    if limits is None:
        return
    if current is not None and current.ended_time is None:
        yield from _deadlines(status, current, limits, now)
    yield from _active(status, limits, now)
    if current is not None:
        yield from _budgets(status, limits)


def _over(status: Status, limits: Limits | None, now: float) -> Iterator[str]:
    step = status.checkpoint.latest_persisted_step
    yield "it is never run again" + (
        f"; a job of the same name goes on from step {step}" if step is not None else "; nothing was committed"
    )
    ttl = limits.ttl_seconds_after_finished if limits is not None else None
    if ttl is not None and status.completion_time is not None:
        left = status.completion_time + ttl - now
        when = f"in {span_text(left)}" if left > 0 else "now"
        yield f"it is deleted {when} (ttlSecondsAfterFinished)"


def _start(status: Status, limits: Limits | None) -> str:
    """The step that the next attempt starts from, as far as it can be said."""
    if limits is not None and limits.resume_policy is ResumePolicy.NEVER:
        return "scratch (resumePolicy: Never)"
    step = status.checkpoint.latest_persisted_step
    return f"step {step}" if step is not None else "scratch: nothing is committed"


def _following(status: Status, limits: Limits | None, now: float) -> Iterator[str]:
    """The attempt after the one that has ended."""
    wait = _backoff_left(status, limits, now)
    when = f"in {span_text(wait)}, when the backoff is over" if wait > 0 else "as soon as nothing stands in its way"
    yield f"attempt {status.attempt + 1} starts {when}, from {_start(status, limits)}"


def _backoff_left(status: Status, limits: Limits | None, now: float) -> float:
    current, failure = status.current, status.last_failure
    if limits is None or current is None or current.ended_time is None:
        return 0.0
    if failure is None or failure.attempt != current.attempt or failure.reason in UNCOUNTED:
        return 0.0
    is_ahead = has_progress(status, status.checkpoint.latest_persisted_step)
    without = 0 if is_ahead else status.restarts_without_progress + 1
    return current.ended_time + backoff_seconds(limits.failure_policy.backoff, without) - now


def _deadlines(status: Status, current: Attempt, limits: Limits, now: float) -> Iterator[str]:
    if not status.is_gang_up and current.suspending_time is None:
        if status.is_queued:
            yield "while the gang waits in its queue no deadline runs: it starts once it is admitted as a whole"
            return
        since = current.planned_time if current.restarted_time is None else current.restarted_time
        yield from _smaller(status, current, limits, now)
        due = max(since, current.dequeued_time or since) + limits.startup_deadline_seconds
        patient = elastic.startup_until(limits.elastic_policy, status.nodes.desired, current, current.launched_time)
        left = max(due, patient) - now
        if current.newest_step is None:
            yield f"unless all ranks are here {_in(left)}, the job fails for good (startupDeadlineSeconds)"
    elif limits.elastic_policy is not None and status.nodes.desired < limits.max_nodes:
        most = count_text(limits.max_nodes, "node")
        yield f"the gang grows, to at most {most}, when a step of it is committed and there is place (elasticPolicy)"
        until = elastic.held_until(limits.elastic_policy, current)
        if until is not None and until > now:
            yield (
                f"it tries to in {span_text(until - now)}: {count_text(current.shrinks, 'time')} in a row there was "
                f"no place for all pods of a gang, the largest of {count_text(current.shrunk_from, 'node')}"
            )
    last = current.steady_step_time or current.newest_step_time
    if status.is_gang_up and last is not None:
        policy = limits.progress_policy
        what = "is restarted" if policy.action is HangAction.RESTART_JOB else "is said to hang"
        left = last + policy.progress_deadline_seconds - now
        yield f"unless a new step is made {_in(left)}, the gang {what} (progressDeadlineSeconds)"
    limit, committed = limits.max_staleness_seconds, status.checkpoint.latest_persisted_time
    if limit is not None and current.first_step_time is not None and _has_uncommitted(status, current):
        left = max(committed or 0.0, current.first_step_time) + limit - now
        yield f"unless a step is committed {_in(left)}, CheckpointFresh is False (maxStalenessSeconds)"


def _smaller(status: Status, current: Attempt, limits: Limits, now: float) -> Iterator[str]:
    policy = limits.elastic_policy
    if policy is not None and policy.min_nodes < status.nodes.desired:
        left = elastic.patience_until(policy, current, current.launched_time) - now
        least = count_text(policy.min_nodes, "node")
        yield (
            f"unless there is place for all its pods {_in(left)}, the gang goes on with fewer, with {least} at least "
            "(scaleDownTimeoutSeconds)"
        )


def _has_uncommitted(status: Status, current: Attempt) -> bool:
    return current.newest_step is not None and current.newest_step > (status.checkpoint.latest_persisted_step or 0)


def _active(status: Status, limits: Limits, now: float) -> Iterator[str]:
    if limits.active_deadline_seconds is not None and status.start_time is not None and not status.is_queued:
        queued = queueing.queued_seconds(status, now)
        left = status.start_time + limits.active_deadline_seconds + queued - now
        yield f"unless it is complete {_in(left)}, the job fails for good (activeDeadlineSeconds)"


def _budgets(status: Status, limits: Limits) -> Iterator[str]:
    """How many more failures it survives, and what one would cost now."""
    policy, current = limits.failure_policy, status.current
    left = max(0, policy.max_restarts - status.restarts_count_towards_max)
    if left:
        yield f"{count_text(left, 'more restart')} of {policy.max_restarts} may follow failures (maxRestarts)"
    else:
        yield f"the next failure that counts ends the job: all {policy.max_restarts} restarts are used (maxRestarts)"
    without = status.restarts_without_progress
    if without:
        yield (
            f"{count_text(without, 'restart')} in a row brought no newer committed step, at most "
            f"{policy.max_restarts_without_progress} may (maxRestartsWithoutProgress)"
        )
    if current is not None and current.ended_time is None and current.newest_step is not None:
        is_kept = limits.resume_policy is not ResumePolicy.NEVER
        kept = (status.checkpoint.latest_persisted_step or 0) if is_kept else 0
        at_risk = max(0, current.newest_step - kept)
        yield f"after a failure now it would go on from {_start(status, limits)}, {_lost(at_risk)}"


def _lost(steps: int) -> str:
    """Memory may hold newer steps than the storage: this is the most that can be lost."""
    return f"at most {count_text(steps, 'step')} lost" if steps else "nothing lost"


def _in(seconds: float) -> str:
    return f"within {span_text(seconds)}" if seconds > 0 else "at once"
