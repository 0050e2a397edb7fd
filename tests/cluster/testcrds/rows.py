"""What a real API server must take and must refuse, with words of its message."""

from __future__ import annotations

from typing import Any

from stepfast_operator.document import time_text
from testcrds.manifests import LEAST


def trainer(**values: Any) -> dict[str, Any]:
    return {"trainer": {**LEAST["trainer"], **values}}


def checkpoint(**values: Any) -> dict[str, Any]:
    return {**LEAST, "checkpoint": values}


def rule(**values: Any) -> dict[str, Any]:
    return {**LEAST, "failurePolicy": {"rules": [{"name": "r", "action": "FailJob", **values}]}}


def source(**values: Any) -> dict[str, Any]:
    return trainer(env=[{"name": "A", **values}])


ACCEPTED: dict[str, Any] = {
    "arguments alone": {"trainer": {"args": ["train.py"]}},
    "interval auto": {**LEAST, "checkpoint": {"interval": "auto"}},
    "interval in seconds": {**LEAST, "checkpoint": {"interval": {"seconds": 0.5}}},
    "a mirror": {**LEAST, "checkpoint": {"memory": {"mirrors": 1}}},
    "size in bytes": {**LEAST, "checkpoint": {"memory": {"sizeLimit": 200_000_000}}},
    "least memory": {**LEAST, "checkpoint": {"memory": {"sizeLimit": 8392704}}},
    "least memory of two ranks": {
        "trainer": {**LEAST["trainer"], "numProcPerNode": 2}, "checkpoint": {"memory": {"sizeLimit": "16785408"}}},
    "equal request and limit": {
        "trainer": {**LEAST["trainer"], "resourcesPerNode": {"limits": {"cpu": 1}, "requests": {"cpu": "1000m"}}}},
    "storage of its own": checkpoint(secretRef={"name": "a"}, resumePolicy="Latest"),
    "device memory in bytes": {**LEAST, "memoryPolicy": {"deviceMemory": 16_000_000_000}},
    "device memory without an action": {**LEAST, "memoryPolicy": {"deviceMemory": "15.8Gi"}},
    "Kueue's pod group": {**LEAST, "podGroupPolicy": {"kueue": {"queueName": "team-a"}}},
    "Volcano's pod group": {**LEAST, "podGroupPolicy": {"volcano": {}}},
    "pod group without a time": {**LEAST, "podGroupPolicy": {"coscheduling": {}}},
    "exit codes but these": {**LEAST, "failurePolicy": {"rules": [
        {"name": "r", "action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [0, 1]}}]}},
    "condition without a status": {**LEAST, "failurePolicy": {"rules": [
        {"name": "r", "action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget"}]}]}},
}  # fmt: skip

REFUSED: dict[str, tuple[Any, str]] = {
    "no command": ({"trainer": {"numNodes": 2}}, "command or args is required"),
    "empty command": ({"trainer": {"command": []}}, "as in [torchrun, train.py]"),
    "no processes": (trainer(numProcPerNode=0), "must be auto or a whole number of at least 1"),
    "processes as text": (trainer(numProcPerNode="many"), "must be auto or a whole number of at least 1"),
    "number among the words": (trainer(args=["--steps", 3]), "must be of type string"),
    "variable twice": (trainer(env=[{"name": "A"}, {"name": "A"}]), "Duplicate value"),
    "variable's name": (trainer(env=[{"name": "A B"}]), "is no environment variable's name"),
    "value and source": (source(value="1", valueFrom={"fieldRef": {"fieldPath": "a"}}),
        "give value or valueFrom, not both"),
    "two sources": (source(valueFrom={"fieldRef": {"fieldPath": "a"}, "secretKeyRef": {"name": "a", "key": "b"}}),
        "needs exactly one of configMapKeyRef, fieldRef, resourceFieldRef and secretKeyRef"),
    "no source": (source(valueFrom={}), "needs exactly one of configMapKeyRef"),
    "number of nodes": (trainer(env=[{"name": "PET_NNODES"}]), "Stepfast's own; set spec.trainer.numNodes"),
    "ranks of a node": (trainer(env=[{"name": "PET_NPROC_PER_NODE"}]), "own; set spec.trainer.numProcPerNode"),
    "restarts of torchrun": (trainer(env=[{"name": "PET_MAX_RESTARTS"}]), "own; set spec.failurePolicy.maxRestarts"),
    "rendezvous": (trainer(env=[{"name": "PET_RDZV_ID"}]), "own; leave it out: Stepfast sets the rendezvous"),
    "variable of ours": (trainer(env=[{"name": "STEPFAST_RUN"}]), "own; set the fields of spec.checkpoint instead"),
    "limit": (trainer(resourcesPerNode={"limits": {"cpu": "x"}}),
        "is no quantity: write a number, or as in 500m or 64Gi"),
    "request": (trainer(resourcesPerNode={"requests": {"cpu": -1}}), "is no quantity: write a number"),
    "request over the limit": (trainer(resourcesPerNode={"limits": {"cpu": 1}, "requests": {"cpu": "1500m"}}),
        "no request may be greater than the limit of the same resource"),
    "label of ours": ({**LEAST, "template": {"metadata": {"labels": {"stepfast.dev/job": "a"}}}},
        "labels that begin with stepfast.dev/ are the operator's own"),
    "annotation of ours": ({**LEAST, "template": {"metadata": {"annotations": {"stepfast.dev/run": "a"}}}},
        "annotations that begin with stepfast.dev/ are the operator's own"),
    "name in the template": ({**LEAST, "template": {"metadata": {"name": "a"}}},
        'unknown field "spec.template.metadata.name"'),
    "manager without a path": ({**LEAST, "managedBy": "kueue"}, "must be a domain, a slash and a path"),
    "backoff": ({**LEAST, "failurePolicy": {"backoff": {"baseSeconds": 301}}},
        "baseSeconds must not be greater than maxSeconds"),
    "rule of no kind": (rule(), "needs exactly one of onExitCodes, onPodConditions, onNodeConditions and onReasons"),
    "rule of two kinds": (rule(onReasons=["a"], onPodConditions=[{"type": "b"}]), "needs exactly one of onExitCodes"),
    "rule for success": (rule(onExitCodes={"operator": "In", "values": [0, 1]}), "0 is no failure"),
    "no exit codes": (rule(onExitCodes={"operator": "In", "values": []}), "should have at least 1 items"),
    "exit code twice": (rule(onExitCodes={"operator": "In", "values": [1, 1]}), "Duplicate value"),
    "two rules of one name": (
        {**LEAST, "failurePolicy": {"rules": rule(onReasons=["a"])["failurePolicy"]["rules"] * 2}},
        "Duplicate value"),
    "step without a policy": (checkpoint(resumeFromStep=5), "resumeFromStep goes with resumePolicy Step"),
    "policy without a step": (checkpoint(resumePolicy="Step"), "and resumePolicy Step with it"),
    "step of a storage of its own": (checkpoint(secretRef={"name": "a"}, resumePolicy="Step", resumeFromStep=5),
        "which the operator cannot read: resumePolicy must be Latest"),
    "nothing of a storage of its own": (checkpoint(secretRef={"name": "a"}, resumePolicy="Never"),
        "with secretRef attempts start from the newest committed step"),
    "two intervals": (checkpoint(interval={"steps": 1, "seconds": 1}),
        "spec.checkpoint.interval: Too many: 2: must have at most 1"),
    "interval of no unit": (checkpoint(interval={"minutes": 1}), "spec.checkpoint.interval.steps: Required value"),
    "empty interval": (checkpoint(interval={}), "spec.checkpoint.interval.steps: Required value"),
    "interval as a word": (checkpoint(interval="often"), "should match '^auto$'"),
    "interval as a number": (checkpoint(interval=5), "spec.checkpoint.interval"),
    "interval as a list": (checkpoint(interval=[5]), "spec.checkpoint.interval"),
    "interval as a truth": (checkpoint(interval=True), "spec.checkpoint.interval"),
    "no time at all": (checkpoint(interval={"seconds": 0}), "interval.seconds in body should be greater than 0"),
    "almost no time": (checkpoint(interval={"seconds": 0.0001}), "should be greater than or equal to 0.001"),
    "no progress in no time": ({**LEAST, "progressPolicy": {"progressDeadlineSeconds": 0}}, "should be greater than 0"),
    "never stale": (checkpoint(maxStalenessSeconds=0), "should be greater than 0"),
    "storage without a scheme": (checkpoint(storageUri="/data"), "needs a scheme, as in abfss://"),
    "secret's name": (checkpoint(secretRef={"name": "A_b"}), "is no Secret's name"),
    "two mirrors": (checkpoint(memory={"mirrors": 2}), "should be less than or equal to 1"),
    "no size": (checkpoint(memory={"sizeLimit": "64X"}), "is no size: write bytes, or as in 64Gi or 500M"),
    "size in thousandths": (checkpoint(memory={"sizeLimit": "9000000000000m"}), "is no size"),
    "too little memory": (checkpoint(memory={"sizeLimit": "8Mi"}),
        "is too little memory: each rank of a node needs at least"),
    "too little memory in bytes": (checkpoint(memory={"sizeLimit": 8392703}), "is too little memory"),
    "too little memory for two": ({**checkpoint(memory={"sizeLimit": "16Mi"}), **trainer(numProcPerNode=2)},
        "is too little memory"),
    "memory action": ({**LEAST, "memoryPolicy": {"action": "Stop"}},
        'spec.memoryPolicy.action: Unsupported value: "Stop"'),
    "no device memory": ({**LEAST, "memoryPolicy": {"deviceMemory": 0}}, "is no size: write bytes, or as in 16Gi"),
    "device memory of no size": ({**LEAST, "memoryPolicy": {"deviceMemory": "16GB"}}, "is no size: write bytes"),
    "more nodes at least than there are": ({**LEAST, "elasticPolicy": {"minNodes": 2}},
        "must not be more than maxNodes"),
    "more at least than at most": ({**LEAST, "elasticPolicy": {"minNodes": 3, "maxNodes": 2}},
        "must not be more than maxNodes"),
    "no node": ({**LEAST, "elasticPolicy": {"minNodes": 0}}, "should be greater than or equal to 1"),
    "places waited for longer than a start may take": (
        {**LEAST, "startupDeadlineSeconds": 60, "elasticPolicy": {"scaleDownTimeoutSeconds": 60}},
        "must be less than startupDeadlineSeconds"),
    "elastic group of pods": ({**LEAST, "elasticPolicy": {}, "podGroupPolicy": {"volcano": {}}},
        "elasticPolicy goes with no podGroupPolicy"),
    "rule about nodes that are not ready": (rule(onNodeConditions=[{"type": "Ready"}]), "which needs no rule"),
    "too many excluded nodes": ({**LEAST, "nodeExclusionPolicy": {"maxExcludedNodes": 65}},
        "should be less than or equal to 64"),
    "nodes excluded for no failure": ({**LEAST, "nodeExclusionPolicy": {"maxFailuresPerNode": 0}},
        "should be greater than or equal to 1"),
    "pod group of nobody": ({**LEAST, "podGroupPolicy": {}},
        "needs exactly one of kueue, volcano and coscheduling"),
    "pod group of two": ({**LEAST, "podGroupPolicy": {"kueue": {"queueName": "a"}, "volcano": {}}},
        "needs exactly one of kueue, volcano and coscheduling"),
    "queue without a name": ({**LEAST, "podGroupPolicy": {"kueue": {}}}, "podGroupPolicy.kueue.queueName: Required"),
    "Kueue's queue": ({**LEAST, "podGroupPolicy": {"kueue": {"queueName": "Team A"}}}, "is no LocalQueue's name"),
    "Volcano's queue": ({**LEAST, "podGroupPolicy": {"volcano": {"queue": "-"}}}, "is no Queue's name"),
    "no time for the gang": ({**LEAST, "podGroupPolicy": {"coscheduling": {"scheduleTimeoutSeconds": 0}}},
        "should be greater than or equal to 1"),
}  # fmt: skip
BAD_NAMES = {
    "too long": ("a" * 51, "at most 50 characters"),
    "digit first": ("1a", "must begin with a lower-case letter"),
    "dot": ("a.b", "hold only lower-case letters, digits and hyphens"),
}

# Old spec, status, new spec, and why that is refused.
RUNNING = {"state": "Running", "attempt": 3, "restarts": 2}
SUSPENDED = {**RUNNING, "state": "Suspended"}
SUSPENDING = {**RUNNING, "state": "Suspending"}
FINISHED = {**RUNNING, "state": "Failed", "terminalState": "Failed"}
OTHER = {"trainer": {"command": ["other"]}}
STOPPED = {**LEAST, "suspend": True}
POD = {**LEAST, "template": {"spec": {"nodeSelector": {"a": "b"}, "hostname": None}}}
QUEUED = {**LEAST, "podGroupPolicy": {"kueue": {"queueName": "a"}}}
WAIT = "can be changed only while the job is suspended: set spec.suspend to true first, and wait"
DONE = "and is never run again: only spec.ttlSecondsAfterFinished can still be changed"

CHANGES: dict[str, tuple[Any, dict[str, Any] | None, Any, str | None]] = {
    "limits while running": (LEAST, RUNNING, {**LEAST, "failurePolicy": {"maxRestarts": 20}}, None),
    "memory policy while running": (LEAST, RUNNING, {**LEAST, "memoryPolicy": {"action": "Refuse"}}, None),
    "memory policy while refused": ({**LEAST, "memoryPolicy": {"action": "Refuse"}}, {"state": "Pending"}, LEAST, None),
    "suspend": (LEAST, RUNNING, STOPPED, None),
    "suspend with nulls in the template": (POD, RUNNING, {**POD, "suspend": True}, None),
    "resume": (STOPPED, SUSPENDED, LEAST, None),
    "trainer while running": (LEAST, RUNNING, OTHER, f"spec.trainer {WAIT}"),
    "trainer before the first attempt": (LEAST, None, OTHER, f"spec.trainer {WAIT}"),
    "trainer together with suspend": (LEAST, RUNNING, {**OTHER, "suspend": True}, f"spec.trainer {WAIT}"),
    "trainer while suspending": (STOPPED, SUSPENDING, {**OTHER, "suspend": True}, f"spec.trainer {WAIT}"),
    "trainer while suspended": (STOPPED, SUSPENDED, {**OTHER, "suspend": True}, None),
    "trainer with the resume": (STOPPED, SUSPENDED, OTHER, None),
    "trainer of a job created suspended": (STOPPED, None, {**OTHER, "suspend": True}, None),
    "template while running": (LEAST, RUNNING, POD, f"spec.template {WAIT}"),
    "template taken away": (POD, RUNNING, LEAST, f"spec.template {WAIT}"),
    "template's value": (POD, RUNNING, {**LEAST, "template": {"spec": {"nodeSelector": {"a": "c"}, "hostname": None}}},
        f"spec.template {WAIT}"),
    "template's field for another": (
        POD, RUNNING, {**LEAST, "template": {"spec": {"affinity": {"a": "b"}, "hostname": None}}},
        f"spec.template {WAIT}"),
    "template while suspended": (STOPPED, SUSPENDED, {**POD, "suspend": True}, None),
    "queue while running": (QUEUED, RUNNING, {**QUEUED, "podGroupPolicy": {"kueue": {"queueName": "b"}}},
        f"spec.podGroupPolicy {WAIT}"),
    "queue for a job that runs": (LEAST, RUNNING, QUEUED, f"spec.podGroupPolicy {WAIT}"),
    "no queue for a job that runs": (QUEUED, RUNNING, LEAST, f"spec.podGroupPolicy {WAIT}"),
    "queue while suspended": (STOPPED, SUSPENDED, {**QUEUED, "suspend": True}, None),
    "queue when finished": (LEAST, FINISHED, QUEUED, DONE),
    "size while running": (LEAST, RUNNING, {**LEAST, "elasticPolicy": {"maxNodes": 4}}, None),
    "size when finished": (LEAST, FINISHED, {**LEAST, "elasticPolicy": {"maxNodes": 4}}, DONE),
    "storage while running": (LEAST, RUNNING, checkpoint(storageUri="memory://b"),
        f"spec.checkpoint.storageUri and secretRef {WAIT}"),
    "credentials while running": (LEAST, RUNNING, checkpoint(secretRef={"name": "a"}),
        f"spec.checkpoint.storageUri and secretRef {WAIT}"),
    "storage of its own while suspended": (STOPPED, SUSPENDED, {**checkpoint(secretRef={"name": "a"}), "suspend": True},
        None),
    "step of a storage of its own while suspended": (
        {**checkpoint(secretRef={"name": "a"}), "suspend": True}, SUSPENDED,
        {**checkpoint(secretRef={"name": "a"}, resumePolicy="Step", resumeFromStep=5), "suspend": True},
        "which the operator cannot read"),
    "storage while suspended": (STOPPED, SUSPENDED, {**checkpoint(storageUri="memory://b"), "suspend": True}, None),
    "manager": (LEAST, None, {**LEAST, "managedBy": "a/b"}, "is immutable: create the job anew"),
    "manager left out": ({**LEAST, "managedBy": "a/b"}, None, LEAST, "is immutable: create the job anew"),
    "time to live when finished": (LEAST, FINISHED, {**LEAST, "ttlSecondsAfterFinished": 0}, None),
    "budget when finished": (LEAST, FINISHED, {**LEAST, "failurePolicy": {"maxRestarts": 20}},
        f"finished (Failed) {DONE}"),
    "suspend when finished": (LEAST, FINISHED, STOPPED, DONE),
    "trainer when finished": (STOPPED, FINISHED, {**OTHER, "suspend": True}, DONE),
    "template when finished": (LEAST, FINISHED, POD, DONE),
    "spot when finished": (LEAST, FINISHED, {**LEAST, "spot": {"tolerate": True}}, DONE),
    "deadline when finished": (LEAST, FINISHED, {**LEAST, "activeDeadlineSeconds": 1}, DONE),
    "start when finished": (LEAST, FINISHED, {**LEAST, "startupDeadlineSeconds": 1}, DONE),
    "progress when finished": (LEAST, FINISHED, {**LEAST, "progressPolicy": {"action": "Notify"}}, DONE),
    "memory policy when finished": (LEAST, FINISHED, {**LEAST, "memoryPolicy": {"action": "Refuse"}}, DONE),
    "checkpoint when finished": (LEAST, FINISHED, checkpoint(interval={"steps": 1}), DONE),
}  # fmt: skip

REPORTS: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "goes on": (RUNNING, {**RUNNING, "state": "Restarting", "attempt": 4}, None),
    "ends": (RUNNING, FINISHED, None),
    "told again": (FINISHED, {**FINISHED, "completionTime": time_text(1.8e9)}, None),
    "lives again": (FINISHED, RUNNING, "a finished job stays finished"),
    "ends otherwise": (FINISHED, {**FINISHED, "terminalState": "Complete"}, "a finished job stays finished"),
    "attempt goes back": (RUNNING, {**RUNNING, "attempt": 2}, "the attempt never goes back"),
    "attempt forgotten": (RUNNING, {"state": "Pending"}, "the attempt never goes back"),
    "unknown state": ({}, {"state": "Fine"}, 'status.state: Unsupported value: "Fine"'),
    "unknown field": ({}, {"phase": "Running"}, 'unknown field "status.phase"'),
    "time as a number": ({}, {"startTime": 1.5}, "status.startTime: Invalid value"),
    "no time": ({}, {"startTime": "today"}, "startTime in body must be of type date-time"),
}
