"""What `stepfast suspend` and `stepfast resume` change of a TrainingJob, and when they refuse to. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from stepfast_operator import labels
from stepfast_operator.clusterjob import is_managed, job_key_of
from stepfast_operator.document import JSON
from stepfast_operator.jobcommands.errors import JobRefused
from stepfast_operator.jobcommands.sighting import read_status
from stepfast_operator.record import State, Status
from stepfast_operator.spec import ResumePolicy

# A job that was made suspended has no state, or Pending, until its first attempt.
_AT_REST = (State.PENDING, State.SUSPENDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """A step to go back to. `command` is new with every command, so that each is a request of its own."""

    step: int
    command: str


def suspend_patch(document: JSON) -> JSON | None:
    """The merge patch that suspends the job; None when it is asked to already. Raises JobRefused, StatusForeign."""
    _check_open(document, "suspended")
    return None if _is_suspended(document) else {"spec": {"suspend": True}}


def resume_patch(document: JSON, request: StepRequest | None = None) -> JSON | None:
    """The merge patch that lets the job go on, from that step where one is asked for; None when it goes on already.
    Raises JobRefused, StatusForeign.
    """
    _check_open(document, "resumed")
    if request is None:
        return {"spec": {"suspend": False}} if _is_suspended(document) else None
    job, state = job_key_of(document), read_status(document).state
    if ((document.get("spec") or {}).get("checkpoint") or {}).get("secretRef"):
        raise JobRefused(
            f"{job} keeps its checkpoints in a storage of its own (checkpoint.secretRef), which the operator cannot "
            "read: it cannot go back to a step there, and goes on from the newest step (`stepfast resume "
            f"-n {job.namespace} {job.name}`)"
        )
    if not _is_suspended(document):
        raise JobRefused(
            f"{job} is not suspended ({state}), and goes back to a step only from there: `stepfast suspend "
            f"-n {job.namespace} {job.name}`, and when it is Suspended this command again"
        )
    if state not in _AT_REST:
        raise JobRefused(
            f"{job} is not suspended yet ({state}): its last checkpoint is still being saved. Give this command again "
            f"when it is Suspended (`stepfast status -w -n {job.namespace} {job.name}` shows it)"
        )
    checkpoint = {"resumePolicy": str(ResumePolicy.STEP), "resumeFromStep": request.step}
    return {
        "metadata": {"annotations": {labels.RESUME_REQUEST: request.command}},
        "spec": {"suspend": False, "checkpoint": checkpoint},
    }


def over_text(status: Status) -> str:
    """How the job ended."""
    current = status.current
    if current is None or current.fail_reason is None:
        return str(status.state)
    return f"{status.state}: {current.fail_reason}: {current.fail_message}".rstrip(": ")


def start_text(document: JSON) -> str:
    """What the job goes on from, as far as its status tells."""
    policy = ((document.get("spec") or {}).get("checkpoint") or {}).get("resumePolicy")
    persisted = read_status(document).checkpoint.latest_persisted_step
    if policy == ResumePolicy.NEVER:
        return "it starts from scratch (resumePolicy: Never)"
    if policy == ResumePolicy.STEP:
        return "it goes on from the latest committed step, or goes back to resumeFromStep if it has not yet"
    return f"it goes on from step {persisted}" if persisted is not None else "nothing was committed before"


def _is_suspended(document: JSON) -> bool:
    return bool((document.get("spec") or {}).get("suspend"))


def _check_open(document: JSON, done: str) -> None:
    job, status = job_key_of(document), read_status(document)
    if document["metadata"].get("deletionTimestamp"):
        raise JobRefused(f"{job} is being deleted and cannot be {done}")
    if status.is_terminal:
        raise JobRefused(
            f"{job} is over ({over_text(status)}) and is never run again. A new job of the same name goes on from its "
            f"checkpoints: `kubectl delete -n {job.namespace} trainingjob {job.name}`, then apply its manifest again"
        )
    if not is_managed(document):
        manager = document["spec"]["managedBy"]
        raise JobRefused(f"{job} is managed by {manager}: it has to be {done} there")
