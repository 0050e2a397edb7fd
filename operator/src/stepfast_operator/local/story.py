"""The job's story in lines: what is worth saying between two statuses. Pure."""

from __future__ import annotations

import re

from stepfast.cli.table import size_text
from stepfast_operator.actions import LaunchGang, StartAgent, SupersedeAfter
from stepfast_operator.reconcile import Pass
from stepfast_operator.record import Attempt, LastFailure, Recovery, State, Status, Verdict

COMMIT_LINE_SECONDS = 5.0


def tell(seen: Pass) -> list[str]:
    """What this pass brought, in order, one line for each event."""
    before, after = seen.before, seen.after
    lines = [_rolled_back(action) for action in seen.decision.actions if isinstance(action, SupersedeAfter)]
    lines += [_launched(action, after) for action in seen.decision.actions if isinstance(action, LaunchGang)]
    if before.current is not None:
        lines += ["the agent is started" for action in seen.decision.actions if isinstance(action, StartAgent)]
    lines += _attempt_lines(before.current, after.current, after)
    if after.last_failure is not None and after.last_failure != before.last_failure:
        lines.append(describe_failure(after.last_failure))
    if after.attempt > before.attempt and after.current is not None:
        lines.append(_planned(after.current, after))
    error = after.checkpoint.persist_error
    if error != before.checkpoint.persist_error:
        lines.append(f"persisting fails: {error}" if error is not None else "persisting works again")
    error = after.checkpoint.storage_error
    if error != before.checkpoint.storage_error and not after.is_terminal:
        lines.append(f"waiting for the storage: {error}" if error is not None else "the storage answers again")
    if after.terminal_state is not None and before.terminal_state is None:
        lines.append(_ended(after))
    return lines


def describe_failure(failure: LastFailure) -> str:
    who = f"rank {failure.rank}" if failure.rank is not None else failure.node or "the gang"
    code = f"exit code {failure.exit_code}" if failure.exit_code is not None else ""
    # What a launcher says ends with it most often.
    code = f", {code}" if code and not re.search(rf"\b{code}\b", failure.message) else ""
    message = f": {failure.message}" if failure.message else ""
    return f"attempt {failure.attempt} failed: {failure.reason} ({who}{code}){message}"


def describe_commit(status: Status) -> str:
    checkpoint = status.checkpoint
    size = f" ({size_text(checkpoint.size_bytes)})" if checkpoint.size_bytes else ""
    return f"step {checkpoint.latest_persisted_step} committed{size}"


def has_trained_for_nothing(status: Status) -> bool:
    """Whether steps were made and none was ever committed."""
    return (
        status.current is not None
        and status.current.newest_step is not None
        and status.checkpoint.latest_persisted_step is None
    )


def _rolled_back(action: SupersedeAfter) -> str:
    return f"rolling back to {f'step {action.step}' if action.step > 0 else 'scratch'}: later steps are superseded"


def _launched(launch: LaunchGang, status: Status) -> str:
    nodes = status.nodes.desired
    where = f" on {nodes} nodes" if nodes > 1 else ""
    return f"attempt {launch.attempt} launched{where}, run {launch.run}"


def _planned(attempt: Attempt, status: Status) -> str:
    start = f"step {attempt.resume_step}" if attempt.resume_step else "scratch"
    if attempt.attempt == 1:
        return f"attempt 1 starts from {start}"
    recovery = _recovery_before(status.recoveries, attempt)
    lost = recovery.steps_lost if recovery is not None else None
    told = f", {count_text(lost, 'step')} lost" if lost is not None else ""
    return f"attempt {attempt.attempt} starts from {start}{told}"


def _recovery_before(recoveries: tuple[Recovery, ...], attempt: Attempt) -> Recovery | None:
    return recoveries[-1] if recoveries and recoveries[-1].attempt + 1 == attempt.attempt else None


def _attempt_lines(before: Attempt | None, after: Attempt | None, status: Status) -> list[str]:
    if after is None:
        return []
    if before is None or before.attempt != after.attempt:
        return []
    lines = []
    if after.pods_ready_time is not None and before.pods_ready_time is None:
        lines.append("all ranks are here")
    lines += _restored_lines(before, after, status)
    if after.hang_notified_time is not None and before.hang_notified_time is None:
        lines.append("no new step for too long: the gang seems to hang")
    if after.flush_timed_out and not before.flush_timed_out:
        is_resumed_later = after.verdict is Verdict.SUSPEND
        going_on = "the same command persists what is left" if is_resumed_later else "going on with what is committed"
        lines.append(f"flushing took too long: {going_on}")
    return lines


def _restored_lines(before: Attempt, after: Attempt, status: Status) -> list[str]:
    """What was restored, said once: when all ranks have, or when they train without."""
    was_told = before.restored_time is not None or before.first_step_time is not None
    is_all = after.restored_time is not None
    if was_told or not (is_all or after.first_step_time is not None) or not (after.resume_step or after.start_step):
        return []
    tier = f" from {status.checkpoint.restored_tier}" if status.checkpoint.restored_tier else ""
    what = f"step {after.start_step}{tier}" if after.start_step else "nothing"
    if after.start_step == after.resume_step:
        return [f"all ranks restored {what}"] if is_all else []
    lost = f", {count_text(after.steps_lost, 'step')} lost" if after.steps_lost else ""
    planned = f"step {after.resume_step}"
    if not is_all:
        return [f"{planned} was to be restored, and the ranks train without it: {what} was restored{lost}"]
    if after.start_step > after.resume_step:
        return [f"all ranks restored {what}, as the script asked for"]
    return [f"{planned} is damaged or was not asked for, all ranks restored {what}{lost}"]


def count_text(count: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _ended(status: Status) -> str:
    if status.state is State.COMPLETE:
        return "complete, but nothing was committed" if has_trained_for_nothing(status) else "complete"
    reason = status.current.fail_reason if status.current is not None else None
    message = status.current.fail_message if status.current is not None else ""
    return f"failed: {reason}" + (f": {message}" if message else "")
