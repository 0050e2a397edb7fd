"""A TrainingJob as the API server holds it: what the user asks for, and what the operator has noted with it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stepfast.step import JobKey
from stepfast_operator import labels
from stepfast_operator.document import JSON, decode
from stepfast_operator.record import Status
from stepfast_operator.spec import Trainer, TrainingJob, TrainingSpec, parse_manifest

MANAGER = f"{labels.PREFIX}/operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJob:
    """`launched` is the annotation of that name as it stands."""

    manifest: TrainingJob
    uid: str
    generation: int
    is_deleted: bool
    launched: str | None
    finalizers: tuple[str, ...] = ()

    @property
    def job(self) -> JobKey:
        return self.manifest.job

    @property
    def path(self) -> str:
        """Where the API server has it."""
        return path_of(self.job)

    @property
    def spec(self) -> TrainingSpec:
        return self.manifest.spec


def is_managed(document: JSON) -> bool:
    """Whether the job is ours: another manager's we leave alone."""
    return ((document.get("spec") or {}).get("managedBy") or MANAGER) == MANAGER


def path_of(job: JobKey) -> str:
    """Where the API server has a TrainingJob."""
    return f"/apis/stepfast.dev/v1alpha1/namespaces/{job.namespace}/trainingjobs/{job.name}"


def job_key_of(document: JSON) -> JobKey:
    metadata = document["metadata"]
    return JobKey(namespace=metadata["namespace"], name=metadata["name"])


def trimmed(document: JSON) -> JSON:
    """What is looked at of a TrainingJob: who wrote which field takes more room than all else."""
    metadata = {key: value for key, value in document["metadata"].items() if key != "managedFields"}
    return {**document, "metadata": metadata}


def has_news(old: JSON, new: JSON) -> bool:
    """Whether anybody but the operator, which alone writes the status, has changed the job."""
    return _told(old) != _told(new)


def _told(document: JSON) -> tuple[JSON, JSON]:
    metadata = {key: value for key, value in document["metadata"].items() if key != "resourceVersion"}
    return document.get("spec"), metadata


def parse_job(document: JSON) -> ClusterJob:
    """Raises SpecError naming a field that the API server let pass.

    One that we do not know is of a version whose CRDs are there before its operator is, or still after it: the API
    server fills its default into jobs that run. What nobody knows it has refused or removed itself.
    """
    notes, namespace = document["metadata"].get("annotations") or {}, document["metadata"]["namespace"]
    manifest = parse_manifest(document, default_namespace=namespace, ignore_unknown=True)
    return _job_of(document, replace(manifest, command=notes.get(labels.RESUME_REQUEST)))


def unreadable_job(document: JSON) -> ClusterJob:
    """The job of a document that `parse_job` refuses, with a spec that nothing is launched from: what was launched of
    it can be ended, and it can go.
    """
    nothing = TrainingSpec(trainer=Trainer(command=("false",)))
    return _job_of(document, TrainingJob(job=job_key_of(document), spec=nothing))


def _job_of(document: JSON, manifest: TrainingJob) -> ClusterJob:
    metadata = document["metadata"]
    return ClusterJob(
        manifest=manifest,
        uid=metadata["uid"],
        generation=int(metadata.get("generation") or 0),
        is_deleted=bool(metadata.get("deletionTimestamp")),
        launched=(metadata.get("annotations") or {}).get(labels.LAUNCHED),
        finalizers=tuple(metadata.get("finalizers") or ()),
    )


def status_of(document: JSON) -> Status:
    """What the operator wrote last; a new job's is empty. Raises SpecError when somebody else wrote it."""
    return decode(Status, document.get("status") or {}, "status", ignore_unknown=True)
