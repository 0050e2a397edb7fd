"""The API server as the agent needs it: five requests, each with a time-out, in the words of `checkpointnode`.

Importing this imports the client library, which takes seconds: `cluster` does so in a thread.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from urllib.parse import quote

from stepfast.kube import Expired, Kube, KubeError, NotFound, PatchKind, Patience
from stepfast_sidecar.checkpointnode import Api, ApiError, ApiExpired, ApiNotFound, Object

_PATH = "/apis/stepfast.dev/v1alpha1/checkpointnodes"
_PATIENCE = Patience(connect_seconds=5.0, read_seconds=15.0, change_seconds=15.0)
_WATCH_SECONDS = 60  # the server ends it then, and the next one goes on: a dead connection is noticed in time
_MESSAGE_CHARACTERS = 500


class KubeApi(Api):
    """A connection pool to one API server."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube

    @staticmethod
    async def connect() -> KubeApi:
        """With the pod's service account, or outside of a cluster with KUBECONFIG. Raises ApiError."""
        with _translated():
            return KubeApi(await Kube.connect(_PATIENCE))

    async def close(self) -> None:
        await self._kube.close()

    async def find(self, name: str) -> tuple[Object | None, str]:
        with _translated():
            found = await self._kube.get(_PATH, fieldSelector=f"metadata.name={name}")
        items = found.get("items") or []
        return (items[0] if items else None), found["metadata"]["resourceVersion"]

    async def create(self, body: Object) -> Object:
        with _translated():
            created: Object = await self._kube.create(_PATH, body)
        return created

    async def node_uid(self, name: str) -> str:
        with _translated():
            node = await self._kube.get(f"/api/v1/nodes/{quote(name, safe='')}")
        return str(node["metadata"]["uid"])

    async def patch_status(self, name: str, status: Object) -> None:
        with _translated():
            # In place of the whole: of a merge what is told no more would stay.
            patch = [{"op": "add", "path": "/status", "value": status}]
            await self._kube.patch(f"{_PATH}/{quote(name, safe='')}/status", patch, PatchKind.JSON)

    async def watch(self, name: str, resource_version: str) -> AsyncGenerator[tuple[str, Object], None]:
        query = {
            "fieldSelector": f"metadata.name={name}", "resourceVersion": resource_version,
            "timeoutSeconds": str(_WATCH_SECONDS),
        }  # fmt: skip
        idle_seconds = _WATCH_SECONDS + _PATIENCE.read_seconds
        with _translated():
            async with aclosing(self._kube.watch(_PATH, idle_seconds=idle_seconds, **query)) as events:
                async for event in events:
                    yield event.kind, event.object


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except NotFound as error:
        raise ApiNotFound(f"{_message(error)} (are the CRDs of Stepfast installed?)") from error
    except Expired as error:
        raise ApiExpired(_message(error)) from error
    except KubeError as error:
        raise ApiError(_message(error)) from error


def _message(error: KubeError) -> str:
    return str(error)[:_MESSAGE_CHARACTERS]
