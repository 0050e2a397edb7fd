"""The end of `stepfast run`: what happened, in a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from stepfast.sizes import size_text
from stepfast.step import JobKey
from stepfast_operator.backends.statefolder import document_of
from stepfast_operator.local.session import Outcome
from stepfast_operator.record import Recovery, State, Status
from stepfast_operator.sentences import count_text, describe_failure, has_trained_for_nothing
from stepfast_operator.spec import ResumePolicy, TrainingJob


def write_summary(path: Path, job: JobKey, outcome: Outcome) -> None:
    """The job's status as JSON, as the API shows it, at the top level; and the job's metadata beside it."""
    document = document_of(job, outcome.uid, outcome.status)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"metadata": document["metadata"], **document["status"]}, indent=2) + "\n",
        encoding="utf-8",
    )


def print_summary(console: Console, job: TrainingJob, outcome: Outcome) -> None:
    """The summary for the eye."""
    status = outcome.status
    table = Table(title=f"{job.job}", show_header=False, title_justify="left", min_width=60)
    for name, value in _facts(status):
        table.add_row(name, value)
    table.add_row("checkpoints", outcome.storage_uri)
    table.add_row("logs", str(outcome.state_folder))
    console.print(table)
    if status.recoveries:
        console.print(_recoveries(status))
    closing = _closing(status, job.spec.checkpoint.resume_policy)
    if closing is not None:
        console.print(closing)


def _closing(status: Status, policy: ResumePolicy) -> str | None:
    """What the next run of the command starts from, and what is not safe."""
    if status.state is not State.SUSPENDED:
        return "Nothing was committed: the steps of this job are lost." if has_trained_for_nothing(status) else None
    request = status.resume_request
    without = ", without --resume-from-step," if request is not None and request.command is not None else ""
    persisted, newest = status.checkpoint.latest_persisted_step, status.trainer_status.global_step
    if policy is ResumePolicy.NEVER:
        return "Suspended. The same command starts from scratch (resumePolicy: Never)."
    if status.current is not None and status.current.flush_timed_out:
        return f"Suspended. The same command{without} persists first what memory still holds, and goes on from there."
    if persisted is None:
        return f"Suspended. Nothing was committed: the same command{without} starts from scratch."
    behind = max(0, (newest or 0) - persisted)
    lost = f"; {count_text(behind, 'step')} after it {'was' if behind == 1 else 'were'} not persisted" if behind else ""
    return f"Suspended. The same command{without} goes on from step {persisted}{lost}."


def _facts(status: Status) -> list[tuple[str, str]]:
    checkpoint, saves = status.checkpoint, status.checkpoint.saves
    facts = [("state", str(status.state))]
    current = status.current
    if current is not None and current.fail_reason is not None:
        facts.append(("reason", f"{current.fail_reason}: {current.fail_message}".rstrip(": ")))
    if status.last_failure is not None:
        facts.append(("last failure", describe_failure(status.last_failure)))
    counted = status.restarts_count_towards_max
    facts += [
        ("attempts", str(status.attempt)),
        (
            "restarts",
            f"{status.restarts} ({counted} counted)" if counted != status.restarts else str(status.restarts),
        ),
        ("last step", _or_dash(status.trainer_status.global_step)),
        ("steps lost", str(status.steps_lost)),
        ("saves", f"{saves.count} ({saves.skipped} skipped, {saves.dropped} not persisted)"),
        ("stall per save", f"mean {_ms(saves.stall_seconds_mean)}, at most {_ms(saves.stall_seconds_max)}"),
        ("latest committed step", _latest(status)),
    ]
    if status.goodput_ratio is not None:
        facts.append(("goodput", f"{status.goodput_ratio:.1%}"))
    if checkpoint.persist_error is not None:
        facts.append(("persisting fails", checkpoint.persist_error))
    return facts


def _latest(status: Status) -> str:
    checkpoint = status.checkpoint
    if checkpoint.latest_persisted_step is None:
        return "none: nothing was committed" if has_trained_for_nothing(status) else "none"
    size = f" ({size_text(checkpoint.size_bytes)})" if checkpoint.size_bytes else ""
    return f"{checkpoint.latest_persisted_step}{size}"


def _recoveries(status: Status) -> Table:
    table = Table(title="Recoveries", title_justify="left")
    for heading in (
        "after attempt",
        "cause",
        "detect",
        "flush",
        "launch + join",
        "restore",
        "resume",
        "total",
        "steps lost",
    ):
        table.add_column(heading, justify="left" if heading == "cause" else "right")
    for recovery in status.recoveries:
        table.add_row(str(recovery.attempt), _who(recovery), *_phases(recovery), _or_dash(recovery.steps_lost))
    return table


def _who(recovery: Recovery) -> str:
    return f"{recovery.cause} (rank {recovery.rank})" if recovery.rank is not None else str(recovery.cause)


def _phases(recovery: Recovery) -> list[str]:
    """Seconds of each phase, each from the end of the one before it."""
    restored = recovery.restored_time or recovery.pods_ready_time
    return [
        _seconds(recovery.failure_time, recovery.detected_time),
        _seconds(recovery.detected_time, recovery.flushed_time),
        _seconds(recovery.flushed_time, recovery.pods_ready_time),
        _seconds(recovery.pods_ready_time, recovery.restored_time),
        _seconds(restored, recovery.resumed_time),
        _seconds(recovery.failure_time, recovery.resumed_time),
    ]


def _seconds(begin: float | None, end: float | None) -> str:
    return "–" if begin is None or end is None else f"{max(0.0, end - begin):.2f} s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _or_dash(value: int | None) -> str:
    return "–" if value is None else str(value)
