"""Our CRDs on an API server."""

from __future__ import annotations

from pathlib import Path

from testcluster.controlplane import KubernetesClient
from testcluster.waiting import wait_until

FOLDER = Path(__file__).resolve().parents[3] / "crds"


def install_crds(client: KubernetesClient) -> None:
    """Returns when their objects are served."""
    client.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(FOLDER))
    names = [f"crd/{path.stem}" for path in sorted(FOLDER.glob("*.yaml"))]
    client.kubectl("wait", "--for=condition=Established", *names)
    for path in ("trainingjobs", "checkpointnodes"):
        url = f"/apis/stepfast.dev/v1alpha1/{path}"
        wait_until(f"{path} are served", lambda url=url: client.kubectl("get", "--raw", url))  # type: ignore[misc]
