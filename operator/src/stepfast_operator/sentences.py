"""What is said of a job, sentence by sentence: the terminal and the cluster's Events tell one story. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from stepfast.sizes import size_text
from stepfast_operator.observed import Failure
from stepfast_operator.record import (
    NO_FAILURES,
    Attempt,
    ConditionType,
    ExcludedNode,
    LastFailure,
    Recovery,
    SparedNode,
    State,
    Status,
)

ALL_RANKS = "all ranks are here"
_NO_RANK = "no rank uses the SDK yet"
PODS_WITHOUT_RANKS = f"all pods run; {_NO_RANK}"
GANG_WITHOUT_RANKS = f"the gang runs; {_NO_RANK}"
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def describe_failure(failure: LastFailure) -> str:
    where = f" on {failure.node}" if failure.pod is not None and failure.node is not None else ""
    who = f"rank {failure.rank}" if failure.rank is not None else failure.pod or failure.node or "the gang"
    code = f"exit code {failure.exit_code}" if failure.exit_code is not None else ""
    # What a launcher says ends with it most often.
    code = f", {code}" if code and not re.search(rf"\b{code}\b", failure.message) else ""
    message = f": {failure.message}" if failure.message else ""
    if failure.reason in NO_FAILURES:
        return f"attempt {failure.attempt} ended: {failure.reason}{message}"
    return f"attempt {failure.attempt} failed: {failure.reason} ({who}{where}{code}){message}"


def with_seen_first(cause: str, seen: Failure | LastFailure) -> str:
    """The true cause of an attempt's end, and what it was taken for, or would have been."""
    who = f"rank {seen.rank}" if seen.rank is not None else seen.node or "a worker"
    message = f"{cause}; seen first: {who} failed"
    return f"{message}: {seen.message}" if seen.message else message


def describe_in_place(recovery: Recovery) -> str:
    """That torchrun starts the ranks anew by itself, and why."""
    who = f"rank {recovery.rank}" if recovery.rank is not None else "a rank"
    where = f" on {recovery.node}" if recovery.node is not None else ""
    times = f"restart {recovery.in_place_restart} in place"
    return f"attempt {recovery.attempt}: {who}{where} died; torchrun has started all ranks anew ({times})"


def describe_plan(attempt: Attempt, status: Status) -> str:
    start = f"step {attempt.resume_step}" if attempt.resume_step else "scratch"
    if attempt.attempt == 1:
        return f"attempt 1 starts from {start}"
    recovery = next((last for last in status.recoveries[-1:] if last.is_ended_by(attempt)), None)
    lost = recovery.steps_lost if recovery is not None else None
    told = f", {count_text(lost, 'step')} lost" if lost is not None else ""
    return f"attempt {attempt.attempt} starts from {start}{told}"


def describe_restore(before: Attempt, after: Attempt, status: Status) -> str | None:
    """What was restored, said once: when all ranks have, or when they train without."""
    is_same = before.in_place_restarts == after.in_place_restarts
    is_all = after.restored_time is not None
    if (is_same and _is_restore_told(before)) or not (is_all or after.first_step_time is not None):
        return None
    if not (after.resume_step or after.start_step):
        return None
    tier = f" from {status.checkpoint.restored_tier}" if status.checkpoint.restored_tier else ""
    what = f"step {after.start_step}{tier}" if after.start_step else "nothing"
    lost = f", {count_text(after.steps_lost, 'step')} lost" if after.steps_lost else ""
    if after.in_place_restarts:  # the ranks agreed on the step themselves
        return f"all ranks restored {what}{lost}" if is_all else None
    if after.start_step == after.resume_step:
        return f"all ranks restored {what}" if is_all else None
    planned = f"step {after.resume_step}"
    if not is_all:
        return f"{planned} was to be restored, and the ranks train without it: {what} was restored{lost}"
    if after.start_step > after.resume_step:
        return f"all ranks restored {what}, as the script asked for"
    return f"{planned} is damaged or was not asked for, all ranks restored {what}{lost}"


def _is_restore_told(attempt: Attempt) -> bool:
    if attempt.restored_time is not None:
        return True
    is_other = not attempt.in_place_restarts and attempt.start_step != attempt.resume_step
    return is_other and attempt.first_step_time is not None  # else it is said once the last node has told of it


def describe_recovery(recovery: Recovery) -> str:
    """That training goes on, what it cost."""
    lost = f", {count_text(recovery.steps_lost, 'step')} lost" if recovery.steps_lost else ", nothing lost"
    seconds, what = recovery.duration_seconds or 0.0, "end" if recovery.cause in NO_FAILURES else "failure"
    return f"training goes on {seconds:.1f} s after the {what} of attempt {recovery.attempt}{lost}"


def describe_excluded(node: ExcludedNode) -> str:
    until = datetime.fromtimestamp(node.until_time, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return f"node {node.name} is kept off until {until}: {node.reason}"


def describe_spared(node: SparedNode) -> str:
    """That a limit stands against keeping off a node."""
    return f"node {node.name} is not kept off ({node.reason}): {node.limit}"


def describe_fit(before: Status, after: Status) -> str | None:
    """That the job is not known to fit its memory, said when that is news."""
    old, new = (status.condition(ConditionType.FITS_MEMORY) for status in (before, after))
    if new is None or new.status == "True":
        return None
    if old is not None and (old.status, old.reason, old.message) == (new.status, new.reason, new.message):
        return None
    verdict = "does not fit its memory" if new.status == "False" else "may not fit its memory"
    return f"the job {verdict}: {new.message}"


def describe_commit(status: Status) -> str:
    checkpoint = status.checkpoint
    size = f" ({size_text(checkpoint.size_bytes)})" if checkpoint.size_bytes else ""
    return f"step {checkpoint.latest_persisted_step} committed{size}"


def describe_end(status: Status) -> str:
    if status.state is State.COMPLETE:
        return "complete, but nothing was committed" if has_trained_for_nothing(status) else "complete"
    reason = status.current.fail_reason if status.current is not None else None
    message = status.current.fail_message if status.current is not None else ""
    return f"failed: {reason}" + (f": {message}" if message else "")


def has_trained_for_nothing(status: Status) -> bool:
    """Whether steps were made and none was ever committed."""
    return (
        status.current is not None
        and status.current.newest_step is not None
        and status.checkpoint.latest_persisted_step is None
    )


def count_text(count: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def span_text(seconds: float) -> str:
    """A length of time in the unit that fits it, as `0.4 s`, `35 s`, `2.5 min`."""
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(0.0, seconds):.{0 if seconds >= 10 else 1}f} s"
