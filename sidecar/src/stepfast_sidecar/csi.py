"""The agent as a CSI node driver for ephemeral inline volumes, and how the kubelet gets to know it.

Two gRPC servers on unix sockets in the kubelet's own folders, which no pod sees. The driver's socket is there before
the registration's, and both after the volumes of an earlier agent are back: the kubelet may ask from the first moment.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, Protocol

import grpc
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import BoolValue

from stepfast.errors import AgentError
from stepfast_sidecar.protos import csi_pb2 as csi
from stepfast_sidecar.protos import registration_pb2 as registration
from stepfast_sidecar.tenants import Volume, VolumeRefused, check_target, volume_of

log = logging.getLogger(__name__)

DRIVER = "csi.stepfast.dev"
_OFFER_AGAIN_SECONDS = 5.0
_GRACE_SECONDS = 2.0

Context = Any  # grpc.aio.ServicerContext, which is generic over messages


class Publisher(Protocol):
    """What puts sockets into volumes. Implemented by `volumes.Volumes`."""

    def known(self, volume_id: str) -> Volume | None: ...
    async def publish(self, volume: Volume) -> None: ...
    async def unpublish(self, volume_id: str, target_path: str) -> None: ...


class CsiServers:
    """Serves the kubelet. `registered` is told whether the kubelet took the driver in; `takes_mirrors`: whether jobs
    may ask for them here.
    """

    def __init__(
        self, kubelet_dir: Path, node: str, publisher: Publisher, registered: Callable[[bool], None], *,
        takes_mirrors: bool,
    ) -> None:  # fmt: skip
        self._takes_mirrors = takes_mirrors
        self._socket = kubelet_dir / "plugins" / DRIVER / "csi.sock"
        self._registration_socket = kubelet_dir / "plugins_registry" / f"{DRIVER}-reg.sock"
        self._pods_folder = str(kubelet_dir / "pods")
        self._node, self._publisher, self._registered = node, publisher, registered
        self._driver: grpc.aio.Server | None = None
        self._registration: grpc.aio.Server | None = None
        self._offering: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises AgentError when the kubelet's folders do not take the sockets."""
        self._driver = await _serve(
            self._socket,
            _handler(
                "csi.v1.Identity",
                ("GetPluginInfo", csi.GetPluginInfoRequest, self._plugin_info),
                ("GetPluginCapabilities", csi.GetPluginCapabilitiesRequest, self._plugin_capabilities),
                ("Probe", csi.ProbeRequest, self._probe),
            ),
            _handler(
                "csi.v1.Node",
                ("NodePublishVolume", csi.NodePublishVolumeRequest, self._publish),
                ("NodeUnpublishVolume", csi.NodeUnpublishVolumeRequest, self._unpublish),
                ("NodeGetCapabilities", csi.NodeGetCapabilitiesRequest, self._node_capabilities),
                ("NodeGetInfo", csi.NodeGetInfoRequest, self._node_info),
            ),
        )
        await self._offer()

    async def stop(self) -> None:
        """Ends both; requests under way have a moment."""
        if self._offering is not None:
            self._offering.cancel()
            await asyncio.gather(self._offering, return_exceptions=True)
        for server in (self._registration, self._driver):
            if server is not None:
                await server.stop(_GRACE_SECONDS)

    # ------------------------------------------------------------ registration

    async def _offer(self) -> None:
        """A new socket in its folder of plugins is what the kubelet looks for."""
        if self._registration is not None:
            await self._registration.stop(None)
        self._registration = await _serve(
            self._registration_socket,
            _handler(
                "pluginregistration.Registration",
                ("GetInfo", registration.InfoRequest, self._info),
                ("NotifyRegistrationStatus", registration.RegistrationStatus, self._notified),
            ),
        )

    async def _offer_again(self) -> None:
        await asyncio.sleep(_OFFER_AGAIN_SECONDS)
        self._offering = None
        try:
            await self._offer()
        except AgentError as error:
            log.error("%s", error)
            self._offering = asyncio.create_task(self._offer_again(), name="offer the driver again")

    async def _info(self, request: registration.InfoRequest, context: Context) -> registration.PluginInfo:
        return registration.PluginInfo(
            type="CSIPlugin", name=DRIVER, endpoint=str(self._socket), supported_versions=["1.0.0"]
        )

    async def _notified(
        self, request: registration.RegistrationStatus, context: Context
    ) -> registration.RegistrationStatusResponse:
        self._registered(request.plugin_registered)
        if request.plugin_registered:
            log.info("the kubelet has registered %s", DRIVER)
        else:
            log.error("the kubelet did not register %s, which is offered again: %s", DRIVER, request.error)
            if self._offering is None:
                self._offering = asyncio.create_task(self._offer_again(), name="offer the driver again")
        return registration.RegistrationStatusResponse()

    # ------------------------------------------------------------ identity

    async def _plugin_info(self, request: csi.GetPluginInfoRequest, context: Context) -> csi.GetPluginInfoResponse:
        return csi.GetPluginInfoResponse(name=DRIVER, vendor_version=version("stepfast-sidecar"))

    async def _plugin_capabilities(
        self, request: csi.GetPluginCapabilitiesRequest, context: Context
    ) -> csi.GetPluginCapabilitiesResponse:
        return csi.GetPluginCapabilitiesResponse()

    async def _probe(self, request: csi.ProbeRequest, context: Context) -> csi.ProbeResponse:
        return csi.ProbeResponse(ready=BoolValue(value=True))

    # ------------------------------------------------------------ node

    async def _node_capabilities(
        self, request: csi.NodeGetCapabilitiesRequest, context: Context
    ) -> csi.NodeGetCapabilitiesResponse:
        return csi.NodeGetCapabilitiesResponse()

    async def _node_info(self, request: csi.NodeGetInfoRequest, context: Context) -> csi.NodeGetInfoResponse:
        return csi.NodeGetInfoResponse(node_id=self._node)

    async def _publish(self, request: csi.NodePublishVolumeRequest, context: Context) -> csi.NodePublishVolumeResponse:
        try:
            volume = volume_of(
                id=request.volume_id, target_path=request.target_path, context=dict(request.volume_context),
                secrets=dict(request.secrets), pods_folder=self._pods_folder, takes_mirrors=self._takes_mirrors,
            )  # fmt: skip
        except VolumeRefused as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if request.HasField("volume_capability") and request.volume_capability.HasField("block"):
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"{volume.owner}: the volume is no block device")
        known = self._publisher.known(volume.id)
        if known is not None and _terms(known) != _terms(volume):
            await _abort(
                context, grpc.StatusCode.ALREADY_EXISTS, f"{volume.owner}: its volume is published otherwise already"
            )
        try:
            await self._publisher.publish(volume)
        except VolumeRefused as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except OSError as error:
            await _abort(context, grpc.StatusCode.INTERNAL, f"{volume.owner}: its volume is not published: {error}")
        return csi.NodePublishVolumeResponse()

    async def _unpublish(
        self, request: csi.NodeUnpublishVolumeRequest, context: Context
    ) -> csi.NodeUnpublishVolumeResponse:
        known = self._publisher.known(request.volume_id)
        owner = known.owner if known is not None else "a pod"
        try:
            check_target(request.volume_id, request.target_path, self._pods_folder, owner=owner)
        except VolumeRefused as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        try:
            await self._publisher.unpublish(request.volume_id, request.target_path)
        except OSError as error:
            await _abort(context, grpc.StatusCode.INTERNAL, f"{owner}: its volume is not removed: {error}")
        return csi.NodeUnpublishVolumeResponse()


def _terms(volume: Volume) -> tuple[object, ...]:
    """What one volume's id stands for, for ever; a secret may change."""
    return volume.target_path, volume.job, volume.run, volume.pod, volume.pod_uid


async def _abort(context: Context, code: grpc.StatusCode, message: str) -> NoReturn:
    log.warning("%s", message)
    await context.abort(code, message)
    raise AssertionError("abort raises")


Method = tuple[str, type[Message], Callable[[Any, Context], Awaitable[Message]]]


def _handler(service: str, *methods: Method) -> grpc.GenericRpcHandler:
    return grpc.method_handlers_generic_handler(
        service,
        {
            name: grpc.unary_unary_rpc_method_handler(
                method, request_deserializer=request.FromString, response_serializer=lambda m: m.SerializeToString()
            )
            for name, request, method in methods
        },
    )


async def _serve(path: Path, *handlers: grpc.GenericRpcHandler) -> grpc.aio.Server:
    """A server at the path, for root alone. Raises AgentError."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(handlers)
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        server.add_insecure_port(f"unix:{path}")
        os.chmod(path, 0o600)
    except (OSError, RuntimeError) as error:
        raise AgentError(f"no socket for the kubelet at {path}: {error}") from error
    await server.start()
    return server
