"""The API server as the agent needs it: five requests, each with a time-out, plain JSON in and out.

Authentication, its renewal and TLS are the client library's. Importing this imports it, which takes seconds: `cluster`
does so in a thread.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any
from urllib.parse import quote

import aiohttp
from kubernetes.aio import client, config

from stepfast_sidecar.checkpointnode import Api, ApiError, ApiExpired, ApiNotFound, Object

_PATH = "/apis/stepfast.dev/v1alpha1/checkpointnodes"
_REQUEST_SECONDS = 15.0
_CONNECT_SECONDS = 5.0
_WATCH_SECONDS = 60  # the server ends it then, and the next one goes on: a dead connection is noticed in time
_MESSAGE_CHARACTERS = 500


class KubeApi(Api):
    """A connection pool to one API server."""

    def __init__(self, configuration: client.Configuration) -> None:
        self._api = client.ApiClient(configuration)

    @staticmethod
    async def connect() -> KubeApi:
        """With the pod's service account, or outside of a cluster with KUBECONFIG. Raises ApiError."""
        configuration = client.Configuration()
        try:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]  # theirs
        except config.ConfigException:
            try:
                await config.load_kube_config(  # type: ignore[no-untyped-call]  # theirs
                    client_configuration=configuration, persist_config=False
                )
            except (config.ConfigException, OSError) as error:
                raise ApiError(f"neither a service account nor a kubeconfig: {error}") from error
        return KubeApi(configuration)

    async def close(self) -> None:
        await self._api.close()  # type: ignore[no-untyped-call]  # theirs

    async def find(self, name: str) -> tuple[Object | None, str]:
        found = await self._request("GET", _PATH, {"fieldSelector": f"metadata.name={name}"})
        items = found.get("items") or []
        return (items[0] if items else None), found["metadata"]["resourceVersion"]

    async def create(self, body: Object) -> Object:
        return await self._request("POST", _PATH, {}, body)

    async def node_uid(self, name: str) -> str:
        node = await self._request("GET", f"/api/v1/nodes/{quote(name, safe='')}", {})
        return str(node["metadata"]["uid"])

    async def patch_status(self, name: str, status: Object) -> None:
        path = f"{_PATH}/{quote(name, safe='')}/status"
        await self._request("PATCH", path, {}, {"status": status}, content_type="application/merge-patch+json")

    async def watch(self, name: str, resource_version: str) -> AsyncGenerator[tuple[str, Object], None]:
        query = {
            "fieldSelector": f"metadata.name={name}", "resourceVersion": resource_version, "watch": "true",
            "allowWatchBookmarks": "true", "timeoutSeconds": str(_WATCH_SECONDS),
        }  # fmt: skip
        timeout = aiohttp.ClientTimeout(connect=_CONNECT_SECONDS, sock_read=_WATCH_SECONDS + _REQUEST_SECONDS)
        response = await self._send("GET", _PATH, query, timeout)
        try:
            async for line in _lines(response.content):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise _error_of(int(event["object"].get("code") or 500), event["object"], f"watch {_PATH}")
                yield event["type"], event["object"]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            raise ApiError(f"watch {_PATH}: {error!r}") from error
        finally:
            response.close()

    async def _request(
        self, method: str, path: str, query: dict[str, str], body: Object | None = None, *,
        content_type: str = "application/json",
    ) -> dict[str, Any]:  # fmt: skip
        timeout = aiohttp.ClientTimeout(total=_REQUEST_SECONDS, connect=_CONNECT_SECONDS)
        response = await self._send(method, path, query, timeout, body=body, content_type=content_type)
        try:
            document = json.loads(await response.read())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ApiError(f"{method} {path}: {error!r}") from error
        if not isinstance(document, dict):
            raise ApiError(f"{method} {path}: the answer is no object")
        return document

    async def _send(
        self, method: str, path: str, query: dict[str, str], timeout: aiohttp.ClientTimeout, *,
        body: Object | None = None, content_type: str = "application/json",
    ) -> aiohttp.ClientResponse:  # fmt: skip
        headers = {"Accept": "application/json", "Content-Type": content_type}
        try:
            serialized = await self._api.param_serialize(
                method, path, query_params=list(query.items()), header_params=headers, body=body,
                auth_settings=["BearerToken"],
            )  # fmt: skip
            answer = await self._api.call_api(*serialized, _request_timeout=timeout)
            response: aiohttp.ClientResponse = answer.response
            if response.status < 400:
                return response
            text = await response.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiError(f"{method} {path}: {error!r}") from error
        raise _error_of(response.status, _document(text), f"{method} {path}")


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The stream's lines, of whatever length."""
    rest = b""
    while data := await stream.readany():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line:
                yield line


def _document(text: str) -> Object:
    """A proxy between us and the API server may answer, too, and not in JSON."""
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    return document if isinstance(document, dict) else {"message": text}


def _error_of(code: int, status: Object, what: str) -> ApiError:
    message = f"{what}: {code} {str(status.get('message', ''))[:_MESSAGE_CHARACTERS]}"
    match code:
        case 404:
            return ApiNotFound(f"{message} (are the CRDs of Stepfast installed?)")
        case 410:
            return ApiExpired(message)
        case _:
            return ApiError(message)
