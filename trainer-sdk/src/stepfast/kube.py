"""The API server as operator and agent see it: requests with time-outs, plain JSON in and out, errors in words of our
own. For those who have the `kubernetes` package: importing this imports it, which takes seconds.

Objects stay JSON here: a pod parsed into the client's generated classes costs ten times the few fields that are looked
at. Authentication, its renewal and TLS are the client library's.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias, TypedDict, TypeVar
from urllib.request import getproxies_environment

import aiohttp
import msgspec
from kubernetes.aio import client, config
from kubernetes.aio.client import rest

from stepfast.answertime import AnswerTime
from stepfast.errors import StepfastError

# An object has whatever fields the API server gives it.
JSON: TypeAlias = Any
T = TypeVar("T")
_MESSAGE_CHARACTERS = 2000
_JSON = "application/json"
_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
PAGE = 500  # objects
_UNREADABLE = (ValueError, RecursionError)


class KubeError(StepfastError):
    """The API server refused a request, or did not answer."""


class KubeUnavailable(KubeError):
    """It does not answer, is overloaded, or fails: try again."""


class NotFound(KubeError):
    """There is no such object."""


class AlreadyExists(KubeError):
    """An object of that name is there."""


class Conflict(KubeError):
    """The object is not as the request expected it."""


class Expired(KubeError):
    """That resource version is too old to go on from: list anew."""


class Forbidden(KubeError):
    """Who asks may not do that."""


class Unauthorized(Forbidden):
    """The API server does not know who asks."""


class Invalid(KubeError):
    """The object breaks a rule of the API, or one that somebody made for the cluster; the message says which."""


class InvalidObject(Invalid):
    """The API itself cannot take such an object, now or later: nobody's admission rule was asked."""


class PatchKind(StrEnum):
    """How a patch's body is meant."""

    MERGE = "application/merge-patch+json"
    JSON = "application/json-patch+json"


class Fields:
    """What is read of a kind's objects: a TypedDict of fields, whose values are Any or such a TypedDict again. Others
    are passed over, which of pods takes a seventh of the time that reading them whole does.
    """

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.json.Decoder(kind)

    def read(self, text: msgspec.Raw | bytes) -> JSON:
        """The object as dictionaries with these fields alone. Raises ValueError, RecursionError (it is too deep)."""
        return self._decoder.decode(text)


ALL_FIELDS = Fields(Any)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A part of a list: some objects, and the list's own resource version."""

    items: list[JSON]
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchEvent:
    """One line of a watch. `kind` is ADDED, MODIFIED, DELETED or BOOKMARK."""

    kind: str
    object: JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long, in seconds, a connection, an answer, and the answer to a change may take, and for how long a connection
    is kept that nobody uses.

    The pool hands out the connection that was unused for longest: of a spell's many, requests that come now and then
    keep as many as come within `idle_seconds`.
    """

    connect_seconds: float
    read_seconds: float
    change_seconds: float
    idle_seconds: float = 15.0


class _ListMetadata(msgspec.Struct, rename="camel"):
    resource_version: str
    token: str = msgspec.field(name="continue", default="")  # to ask for the next page with


class _List(msgspec.Struct):
    metadata: _ListMetadata
    items: list[msgspec.Raw] | None = None


class _Watched(msgspec.Struct):
    type: str
    object: msgspec.Raw


_LIST, _WATCHED = msgspec.json.Decoder(_List), msgspec.json.Decoder(_Watched)


class _VersionMetadata(TypedDict):
    uid: str
    resourceVersion: str


class _Versioned(TypedDict):
    metadata: _VersionMetadata


_VERSION_ALONE = Fields(_Versioned)


class Kube:
    """A connection pool to one API server."""

    def __init__(self, configuration: client.Configuration, patience: Patience) -> None:
        self._api, self._patience = client.ApiClient(configuration), patience
        self._api.rest_client = _Pool(configuration, patience.idle_seconds)  # it has not connected to anything yet
        self._changes = AnswerTime(inertia=32.0)

    @property
    def change_seconds(self) -> float:
        """How long a change takes at present: until it was answered, refused or given up."""
        return self._changes.seconds

    @staticmethod
    async def connect(patience: Patience) -> Kube:
        """With the pod's service account, or outside of a cluster with KUBECONFIG, which is only read. Raises
        KubeError.
        """
        configuration = client.Configuration()
        try:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call] # theirs
        except config.ConfigException:
            try:
                await config.load_kube_config(  # type: ignore[no-untyped-call] # theirs
                    client_configuration=configuration, persist_config=False
                )
            except (config.ConfigException, OSError) as error:
                raise KubeError(f"neither a service account nor a kubeconfig: {error}") from error
        return Kube(configuration, patience)

    async def close(self) -> None:
        await self._api.close()  # type: ignore[no-untyped-call] # theirs

    async def get(self, path: str, within_seconds: float | None = None, /, **query: str) -> JSON:
        """An object or a list; no answer within so long is none (default: `read_seconds`). Raises KubeError."""
        return await self._request("GET", path, query, seconds=within_seconds)

    def pages(self, path: str, fields: Fields = ALL_FIELDS, /, **query: str) -> AsyncGenerator[Page, None]:
        """All objects of a kind, a page at a time. Raises Expired when that took too long, other KubeErrors."""
        return self._pages(path, fields, query, _JSON)

    async def versions(self, path: str) -> dict[str, int]:
        """The resource version of every object of a kind, by uid. Raises KubeError."""
        found = {}
        async for page in self._pages(path, _VERSION_ALONE, {}, _METADATA_ONLY):
            for item in page.items:
                found[str(item["metadata"]["uid"])] = int(item["metadata"]["resourceVersion"])
        return found

    async def create(self, path: str, body: JSON) -> JSON:
        """The object as it was made. Raises AlreadyExists, Invalid, other KubeErrors."""
        return await self._request("POST", path, {}, body)

    async def replace(self, path: str, body: JSON) -> JSON:
        """The object as it is now. Raises Conflict when its resource version is not the body's."""
        return await self._request("PUT", path, {}, body)

    async def patch(self, path: str, body: JSON, kind: PatchKind = PatchKind.MERGE) -> JSON:
        """The object as it is now. Raises NotFound, Invalid (a failed `test`, too), other KubeErrors."""
        return await self._request("PATCH", path, {}, body, content_type=str(kind))

    async def delete(self, path: str, *, grace_seconds: int | None = None, uid: str | None = None) -> None:
        """Asks for the object's end, of that uid alone. No error when there is none (any more)."""
        body: dict[str, JSON] = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        with suppress(NotFound, Conflict):  # Conflict: another object has the name by now
            await self._request("DELETE", path, {}, body)

    async def watch(
        self, path: str, fields: Fields = ALL_FIELDS, /, *, idle_seconds: float, **query: str
    ) -> AsyncGenerator[WatchEvent, None]:
        """What happens from `resourceVersion` on, until the server ends it. Raises Expired; KubeUnavailable also when
        nothing, not even a bookmark, came for so long: a connection may die without a word.
        """
        timeout = aiohttp.ClientTimeout(total=None, connect=self._patience.connect_seconds, sock_read=idle_seconds)
        response = await self._send("GET", path, {**query, "watch": "true", "allowWatchBookmarks": "true"}, timeout)
        try:
            async for line in _lines(response.content):
                event = _WATCHED.decode(line)
                if event.type == "ERROR":
                    status = ALL_FIELDS.read(event.object)
                    raise _error_of(int(status.get("code") or 500), status, f"watch {path}")
                yield WatchEvent(kind=event.type, object=fields.read(event.object))
        except (aiohttp.ClientError, TimeoutError, *_UNREADABLE) as error:
            raise KubeUnavailable(f"watch {path}: {error!r}") from error
        finally:
            _hang_up(response)

    async def _pages(
        self, path: str, fields: Fields, query: Mapping[str, str], accept: str
    ) -> AsyncGenerator[Page, None]:
        def read(text: bytes) -> tuple[Page, str]:
            found = _LIST.decode(text)
            items = [fields.read(item) for item in found.items or ()]
            return Page(items=items, version=found.metadata.resource_version), found.metadata.token

        asked = {**query, "limit": str(PAGE)}
        while True:
            page, token = await self._request("GET", path, asked, accept=accept, read=read)
            yield page
            if not token:
                return
            asked["continue"] = token

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: JSON = None,
        *,
        seconds: float | None = None,
        content_type: str = _JSON,
        accept: str = _JSON,
        read: Callable[[bytes], T] = ALL_FIELDS.read,
    ) -> T:
        patience = self._patience
        seconds = seconds or (patience.read_seconds if method == "GET" else patience.change_seconds)
        timeout = aiohttp.ClientTimeout(total=seconds, connect=patience.connect_seconds)
        begin = time.monotonic()
        try:
            response = await self._send(
                method, path, query, timeout, body=body, content_type=content_type, accept=accept
            )
            return read(await response.read())
        except (aiohttp.ClientError, TimeoutError, *_UNREADABLE) as error:
            raise KubeUnavailable(f"{method} {path}: {error!r}") from error
        finally:
            if method != "GET":
                self._changes.note(time.monotonic() - begin)

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        timeout: aiohttp.ClientTimeout,
        *,
        body: JSON = None,
        content_type: str = _JSON,
        accept: str = _JSON,
    ) -> aiohttp.ClientResponse:
        # Compressing thousands of pods takes the API server longer than a cluster's network takes to carry them.
        headers = {"Accept": accept, "Content-Type": content_type, "Accept-Encoding": "identity"}
        try:
            serialized = await self._api.param_serialize(
                method, path, query_params=list(query.items()), header_params=headers, body=body,
                auth_settings=["BearerToken"],
            )  # fmt: skip
            answer = await self._api.call_api(*serialized, _request_timeout=timeout)
            response: aiohttp.ClientResponse = answer.response
            if response.status < 400:
                return response
            document = await _body_of(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise KubeUnavailable(f"{method} {path}: {error!r}") from error
        raise _error_of(response.status, document, f"{method} {path}")


class _Pool(rest.RESTClientObject):
    """The client library's connections, kept for as long as we say."""

    def __init__(self, configuration: client.Configuration, idle_seconds: float) -> None:
        # For a proxy, a session that trusts the environment reads it and ~/.netrc before each request.
        configuration.client_session_kwargs = {"trust_env": bool(getproxies_environment().keys() - {"no"})}
        super().__init__(configuration)
        self._idle_seconds = idle_seconds

    def _create_connector(self) -> aiohttp.TCPConnector:
        return aiohttp.TCPConnector(limit=self.maxsize, ssl=self.ssl_context, keepalive_timeout=self._idle_seconds)


async def _body_of(response: aiohttp.ClientResponse) -> JSON:
    """What is between us and the API server may answer, too, and not in JSON."""
    text = (await response.text())[: 10 * _MESSAGE_CHARACTERS]
    try:
        document = ALL_FIELDS.read(text.encode())
    except _UNREADABLE:
        document = None
    return document if isinstance(document, dict) else {"message": text}


def _hang_up(response: aiohttp.ClientResponse) -> None:
    """Without TLS' farewell, which the other end of a dead connection would never answer."""
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()
    response.close()


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a stream; `readline` would refuse long ones, and a pod may be long."""
    rest = b""
    while data := await stream.readany():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line:
                yield line


def _error_of(code: int, status: JSON, what: str) -> KubeError:
    message = f"{what}: {str(status.get('message') or code)[:_MESSAGE_CHARACTERS]}"
    match code, status.get("reason"):
        case 404, _:
            return NotFound(message)
        case 409, "AlreadyExists":
            return AlreadyExists(message)
        case 409, _:
            return Conflict(message)
        case 410, _:
            return Expired(message)
        case 401, _:
            return Unauthorized(message)
        case 403, _:
            return Forbidden(message)
        case ((400 | 422), _):
            return InvalidObject(message) if _is_of_the_api(code, status) else Invalid(message)
        case ((408 | 429), _):
            return KubeUnavailable(message)
        case _ if code >= 500:
            return KubeUnavailable(message)
        case _:
            return KubeError(message)


def _is_of_the_api(code: int, status: JSON) -> bool:
    """Whether the API's own validation refuses. A policy's denial is a 422 Invalid, too, but names no field; a
    webhook's is whatever it says itself, behind words of the API server's.
    """
    message = str(status.get("message") or "")
    if message.startswith("admission webhook "):
        return False
    if code == 400:
        return "cannot be handled as a" in message
    causes = (status.get("details") or {}).get("causes") or ()
    return status.get("reason") == "Invalid" and any(cause.get("field") for cause in causes)
