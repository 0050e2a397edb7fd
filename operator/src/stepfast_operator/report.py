"""What a job's status says, in words and tables: the same ones at the end of `stepfast run` and in `stepfast status`,
for a job on this machine and one in a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.table import Table
from rich.text import Text

from stepfast.sizes import size_text
from stepfast_operator.document import JSON
from stepfast_operator.goodput import goodput_of
from stepfast_operator.record import Condition, ConditionType, FailedReason, Recovery, State, Status
from stepfast_operator.recoveryphases import PHASES, phases_of
from stepfast_operator.sentences import count_text, describe_failure, has_trained_for_nothing, span_text

RECOVERY_HEADINGS = (
    "after attempt",
    "cause",
    *PHASES,
    "total",
    "steps lost",
    "tier",
)
NONE = "–"  # where there is nothing to tell
_LEFT = frozenset({"cause", "tier"})
# What a condition says when all is well. The terminal ones repeat the state.
_GOOD = {
    ConditionType.PODS_READY: "True",
    ConditionType.PROGRESSING: "True",
    ConditionType.CHECKPOINT_FRESH: "True",
    ConditionType.FITS_MEMORY: "True",
    ConditionType.RESTARTING: "False",
    ConditionType.SUSPENDED: "False",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A job to show. `facts` are rows of name and value."""

    title: str
    facts: Sequence[tuple[str, str]]
    status: Status

    def render(self) -> Group:
        """The tables, for a console. No text of the job's is taken for rich's own markup."""
        table = Table(title=Text(self.title), show_header=False, title_justify="left", min_width=60)
        for name, value in self.facts:
            table.add_row(name, Text(value))
        return Group(table, _recoveries(self.status)) if self.status.recoveries else Group(table)


def summary_document(document: JSON) -> dict[str, JSON]:
    """The job's status as JSON, as the API shows it, at the top level; and the job's metadata beside it."""
    return {"metadata": document["metadata"], **(document.get("status") or {})}


def glance(status: Status) -> str:
    """The job in one line."""
    checkpoint = status.checkpoint
    behind = f" ({checkpoint.persist_lag_steps} behind)" if checkpoint.persist_lag_steps else ""
    cells = [
        str(status.state),
        f"attempt {status.attempt}",
        f"step {_or_dash(status.trainer_status.global_step)}",
        f"persisted {_or_dash(checkpoint.latest_persisted_step)}{behind}",
    ]
    return "  ".join(cells + ([f"persisting fails: {checkpoint.persist_error}"] if checkpoint.persist_error else []))


def facts_of(status: Status, now: float | None = None) -> list[tuple[str, str]]:
    """What there is to know, one row each. With `now` (seconds since the epoch) of a job that may be going on: since
    when, how long ago, what is not as it should be.
    """
    checkpoint, current = status.checkpoint, status.current
    facts = [("state", str(status.state))]
    if current is not None and current.fail_reason is not None:
        facts.append(("reason", f"{current.fail_reason}: {current.fail_message}".rstrip(": ")))
    if now is not None and not status.is_terminal:
        facts += _conditions(status, now)
    fits = status.condition(ConditionType.FITS_MEMORY)
    if fits is not None and fits.status == "False" and _is_over(status, now) and not _is_refused(status):
        facts.append(("memory", f"too small: {fits.message}"))  # why it failed, perhaps
    if status.last_failure is not None:
        facts.append(("last failure", describe_failure(status.last_failure)))
    if now is not None and not status.is_terminal and status.nodes.desired > 1:
        facts.append(("nodes", f"{status.nodes.ready} of {status.nodes.desired} ready"))
    counted = status.restarts_count_towards_max
    facts += [
        ("attempts", str(status.attempt)),
        (
            "restarts",
            f"{status.restarts} ({counted} counted)" if counted != status.restarts else str(status.restarts),
        ),
        ("last step", _last_step(status)),
        ("steps lost", str(status.steps_lost)),
        *_saves(status),
        ("latest committed step", _latest(status, now)),
    ]
    if now is not None and not status.is_terminal and checkpoint.restored_step is not None:
        tier = f" from {checkpoint.restored_tier}" if checkpoint.restored_tier else ""
        facts.append(("restored", f"step {checkpoint.restored_step}{tier}"))
    goodput = status.goodput_ratio if now is None else goodput_of(status, now)
    if goodput is not None:
        facts.append(("goodput", f"{goodput:.1%}"))
    if checkpoint.persist_error is not None:
        facts.append(("persisting fails", checkpoint.persist_error))
    if now is not None and checkpoint.storage_error is not None and not status.is_terminal:
        facts.append(("waiting for storage", checkpoint.storage_error))
    return facts


def _is_over(status: Status, now: float | None) -> bool:
    """Whether its conditions are told no more."""
    return now is None or status.is_terminal


def _is_refused(status: Status) -> bool:
    """Whether that it does not fit its memory is why it failed."""
    return status.current is not None and status.current.fail_reason is FailedReason.DOES_NOT_FIT_MEMORY


def _recoveries(status: Status) -> Table:
    """Each recovery with its phases, each phase from the end of the one before it."""
    table = Table(title="Recoveries", title_justify="left")
    for heading in RECOVERY_HEADINGS:
        table.add_column(heading, justify="left" if heading in _LEFT else "right")
    for recovery in status.recoveries:
        table.add_row(*(Text(cell) for cell in recovery_cells(recovery, has_nodes=status.nodes.desired > 1)))
    return table


def _conditions(status: Status, now: float) -> Iterator[tuple[str, str]]:
    """Those that are not as they should be, each with why and since when."""
    for condition in status.conditions:
        good = _GOOD.get(condition.type)
        if good is None or condition.status == good or _is_said_by_the_state(condition, status.state):
            continue
        since = f" for {span_text(now - condition.last_transition_time)}" if condition.last_transition_time else ""
        message = f": {condition.message}" if condition.message else ""
        yield str(condition.type), f"{condition.status}{since}: {condition.reason}{message}"


def _is_said_by_the_state(condition: Condition, state: State) -> bool:
    match condition.type:
        case ConditionType.SUSPENDED:
            return state is State.SUSPENDED
        case ConditionType.PODS_READY:
            return state is not State.RUNNING
        case ConditionType.CHECKPOINT_FRESH:
            return condition.reason in ("NoCheckpoint", "PersistFailed")
        case ConditionType.RESTARTING:
            return False
        case _:
            return False


def _last_step(status: Status) -> str:
    trainer = status.trainer_status
    cells = [_or_dash(trainer.global_step)]
    if not status.is_terminal:
        if trainer.progress_percentage is not None:
            cells.append(f"{trainer.progress_percentage} %")
        if trainer.steps_per_second is not None:
            cells.append(f"{trainer.steps_per_second:.2f} steps/s")
        if trainer.estimated_remaining_seconds is not None:
            cells.append(f"{span_text(trainer.estimated_remaining_seconds)} left")
    return ", ".join(cells)


def _saves(status: Status) -> list[tuple[str, str]]:
    saves = status.checkpoint.saves
    return [
        ("saves", f"{saves.count} ({saves.skipped} skipped, {saves.dropped} not persisted)"),
        ("stall per save", f"mean {_ms(saves.stall_seconds_mean)}, at most {_ms(saves.stall_seconds_max)}"),
    ]


def _latest(status: Status, now: float | None) -> str:
    checkpoint = status.checkpoint
    if checkpoint.latest_persisted_step is None:
        is_over = now is None or status.is_terminal
        return "none: nothing was committed" if is_over and has_trained_for_nothing(status) else "none"
    size = f" ({size_text(checkpoint.size_bytes)})" if checkpoint.size_bytes else ""
    if now is None:
        return f"{checkpoint.latest_persisted_step}{size}"
    committed = checkpoint.latest_persisted_time
    age = f", {span_text(now - committed)} ago" if committed is not None else ""
    return f"{checkpoint.latest_persisted_step}{size}{age}{_lag(status)}"


def _lag(status: Status) -> str:
    steps, seconds = status.checkpoint.persist_lag_steps, status.checkpoint.persist_lag_seconds
    if not steps:
        return ""
    spent = f" ({span_text(seconds)} of training)" if seconds is not None else ""
    return f"; {count_text(steps, 'step')}{spent} behind training"


def recovery_cells(recovery: Recovery, *, has_nodes: bool) -> list[str]:
    """One recovery, under `RECOVERY_HEADINGS`."""
    return [
        f"{recovery.attempt}, in place" if recovery.in_place_restart is not None else str(recovery.attempt),
        _who(recovery, has_nodes=has_nodes),
        *_phases(recovery),
        _or_dash(recovery.steps_lost),
        recovery.restored_tier or NONE,
    ]


def _who(recovery: Recovery, *, has_nodes: bool) -> str:
    """The rank, and its node where there are several."""
    where = [f"rank {recovery.rank}"] if recovery.rank is not None else []
    where += [recovery.node] if recovery.node is not None and (has_nodes or not where) else []
    return f"{recovery.cause} ({', '.join(where)})" if where else str(recovery.cause)


def _phases(recovery: Recovery) -> list[str]:
    """How long each of its phases took, and all of it."""
    took = {phase.name: f"{phase.seconds:.2f} s" for phase in phases_of(recovery)}
    cells = [took.get(name, NONE) for name in PHASES]
    if recovery.resumed_time is None:
        return [*cells, NONE]
    return [*cells, f"{max(0.0, recovery.resumed_time - recovery.failure_time):.2f} s"]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _or_dash(value: int | None) -> str:
    return NONE if value is None else str(value)
