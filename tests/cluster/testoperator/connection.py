"""A connection to the API server of a kubeconfig."""

from __future__ import annotations

from pathlib import Path

from kubernetes.aio import client, config

from stepfast.kube import Kube
from stepfast_operator.lease import PATIENCE


async def connect(kubeconfig: Path, kind: type[Kube] = Kube, *, server: str | None = None) -> Kube:
    """As the user of that file; `server` is an address in place of the file's."""
    configuration = client.Configuration()
    await config.load_kube_config(str(kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call] # theirs
    if server is not None:
        configuration.host = server
    return kind(configuration, PATIENCE)
