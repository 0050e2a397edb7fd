"""The end of `stepfast run`: what happened, in a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from stepfast.step import JobKey
from stepfast_operator.backends.statefolder import document_of
from stepfast_operator.local.session import Outcome
from stepfast_operator.record import State, Status
from stepfast_operator.report import Report, facts_of, summary_document
from stepfast_operator.sentences import count_text, has_trained_for_nothing
from stepfast_operator.spec import ResumePolicy, TrainingJob


def write_summary(path: Path, job: JobKey, outcome: Outcome) -> None:
    """The job's status as JSON, as the API shows it, at the top level; and the job's metadata beside it."""
    document = document_of(job, outcome.uid, outcome.status)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary_document(document), indent=2) + "\n", encoding="utf-8")


def print_summary(console: Console, job: TrainingJob, outcome: Outcome) -> None:
    """The summary for the eye."""
    status = outcome.status
    places = [("checkpoints", f"{outcome.storage_uri.rstrip('/')}/{job.job}"), ("logs", str(outcome.state_folder))]
    if outcome.anatomy is not None:
        places.append(("anatomy", _anatomy(outcome.anatomy)))
    console.print(Report(title=str(job.job), facts=[*facts_of(status), *places], status=status).render())
    closing = _closing(status, job.spec.checkpoint.resume_policy)
    if closing is not None:
        console.print(closing)


def _anatomy(file: Path) -> str:
    if file.exists():
        return f"{file.name} beside the logs: stepfast anatomy report"
    return "nothing was measured: that takes a Checkpointer with one model and one optimizer, and a few steps"


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
