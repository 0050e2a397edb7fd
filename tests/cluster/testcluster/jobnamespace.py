"""A namespace as a user of Stepfast has it: the restricted Pod Security Standard enforced, and torch at hand.

torch is 5 GB with its libraries. Instead of an image on every node, a volume of the machine's own environment is
claimed, which the restricted standard allows where it forbids host paths.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from testcluster.controlplane import KubernetesClient
from testcluster.unavailable import Unavailable

CLAIM = "venv-site"
MOUNT_PATH = "/opt/venv-site"


@contextmanager
def job_namespace(client: KubernetesClient, name: str) -> Iterator[str]:
    """Makes it, and removes it with all that is in it; its volume, too."""
    create_job_namespace(client, name)
    try:
        yield name
    finally:
        client.kubectl("delete", "namespace", name, "--ignore-not-found", "--timeout=120s")
        client.kubectl("delete", "persistentvolume", f"{CLAIM}-{name}", "--ignore-not-found", "--timeout=60s")


def create_job_namespace(client: KubernetesClient, name: str) -> None:
    labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn", "audit")}
    client.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    claim_folder(client, name, CLAIM, str(site_packages()))


def claim_folder(client: KubernetesClient, namespace: str, claim: str, path: str) -> None:
    """A claim of that name by which the namespace's pods may mount a folder of their nodes, to read it."""
    terms = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    size, volume = {"storage": "1Gi"}, f"{claim}-{namespace}"
    client.apply(
        {
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume},
            "spec": {**terms, "capacity": size, "persistentVolumeReclaimPolicy": "Retain",
                     "claimRef": {"namespace": namespace, "name": claim},
                     "hostPath": {"path": path, "type": "Directory"}},
        },
        {
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": claim, "namespace": namespace},
            "spec": {**terms, "volumeName": volume, "resources": {"requests": size}},
        },
    )  # fmt: skip


def release_folder(client: KubernetesClient, namespace: str, claim: str) -> None:
    """The claim and its volume are gone; no pod uses them any more."""
    client.kubectl("delete", "persistentvolumeclaim", claim, "-n", namespace, "--ignore-not-found", "--timeout=60s")
    client.kubectl("delete", "persistentvolume", f"{claim}-{namespace}", "--ignore-not-found", "--timeout=60s")


def torch_pod_parts() -> dict[str, Any]:
    """What a pod spec and its container gain to import torch: `volumes`, `volumeMounts`, `env`."""
    return {
        "volumes": [{"name": CLAIM, "persistentVolumeClaim": {"claimName": CLAIM, "readOnly": True}}],
        "volumeMounts": [{"name": CLAIM, "mountPath": MOUNT_PATH, "readOnly": True}],
        "env": [{"name": "PYTHONPATH", "value": MOUNT_PATH}],
    }


def site_packages() -> Path:
    """Where this interpreter's torch lies."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise Unavailable("trainer pods take torch from this environment, which has none: make venv")
    return Path(spec.origin).resolve().parent.parent
