"""One job as it was seen: what a report of it and its JSON are made of, wherever it runs. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from stepfast.errors import SpecError
from stepfast.layout import job_folder
from stepfast.step import JobKey
from stepfast_operator.clusterjob import MANAGER, is_managed, job_key_of, status_of
from stepfast_operator.document import JSON
from stepfast_operator.jobcommands.errors import StatusForeign
from stepfast_operator.record import State, Status
from stepfast_operator.report import Report, facts_of, summary_document
from stepfast_operator.sentences import span_text

_NO_OPERATOR_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A job with its status. `where` says where it runs; `notes` are what the status does not say."""

    job: JobKey
    document: JSON
    status: Status
    where: JSON
    title: str
    notes: tuple[tuple[str, str], ...]
    checkpoints: str
    logs: str

    @property
    def is_over(self) -> bool:
        return self.status.is_terminal

    def report(self, now: float) -> Report:
        """For the eye; `now` in seconds since the epoch."""
        state, *rest = facts_of(self.status, now)
        places = [("checkpoints", self.checkpoints), ("logs", self.logs)]
        return Report(title=self.title, facts=[state, *self.notes, *rest, *places], status=self.status)

    def summary(self) -> JSON:
        """For programs: the status as the API shows it, as `stepfast run --summary` writes it, and where it is from."""
        return {"where": self.where, **summary_document(self.document)}


def of_cluster(document: JSON, *, context: str | None, server: str, now: float) -> Sighting:
    """A TrainingJob as the API server has it. Raises StatusForeign."""
    job, status = job_key_of(document), read_status(document)
    cluster = f"context {context}" if context is not None else "this pod's cluster"
    return Sighting(
        job=job,
        document=document,
        status=status,
        where={"kind": "Cluster", "context": context, "server": server},
        title=f"{job} ({cluster})",
        notes=tuple(_notes(document, status, now)),
        checkpoints=checkpoints_uri(document) or "known with the first commit (the cluster's own storage)",
        logs=f"kubectl logs -n {job.namespace} -l stepfast.dev/job={job.name} -c node --prefix --tail=-1",
    )


def of_machine(document: JSON, *, folder: str, process: int | None) -> Sighting:
    """A job of `stepfast run` on this machine. Raises StatusForeign."""
    job, status = job_key_of(document), read_status(document)
    is_idle = process is None and not status.is_terminal and status.state is not State.SUSPENDED
    runs = f"none: `stepfast run` was ended from outside; `stepfast resume {job.name}` tells how to go on"
    notes = [("process", runs)] if is_idle else [("process", str(process))] if process is not None else []
    return Sighting(
        job=job,
        document=document,
        status=status,
        where={"kind": "Machine", "folder": folder, "process": process},
        title=f"{job} (this machine)",
        notes=tuple(notes),
        checkpoints=status.checkpoint.latest_persisted_uri or "none yet",
        logs=folder,
    )


def read_status(document: JSON) -> Status:
    """The job's status. Raises StatusForeign when it is none that this version knows."""
    try:
        return status_of(document)
    except SpecError as error:
        raise StatusForeign(
            f"the status of {job_key_of(document)} is not one that this version of Stepfast knows ({error}): use the "
            "version that wrote it"
        ) from error


def checkpoints_uri(document: JSON) -> str | None:
    """The job's folder in its storage: where it was committed to last, else where its spec says; None when the
    cluster's own storage will be it, which only the operator knows before the first commit.
    """
    committed = ((document.get("status") or {}).get("checkpoint") or {}).get("latestPersistedUri")
    root = ((document.get("spec") or {}).get("checkpoint") or {}).get("storageUri")
    if committed:
        return str(committed)
    return f"{str(root).rstrip('/')}/{job_folder(job_key_of(document))}" if root else None


def _notes(document: JSON, status: Status, now: float) -> list[tuple[str, str]]:
    metadata, spec = document["metadata"], document.get("spec") or {}
    notes = []
    if metadata.get("deletionTimestamp"):
        notes.append(("deletion", f"asked for {_ago(metadata['deletionTimestamp'], now)}"))
    if not is_managed(document):
        notes.append(("managed by", f"{spec['managedBy']}, not {MANAGER}: Stepfast's operator leaves it alone"))
    elif not status.is_terminal:
        notes += _awaited(document, status, now)
    return notes


def _awaited(document: JSON, status: Status, now: float) -> list[tuple[str, str]]:
    """What was asked of the operator, and it has not done yet."""
    metadata, spec = document["metadata"], document.get("spec") or {}
    if not document.get("status"):
        made = metadata.get("creationTimestamp")
        age = now - _seconds(made) if made else 0.0
        late = "; is the operator running?" if age > _NO_OPERATOR_SECONDS else ""
        return [("operator", f"has not looked at this job yet, {span_text(age)} after it was made{late}")]
    seen = status.observed_generation
    if seen is not None and seen < int(metadata.get("generation") or 0):
        return [("operator", "has not looked at the latest change of the spec yet")]
    if spec.get("suspend") and status.state not in (State.SUSPENDED, State.SUSPENDING):
        return [("suspend", "asked for")]
    return []


def _ago(text: str, now: float) -> str:
    return f"{span_text(now - _seconds(text))} ago"


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
