"""A kubelet for tests, as far as a CSI driver sees one: it finds the registration's socket in its folder, registers
the driver, and has volumes published and removed, with deadlines. Loaded by a fixture in conftest.py.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from stepfast_sidecar.csi import DRIVER
from stepfast_sidecar.protos import csi_pb2 as csi
from stepfast_sidecar.protos import registration_pb2 as registration

INFO = "csi.storage.k8s.io"
_SECONDS = 30.0


@dataclass(kw_only=True)
class Pod:
    """A pod with one volume of ours; what a test changes in it is what its author, or its kubelet, got wrong.

    Two of one uid, with volumes of other names, are one pod with two volumes.
    """

    namespace: str = "team-a"
    name: str = "train-0-0"
    uid: str = field(default_factory=lambda: str(uuid.uuid4()))
    job: str = "train"
    run: str = "uid1-0"
    volume: str = "stepfast"
    secrets: Mapping[str, str] = field(default_factory=dict)
    context: Mapping[str, str | None] = field(default_factory=dict)  # None: it is not said
    capability: Any = None

    @property
    def volume_id(self) -> str:
        return f"csi-{hashlib.sha256((self.uid + self.volume).encode()).hexdigest()}"


class Kubelet:
    """Its folder, and its calls."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sfk-", dir="/tmp"))
        for name in ("pods", "plugins", "plugins_registry"):
            (self.folder / name).mkdir(mode=0o750)

    @property
    def registration_socket(self) -> Path:
        return self.folder / "plugins_registry" / f"{DRIVER}-reg.sock"

    def target(self, pod: Pod) -> Path:
        return self.folder / "pods" / pod.uid / "volumes" / "kubernetes.io~csi" / pod.volume / "mount"

    def socket(self, pod: Pod) -> str:
        """As the pod sees it; far longer than a unix address."""
        return str(self.target(pod) / "agent.sock")

    def register(self, *, error: str = "") -> str:
        """Takes the driver in (or does not); returns the node's name as the driver knows it."""
        info = self._call(
            self.registration_socket, "pluginregistration.Registration/GetInfo", registration.InfoRequest(),
            registration.PluginInfo,
        )  # fmt: skip
        assert (info.type, info.name) == ("CSIPlugin", DRIVER)
        assert "1.0.0" in info.supported_versions
        self.endpoint = Path(info.endpoint)
        node = self._call(self.endpoint, "csi.v1.Node/NodeGetInfo", csi.NodeGetInfoRequest(), csi.NodeGetInfoResponse)
        self._call(
            self.registration_socket, "pluginregistration.Registration/NotifyRegistrationStatus",
            registration.RegistrationStatus(plugin_registered=not error, error=error),
            registration.RegistrationStatusResponse,
        )  # fmt: skip
        return str(node.node_id)

    def publish(self, pod: Pod, *, target: str | None = None, volume_id: str | None = None) -> str:
        """The socket's path in the pod's volume. Raises grpc.RpcError."""
        self.target(pod).parent.mkdir(parents=True, exist_ok=True)
        context: dict[str, str | None] = {
            f"{INFO}/pod.name": pod.name, f"{INFO}/pod.namespace": pod.namespace, f"{INFO}/pod.uid": pod.uid,
            f"{INFO}/serviceAccount.name": "default", f"{INFO}/ephemeral": "true", "job": pod.job, "run": pod.run,
            **pod.context,
        }  # fmt: skip
        request = csi.NodePublishVolumeRequest(
            volume_id=volume_id or pod.volume_id,
            target_path=target or str(self.target(pod)),
            volume_capability=pod.capability or csi.VolumeCapability(mount=csi.VolumeCapability.MountVolume()),
            secrets=dict(pod.secrets),
            volume_context={key: value for key, value in context.items() if value is not None},
        )
        self._driver("Node/NodePublishVolume", request, csi.NodePublishVolumeResponse)
        return self.socket(pod)

    def unpublish(self, pod: Pod, *, target: str | None = None) -> None:
        """And removes what is the kubelet's own, which fails when the driver left something. Raises grpc.RpcError."""
        request = csi.NodeUnpublishVolumeRequest(volume_id=pod.volume_id, target_path=target or str(self.target(pod)))
        self._driver("Node/NodeUnpublishVolume", request, csi.NodeUnpublishVolumeResponse)
        if target is None and self.target(pod).parent.exists():
            self.target(pod).parent.rmdir()

    def identity(self) -> Any:
        return self._driver("Identity/GetPluginInfo", csi.GetPluginInfoRequest(), csi.GetPluginInfoResponse)

    def probe(self) -> Any:
        return self._driver("Identity/Probe", csi.ProbeRequest(), csi.ProbeResponse)

    def _driver(self, method: str, request: Any, answer: Any) -> Any:
        return self._call(self.folder / "plugins" / DRIVER / "csi.sock", f"csi.v1.{method}", request, answer)

    @staticmethod
    def _call(socket: Path, method: str, request: Any, answer: Any) -> Any:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 100)]
        options.append(("grpc.initial_reconnect_backoff_ms", 50))
        with grpc.insecure_channel(f"unix:{socket}", options=options) as channel:
            call = channel.unary_unary(
                f"/{method}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=answer.FromString,
            )
            return call(request, timeout=_SECONDS, wait_for_ready=True)  # the agent may be starting

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
