"""The chart as the tests see it: its files, sets of values, and what helm makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from testcluster.controlplane import KubernetesClient

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "stepfast"
NAMESPACE = "stepfast-system"
OPERATOR, SIDECAR = "stepfast-operator", "stepfast-sidecar"
URI = "abfss://checkpoints@account.dfs.core.windows.net/training"
CLIENT_ID = "11111111-2222-3333-4444-555555555555"
# helm that was built from source takes itself to be of an old Kubernetes until it talks to a cluster.
KUBERNETES = ("--kube-version", "1.35.0")

# Sets of values that installations have; each must render to what a real API server accepts, and be safe.
VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "namespaced": {"watchNamespaces": ["team-a", "team-b"]},
    "workload-identity": {"azure": {"workloadIdentity": {"clientId": CLIENT_ID, "tenantId": CLIENT_ID}}},
    "managed-identity": {"azure": {"managedIdentity": {"clientId": CLIENT_ID}}},
    "secret": {"storage": {"secretName": "azurite"}, "networkPolicy": {"storagePorts": [10000]}},
    "file-storage": {
        "storage": {
            "uri": "file:///checkpoints/training",
            "mountPath": "/checkpoints",
            "volume": {"nfs": {"server": "nas", "path": "/exports/checkpoints"}},
        }
    },
    "bare": {
        "networkPolicy": {"enabled": False},
        "admissionPolicy": {"enabled": False},
        "rbac": {"aggregateToDefaultRoles": False},
    },
    "mirrors": {"sidecar": {"mirrors": {"enabled": True}}},
    "everything": {
        "fullnameOverride": "resilient",
        "podGroups": {"kueue": True, "volcano": True, "coscheduling": True},
        "watchNamespaces": ["team-a"],
        "image": {
            "registry": "registry.example/training/",
            "tag": "0.1.0-rc.1",
            "pullPolicy": "Always",
            "pullSecrets": [{"name": "registry"}],
        },
        "storage": {
            "allowed": ["abfss://shared@other.dfs.core.windows.net/a b#c".replace(" ", "%20")],
            "secretName": "credentials",
            "mountPath": "/checkpoints",
            "volume": {"persistentVolumeClaim": {"claimName": "checkpoints"}},
        },
        "azure": {"workloadIdentity": {"clientId": CLIENT_ID}},
        "operator": {
            "image": {"repository": "operator", "digest": f"sha256:{'0' * 64}"},
            "resources": {"limits": {"memory": "2Gi", "cpu": 1}},
            "nodeSelector": {"pool": "system"},
            "tolerations": [{"key": "CriticalAddonsOnly", "operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "podAnnotations": {"a": "b"},
            "podLabels": {"c": "d"},
            "extraEnv": [{"name": "A", "value": "1"}],
        },
        "sidecar": {
            "image": {"repository": "sidecar", "tag": "1.2"},
            "memory": {"limit": "64.5Gi", "overhead": 2147483648, "hostPath": "/dev/shm/tier"},
            "mirrors": {"enabled": True, "port": 9700, "bandwidth": "1Gi", "memory": "16Gi", "secretName": "agents"},
            "kubeletDir": "/mnt/kubelet",
            "flushTimeoutSeconds": 60,
            "evictionNotices": {"enabled": True, "endpoint": "http://169.254.169.253:8080"},
            "maxUnavailable": 3,
            "resources": {"requests": {"cpu": 1}},
            "podAnnotations": {"a": "b"},
            "podLabels": {"c": "d"},
            "extraEnv": [{"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}],
        },
        "metrics": {
            "monitors": {"enabled": True, "interval": "15s", "labels": {"release": "prometheus"}},
            "alerts": {
                "enabled": True,
                "labels": {"release": "prometheus"},
                "alertLabels": {"team": "training"},
                "runbook": "https://docs.example/observing",
            },
            "dashboards": {"enabled": True, "annotations": {"grafana_folder": "Training"}, "namespace": "team-a"},
        },
        "networkPolicy": {
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
            "extraEgress": [{"ports": [{"port": 10000, "protocol": "TCP"}]}],
        },
    },
}


def with_storage(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with the one value that must be set."""
    return {**values, "storage": {"uri": URI, **values.get("storage", {})}}


def write_values(folder: Path, values: Mapping[str, Any]) -> Path:
    """A values file: numbers in it reach the templates as they do for users, which is not as by --set."""
    path = folder / "values.json"
    path.write_text(json.dumps(values))
    return path


def render(client: KubernetesClient, folder: Path, values: Mapping[str, Any], *options: str) -> list[dict[str, Any]]:
    """The objects of a release `stepfast`. Raises CommandFailed with helm's words."""
    file = write_values(folder, values)
    text = client.helm("template", "stepfast", str(CHART), "-n", NAMESPACE, "-f", str(file), *KUBERNETES, *options)
    return [document for document in yaml.safe_load_all(text) if document]


def of_kind(objects: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [one for one in objects if one["kind"] in kinds]


def pod_templates(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Pod templates by component."""
    workloads = of_kind(objects, "Deployment", "DaemonSet")
    templates = [workload["spec"]["template"] for workload in workloads]
    return {template["metadata"]["labels"]["app.kubernetes.io/component"]: template for template in templates}
