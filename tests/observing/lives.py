"""Jobs with a past, for pages and sentences about them."""

from __future__ import annotations

from typing import Any

from stepfast.histories import SaveRow
from stepfast_operator.record import (
    Attempt,
    Cause,
    CheckpointStatus,
    LastFailure,
    Nodes,
    Recovery,
    SavesStatus,
    State,
    Status,
    TrainerStatus,
    Verdict,
)

BEGIN = 1_800_000_000.0
UID = "0f0e0d0c-1111-2222-3333-444455556666"
HOSTILE = '</script><img src=x onerror="window.hacked=1"><b>&amp;'


def save(attempt: int, step: int, at: float, *, restarts: int = 0, uid: str = UID, **values: Any) -> SaveRow:
    """A save `at` so many seconds after the job began."""
    run = f"{uid}-{attempt}" + (f".{restarts}" if restarts else "")
    told = {"outcome": "Committed", "stall_seconds": 0.004, "duration_seconds": 2.0, "size_bytes": 1 << 30, **values}
    return SaveRow(global_step=step, run=run, saved_time=BEGIN + at, world_size=8, **told)


def recovery(attempt: int, at: float, **values: Any) -> Recovery:
    """One that took 60 s: 2 to detect, 3 to flush, 45 to schedule, 6 to restore, 4 to resume."""
    told: dict[str, Any] = {
        "cause": Cause.NODE_LOST,
        "node": "node-2",
        "failure_time": BEGIN + at,
        "detected_time": BEGIN + at + 2,
        "flushed_time": BEGIN + at + 5,
        "launched_time": BEGIN + at + 6,
        "pods_ready_time": BEGIN + at + 50,
        "restored_time": BEGIN + at + 56,
        "resumed_time": BEGIN + at + 60,
        "duration_seconds": 60.0,
        "restored_tier": "Persistent",
        "step_before": 100,
        "resumed_from_step": 90,
        "steps_lost": 10,
    }
    return Recovery(attempt=attempt, **{**told, **values})


def attempt(number: int, at: float, **values: Any) -> Attempt:
    """The attempt at hand, planned `at` so many seconds after the job began."""
    told = {"run": f"{UID}-{number}", "resume_step": 0, "planned_time": BEGIN + at, **values}
    return Attempt(attempt=number, **told)


def training() -> Status:
    """A job that lost two nodes and trains in its third attempt, 1000 s after it began."""
    return Status(
        state=State.RUNNING,
        attempt=3,
        restarts=2,
        restarts_count_towards_max=2,
        start_time=BEGIN,
        nodes=Nodes(desired=4, ready=4, active=4),
        trainer_status=TrainerStatus(global_step=260, steps_per_second=0.5),
        checkpoint=CheckpointStatus(
            latest_persisted_step=250,
            latest_persisted_time=BEGIN + 960,
            latest_persisted_uri="memory://nowhere/team/gpt",
            saves=SavesStatus(count=26, stall_seconds_total=0.1, stall_seconds_mean=0.004, stall_seconds_max=0.02),
        ),
        last_failure=LastFailure(
            attempt=2, failure_time=BEGIN + 700, reason=Cause.RANK_FAILED, rank=3, node="node-1", exit_code=1
        ),
        recoveries=(
            recovery(1, 300),
            recovery(2, 700, cause=Cause.RANK_FAILED, rank=3, step_before=200, resumed_from_step=190),
        ),
        steps_lost=20,
        trained_seconds=640.0,
        productive_seconds=600.0,
        current=attempt(
            3, 705, resume_step=190, pods_ready_time=BEGIN + 750, restored_time=BEGIN + 756, restored_step=190,
            first_step=191, first_step_time=BEGIN + 760, newest_step=260, newest_step_time=BEGIN + 995,
        ),
    )  # fmt: skip


def saves_of_training() -> list[SaveRow]:
    """Every 10 steps, each attempt from where it began."""
    rows = [save(1, 10 * number, 20 + 28 * number) for number in range(1, 11)]
    rows += [save(2, 90 + 10 * number, 365 + 30 * number) for number in range(1, 11)]
    rows += [save(3, 190 + 10 * number, 765 + 32 * number) for number in range(1, 7)]
    return rows


def suspended() -> Status:
    """One that was suspended after 100 s."""
    ended = attempt(1, 0, ended_time=BEGIN + 100, verdict=Verdict.SUSPEND, newest_step=10)
    return Status(state=State.SUSPENDED, attempt=1, earlier_seconds=100.0, current=ended)
