"""A TrainingJob's least and fullest manifest, and statuses with every field."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import StrEnum
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from stepfast.nodestatus import NodeStatus
from stepfast_operator.document import encode
from stepfast_operator.record import Status
from stepfast_operator.spec import API_VERSION, KIND
from stepfast_sidecar.checkpointnode import status_document

LEAST: dict[str, Any] = {"trainer": {"command": ["torchrun", "train.py"]}}
FULL: dict[str, Any] = {
    "suspend": False,
    "managedBy": "stepfast.dev/operator",
    "activeDeadlineSeconds": 86400,
    "startupDeadlineSeconds": 900.5,
    "ttlSecondsAfterFinished": 86400,
    "trainer": {
        "image": "registry.example.com/train:1",
        "command": ["torchrun"],
        "args": ["train.py", "--nnodes"],
        "env": [
            {"name": "A", "value": "1"},
            {"name": "STEPFAST_STORAGE_OPTIONS", "value": "{}"},
            {"name": "B", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k", "optional": True}}},
            {"name": "C", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}},
            {"name": "D", "valueFrom": {"resourceFieldRef":
                {"containerName": "node", "divisor": 1, "resource": "limits.cpu"}}},
            {"name": "E", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": False}}},
        ],
        "workingDir": "/work",
        "numNodes": 10_000,
        "numProcPerNode": 8,
        "resourcesPerNode": {"limits": {"nvidia.com/gpu": 8, "cpu": "1.5"}, "requests": {"cpu": "500m"}},
    },
    "template": {
        "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
        "spec": {
            "serviceAccountName": "trainer",
            "nodeSelector": None,
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "containers": [{"name": "node", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}],
        },
    },
    "spot": {"tolerate": True},
    "failurePolicy": {
        "maxRestarts": 10,
        "maxRestartsWithoutProgress": 3,
        "restartStrategy": "InPlace",
        "maxInPlaceRestarts": 3,
        "backoff": {"baseSeconds": 0.5, "maxSeconds": 300},
        "podDeletionGraceSeconds": 30,
        "flushTimeoutSeconds": 120,
        "rules": [
            {"name": "bug", "action": "FailJob", "excludeNode": False,
             "onExitCodes": {"operator": "In", "values": [1, 2]}},
            {"name": "evicted", "action": "RestartJobAndIgnoreMaxRestarts", "excludeNode": False,
             "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"name": "memory", "action": "RestartJob", "excludeNode": False, "onReasons": ["OOMKilled"]},
            {"name": "gpu", "action": "RestartJobAndIgnoreMaxRestarts", "excludeNode": True,
             "onNodeConditions": [{"type": "XIDErrors", "status": "True"}]},
        ],
    },
    "podGroupPolicy": {"kueue": {"queueName": "team-a"}},
    "nodeExclusionPolicy": {"maxFailuresPerNode": 3, "ttlSeconds": 3600, "maxExcludedNodes": 4},
    "progressPolicy": {"progressDeadlineSeconds": 600, "action": "Notify"},
    "memoryPolicy": {"action": "Refuse", "deviceMemory": "16Gi"},
    "checkpoint": {
        "storageUri": "abfss://c@account.dfs.core.windows.net/a",
        "resumePolicy": "Step",
        "resumeFromStep": 500,
        "interval": {"steps": 50},
        "memory": {"sizeLimit": "64Gi", "onBusy": "Skip", "mirrors": 1},
        "persistent": {"intervalSeconds": 0, "maxToKeep": 1},
        "maxStalenessSeconds": 900,
        "gracefulSuspendSeconds": 60,
    },
}  # fmt: skip

# What FULL must not say beside its resumePolicy: only the gang can read this storage.
OWN_STORAGE: dict[str, Any] = {
    **LEAST,
    "checkpoint": {"storageUri": "abfss://c@account.dfs.core.windows.net/a", "secretRef": {"name": "storage"}},
}


# Nor may it name two who schedule its gang, or be elastic beside any.
OTHER_GANGS: tuple[dict[str, Any], ...] = (
    {**LEAST, "podGroupPolicy": {"volcano": {"queue": "research"}}},
    {**LEAST, "podGroupPolicy": {"coscheduling": {"scheduleTimeoutSeconds": 60}}},
    {**LEAST, "elasticPolicy": {"minNodes": 2, "maxNodes": 4, "scaleDownTimeoutSeconds": 120}},
)


def manifest(spec: Any, name: str = "job") -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}


def large() -> dict[str, Any]:
    """Half a megabyte, most of it where rules compare and walk."""
    text = "x" * 1000
    return {
        "trainer": {
            "command": ["torchrun", "train.py"],
            "args": [text] * 100,
            "env": [{"name": f"V{number}", "value": text} for number in range(200)],
        },
        "template": {
            "metadata": {"annotations": {f"a{number}": text for number in range(50)}},
            "spec": {"containers": [{"name": f"c{number}", "args": [text]} for number in range(150)]},
        },
    }


def full_job_status() -> dict[str, Any]:
    status: dict[str, Any] = encode(full(Status))
    status["terminalState"], status["conditions"][0]["status"] = "Failed", "True"
    # Numbers that tell a column from its neighbour.
    status |= {"state": "Running", "restarts": 7}
    status["nodes"] |= {"ready": 1, "desired": 2}
    status["trainerStatus"] |= {"globalStep": 3, "progressPercentage": 4, "estimatedRemainingSeconds": 5}
    status["checkpoint"]["latestPersistedStep"] = 6
    status["lastFailure"]["reason"] = "RankFailed"
    status["checkpoint"]["restoredTier"] = status["recoveries"][0]["restoredTier"] = "Memory"
    status["lastFailure"]["action"] = "RestartJob"
    return status


def full_node_status() -> dict[str, Any]:
    """As an agent writes it."""
    document = status_document(
        full(NodeStatus), generation=1, is_ready=True, since=1.8e9, reason="Serving", message="it serves its node"
    )
    document["jobs"][0]["ranks"][0]["restoredTier"] = "None"
    return document


def full(kind: Any, name: str = "") -> Any:
    """A value of that type in which every field has a value, none of them empty."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return full(next(argument for argument in arguments if argument is not type(None)), name)
    if origin is not None:
        is_mapping = len(arguments) == 2 and arguments[0] is str
        return {"loss": full(arguments[1])} if is_mapping else (full(arguments[0]),)
    if is_dataclass(kind):
        hints, make = get_type_hints(kind), cast("type[Any]", kind)
        return make(**{field.name: full(hints[field.name], field.name) for field in fields(kind)})
    if issubclass(kind, StrEnum):
        return next(iter(kind))
    return {int: 3, float: 1.8e9 if name.endswith("_time") else 2.5, bool: True, str: "text"}[kind]
