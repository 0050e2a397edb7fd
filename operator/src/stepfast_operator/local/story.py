"""The job's story in lines: what is worth saying on a terminal between two statuses. Pure."""

from __future__ import annotations

from stepfast_operator import sentences
from stepfast_operator.actions import LaunchGang, StartAgent, SupersedeAfter
from stepfast_operator.reconcile import Pass
from stepfast_operator.record import Attempt, Status, Verdict

COMMIT_LINE_SECONDS = 5.0


def tell(seen: Pass) -> list[str]:
    """What this pass brought, in order, one line for each event."""
    before, after = seen.before, seen.after
    unfit = sentences.describe_fit(before, after)
    # That it was refused for it is said at its end.
    lines = [unfit] if unfit is not None and not after.is_terminal else []
    lines += [_rolled_back(action) for action in seen.decision.actions if isinstance(action, SupersedeAfter)]
    lines += [_launched(action, after) for action in seen.decision.actions if isinstance(action, LaunchGang)]
    if before.current is not None:
        lines += ["the agent is started" for action in seen.decision.actions if isinstance(action, StartAgent)]
    lines += _attempt_lines(before.current, after.current, after)
    if after.is_up_without_ranks and not before.is_up_without_ranks:
        lines.append(sentences.GANG_WITHOUT_RANKS)
    if after.last_failure is not None and after.last_failure != before.last_failure:
        lines.append(sentences.describe_failure(after.last_failure))
    if after.attempt > before.attempt and after.current is not None:
        lines.append(sentences.describe_plan(after.current, after))
    error = after.checkpoint.persist_error
    if error != before.checkpoint.persist_error:
        lines.append(f"persisting fails: {error}" if error is not None else "persisting works again")
    error = after.checkpoint.storage_error
    if error != before.checkpoint.storage_error and not after.is_terminal:
        lines.append(f"waiting for the storage: {error}" if error is not None else "the storage answers again")
    if after.terminal_state is not None and before.terminal_state is None:
        lines.append(sentences.describe_end(after))
    return lines


def _rolled_back(action: SupersedeAfter) -> str:
    return f"rolling back to {f'step {action.step}' if action.step > 0 else 'scratch'}: later steps are superseded"


def _launched(launch: LaunchGang, status: Status) -> str:
    nodes = status.nodes.desired
    where = f" on {nodes} nodes" if nodes > 1 else ""
    return f"attempt {launch.attempt} launched{where}, run {launch.run}"


def _attempt_lines(before: Attempt | None, after: Attempt | None, status: Status) -> list[str]:
    if after is None or before is None or before.attempt != after.attempt:
        return []
    lines = []
    if after.in_place_restarts > before.in_place_restarts:
        lines.append(sentences.describe_in_place(status.recoveries[-1]))
    if after.pods_ready_time is not None and before.pods_ready_time is None:
        lines.append(sentences.ALL_RANKS)
    restored = sentences.describe_restore(before, after, status)
    if restored is not None:
        lines.append(restored)
    if after.hang_notified_time is not None and before.hang_notified_time is None:
        lines.append("no new step for too long: the gang seems to hang")
    if after.flush_timed_out and not before.flush_timed_out:
        is_resumed_later = after.verdict is Verdict.SUSPEND
        going_on = "the same command persists what is left" if is_resumed_later else "going on with what is committed"
        lines.append(f"flushing took too long: {going_on}")
    return lines
