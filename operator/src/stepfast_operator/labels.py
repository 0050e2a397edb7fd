"""Labels, annotations and names that tie pods to their job, attempt and run. Pure."""

from __future__ import annotations

PREFIX = "stepfast.dev"
JOB = f"{PREFIX}/job"
JOB_UID = f"{PREFIX}/job-uid"
ATTEMPT = f"{PREFIX}/attempt"
NODE_INDEX = f"{PREFIX}/node-index"
SPARE = f"{PREFIX}/spare"  # of a pod that holds a place for its job's gang: its number
RUN = f"{PREFIX}/run"  # an annotation: longer than a label may be
AVOIDED_NODES = f"{PREFIX}/avoided-nodes"  # an annotation of pods: the nodes that they were made to keep off
LAUNCHED = f"{PREFIX}/launched"  # an annotation of the TrainingJob: which run's pods were begun to be made
RESUME_REQUEST = f"{PREFIX}/resume-request"  # an annotation of the TrainingJob: names the command that asks for a step
FINALIZER = f"{PREFIX}/finalizer"
MANAGED_BY = "app.kubernetes.io/managed-by"
OPERATOR = "stepfast-operator"
CONTAINER = "node"  # the trainer's, in every pod of a gang


def pod_name(job: str, attempt: int, index: int) -> str:
    return f"{job}-{attempt}-{index}"


def spare_name(job: str, number: int) -> str:
    return f"{job}-spare-{number}"
