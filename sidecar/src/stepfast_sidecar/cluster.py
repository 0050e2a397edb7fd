"""What an agent does in a cluster and nowhere else: it serves the kubelet and keeps its CheckpointNode."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from stepfast_sidecar.checkpointnode import Api, CheckpointNodeWriter
from stepfast_sidecar.health import Health

if TYPE_CHECKING:
    from stepfast_sidecar.checkpointnode import Source
    from stepfast_sidecar.csi import CsiServers
    from stepfast_sidecar.volumes import Volumes

_REGISTRATION = "the kubelet to register the driver"


async def serve_kubelet(
    kubelet_dir: Path, node: str, volumes: Volumes, health: Health, takes_mirrors: bool
) -> CsiServers:
    """The driver's servers, started; ready once the kubelet has registered it. Raises AgentError."""
    from stepfast_sidecar.csi import CsiServers

    def registered(is_registered: bool) -> None:
        (health.done if is_registered else health.wait_for)(_REGISTRATION)

    health.wait_for(_REGISTRATION)
    servers = CsiServers(kubelet_dir, node, volumes, registered, takes_mirrors=takes_mirrors)
    await servers.start()
    return servers


def checkpoint_node_writer(node: str, source: Source) -> CheckpointNodeWriter:
    """With the pod's service account, or KUBECONFIG."""
    return CheckpointNodeWriter(node, source, _connect)


async def _connect() -> Api:
    # The client library takes seconds to import: meanwhile ranks are served.
    module = await asyncio.to_thread(__import__, "stepfast_sidecar.kubeapi", fromlist=["KubeApi"])
    api: Api = await module.KubeApi.connect()
    return api
