"""Azure Blob Storage as a store. adlfs finds the credentials and makes the client; the requests are made
here.

adlfs' own operations are not used: they answer from a cache of listings, wrap errors into RuntimeError and
ValueError, take an error for "no such file", wait without end, and upload from one thread. Importing this
imports the Azure SDK.

Invariant owned here: `create` is exact even though an answer may be lost and the HTTP client silently sends a
request twice (aiohttp does, for PUT, on a connection that was closed). Every create carries a token in the
blob's metadata: who finds the object there reads whose it is.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar

from azure.core.exceptions import HttpResponseError, ResourceNotFoundError
from azure.storage.blob import BlobBlock
from azure.storage.blob.aio import BlobPrefix

from stepfast.errors import ObjectNotFound, StorageForbidden, UploadLost
from stepfast.layout import CHUNK_BYTES
from stepfast.storage.azurefaults import AZURE_ERRORS, azure_error, error_code
from stepfast.storage.base import ObjectInfo, Probe, Upload
from stepfast.storage.chunks import ChunkLedger
from stepfast.storage.paths import folder_path, object_path
from stepfast.storage.retry import Attempt, Retry

if TYPE_CHECKING:
    from azure.storage.blob.aio import BlobClient, BlobServiceClient

T = TypeVar("T")

MAX_BLOCKS = 50_000  # of one blob: the service's limit
_READ_BYTES = 32 * 1024 * 1024  # what the SDK fetches with one request
_DELETES_AT_ONCE = 32
_BODY_BYTES = 1024 * 1024
_TOKEN = "stepfast_create"  # metadata names are C# identifiers
_BYTES_PER_SECOND = 1024 * 1024  # an attempt that is slower than this is given up


class RequestOptions(TypedDict):
    """What every request to the service is made with."""

    connection_timeout: float
    read_timeout: float
    retry_total: int


class AzureFileSystem(Protocol):
    """What is used of adlfs.AzureBlobFileSystem."""

    service_client: BlobServiceClient
    credential: object
    loop: asyncio.AbstractEventLoop


class AzureStore:
    """See `Store`. A container's blobs under a prefix."""

    def __init__(
        self,
        filesystem: AzureFileSystem,
        container: str,
        prefix: str,
        *,
        uri: str,
        timeout_seconds: float = 20.0,
        retry: Retry | None = None,
        probe: Probe | None = None,
    ) -> None:
        """`timeout_seconds` is for connecting, for each silence of the server, and, with the time that its
        bytes need, for each request."""
        self.uri = uri
        self._filesystem = filesystem
        self._container = filesystem.service_client.get_container_client(container)
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._timeout_seconds = timeout_seconds
        self._retry = retry or Retry()
        self._probe = probe
        # Without these the SDK waits 300 s for every answer, and repeats each request by itself.
        self._options: RequestOptions = {
            "connection_timeout": timeout_seconds,
            "read_timeout": timeout_seconds,
            "retry_total": 0,
        }

    def read(self, path: str) -> bytes:
        async def call() -> bytes:
            stream = await self._blob(path).download_blob(**self._options)
            data: bytes = await stream.readall()
            return data

        return self.call("read", path, call, is_long=True)

    def read_range(self, path: str, offset: int, buffer: memoryview) -> None:
        view = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        if not len(view):
            self.call("read", path, lambda: self._blob(path).get_blob_properties(**self._options))
        for start in range(0, len(view), _READ_BYTES):
            self._read_piece(path, offset + start, view[start : start + _READ_BYTES])

    def create(self, path: str, data: bytes) -> bool:
        token = secrets.token_hex(16)

        async def call() -> bool:
            blob = self._blob(path)
            try:
                await blob.upload_blob(data, overwrite=False, metadata={_TOKEN: token}, **self._options)
            except HttpResponseError as error:
                if error_code(error) not in {"BlobAlreadyExists", "ConditionNotMet"}:
                    raise
                return await self._is_mine(blob, token)
            return True

        self.call_probe("create:before", path)
        is_ours = self.call("create", path, call, size_bytes=len(data))
        self.call_probe("create:after", path)
        return is_ours

    def replace(self, path: str, data: bytes) -> None:
        async def call() -> None:
            await self._blob(path).upload_blob(data, overwrite=True, **self._options)

        self.call_probe("replace:before", path)
        self.call("replace", path, call, size_bytes=len(data))
        self.call_probe("replace:after", path)

    def upload(self, path: str, size_bytes: int, *, chunk_bytes: int = CHUNK_BYTES) -> Upload:
        return AzureUpload(self, self._blob(path), path, size_bytes, chunk_bytes=chunk_bytes, options=self._options)

    def list(self, folder: str) -> Sequence[ObjectInfo]:
        prefix = self._folder_prefix(folder)

        async def call() -> dict[str, ObjectInfo]:
            found: dict[str, ObjectInfo] = {}
            entries = self._container.walk_blobs(name_starts_with=prefix, include=["metadata"], **self._options)
            async for entry in entries:
                name = entry.name.removeprefix(prefix).removesuffix("/")
                is_folder = isinstance(entry, BlobPrefix) or not hasattr(entry, "size") or _is_folder(entry.metadata)
                if name and (name not in found or is_folder):
                    size_bytes = 0 if isinstance(entry, BlobPrefix) or is_folder else int(entry.size)
                    found[name] = ObjectInfo(name=name, size_bytes=size_bytes, is_folder=is_folder)
            return found

        found = self.call("list", folder, call, is_long=True)
        return [found[name] for name in sorted(found)]

    def list_temporary(self, folder: str) -> Sequence[tuple[str, str]]:
        return []  # what was not committed is no object

    def delete(self, path: str) -> None:
        self.call_probe("delete:before", path)
        self.call("delete", path, lambda: self._delete(self._prefix + object_path(path)))
        self.call_probe("delete:after", path)

    def delete_folder(self, folder: str) -> None:
        if not folder_path(folder):
            raise StorageForbidden("the whole root is never deleted")
        prefix = self._folder_prefix(folder)
        self.call_probe("delete:before", folder)
        self.call("delete", folder, lambda: self._delete_under(prefix), is_long=True)
        self.call_probe("delete:after", folder)

    def open_file(self, path: str) -> int | None:
        object_path(path)
        return None

    def close(self) -> None:
        async def call() -> None:
            await self._filesystem.service_client.close()
            close_credential = getattr(self._filesystem.credential, "close", None)
            if close_credential is not None:
                await close_credential()

        asyncio.run_coroutine_threadsafe(call(), self._filesystem.loop).result(self._timeout_seconds)

    def call(
        self,
        doing: str,
        path: str,
        operation: Callable[[], Awaitable[T]],
        *,
        size_bytes: int = 0,
        is_long: bool = False,
    ) -> T:
        """The operation's result, tried until the deadline. A long one is many requests, each with its own
        timeout."""
        limit = self._timeout_seconds + size_bytes / _BYTES_PER_SECOND

        async def one(seconds: float) -> T:
            # The HTTP client's own timeouts do not cover a server that stops reading what it is sent.
            async with asyncio.timeout(seconds):
                return await operation()

        def attempt(attempt: Attempt) -> T:
            seconds = attempt.remaining_seconds if is_long else min(limit, attempt.remaining_seconds)
            future = asyncio.run_coroutine_threadsafe(one(seconds), self._filesystem.loop)
            try:
                return future.result()
            except AZURE_ERRORS as error:
                raise azure_error(error, f"{doing} {path}") from error
            finally:
                future.cancel()  # an interrupted caller leaves no request behind

        return self._retry.run(attempt)

    def call_probe(self, operation: str, path: str) -> None:
        if self._probe is not None:
            self._probe(operation, path)

    def _read_piece(self, path: str, offset: int, view: memoryview) -> None:
        async def call() -> int:
            try:
                stream = await self._blob(path).download_blob(offset=offset, length=len(view), **self._options)
            except HttpResponseError as error:
                if error_code(error) == "InvalidRange" or error.status_code == 416:
                    return 0
                raise
            filled = 0
            async for data in stream.chunks():
                view[filled : filled + len(data)] = data
                filled += len(data)
            return filled

        filled = self.call("read", path, call, size_bytes=len(view))
        if filled < len(view):
            raise ObjectNotFound(f"read {path}: it ends before {offset + len(view)}")

    async def _is_mine(self, blob: BlobClient, token: str) -> bool:
        try:
            properties = await blob.get_blob_properties(**self._options)
        except ResourceNotFoundError:
            return False  # it was there, and is gone again
        return bool((properties.metadata or {}).get(_TOKEN) == token)

    async def _delete(self, name: str) -> None:
        try:
            await self._container.get_blob_client(name).delete_blob(delete_snapshots="include", **self._options)
        except ResourceNotFoundError as error:
            if error_code(error) == "ContainerNotFound":
                raise

    async def _delete_under(self, prefix: str) -> None:
        files: list[str] = []
        folders: list[str] = []
        async for entry in self._container.list_blobs(name_starts_with=prefix, include=["metadata"], **self._options):
            (folders if _is_folder(entry.metadata) else files).append(entry.name)
        limit = asyncio.Semaphore(_DELETES_AT_ONCE)

        async def delete(name: str) -> None:
            async with limit:
                await self._delete(name)

        try:
            async with asyncio.TaskGroup() as group:  # no request outlives this call, whatever fails
                for name in files:
                    group.create_task(delete(name))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        # Accounts with a hierarchical namespace have real folders, which must be empty to go: the deepest
        # first.
        for name in sorted(folders, reverse=True):
            await self._delete(name)
        await self._delete_marker(prefix.removesuffix("/"))

    async def _delete_marker(self, name: str) -> None:
        blob = self._container.get_blob_client(name)
        try:
            properties = await blob.get_blob_properties(**self._options)
        except ResourceNotFoundError:
            return
        if _is_folder(properties.metadata):
            await self._delete(name)

    def _blob(self, path: str) -> BlobClient:
        return self._container.get_blob_client(self._prefix + object_path(path))

    def _folder_prefix(self, folder: str) -> str:
        path = folder_path(folder)
        return f"{self._prefix}{path}/" if path else self._prefix


class AzureUpload:
    """See `Upload`. Chunks are blocks, staged in parallel; nothing is visible before their list is committed.

    Block ids carry a token of this upload: two writers of one object never mix their blocks. The service
    forgets the blocks of an upload that was aborted, or whose process was killed, after a week.
    """

    def __init__(
        self,
        store: AzureStore,
        blob: BlobClient,
        path: str,
        size_bytes: int,
        *,
        chunk_bytes: int,
        options: RequestOptions,
    ) -> None:
        pieces = -(-size_bytes // (chunk_bytes * MAX_BLOCKS))
        self.chunk_bytes = chunk_bytes * max(pieces, 1)
        self._ledger = ChunkLedger(size_bytes, self.chunk_bytes)
        self._store = store
        self._blob = blob
        self._path = path
        self._options = options
        self._token = secrets.token_hex(8)
        self._is_over = False

    def put(self, offset: int, data: memoryview) -> None:
        view = data.cast("B") if data.format != "B" or data.ndim != 1 else data
        self._ledger.check(offset, len(view))
        self._check_alive()
        self._store.call_probe("upload.put:before", self._path)

        async def call() -> None:
            body: Any = _Body(view)  # the async client takes async iterables; its types only name others
            await self._blob.stage_block(self._block_id(offset), body, length=len(view), **self._options)

        self._store.call("upload", self._path, call, size_bytes=len(view))
        self._ledger.mark(offset)
        self._store.call_probe("upload.put:after", self._path)

    def finish(self) -> None:
        self._ledger.check_complete()
        self._check_alive()
        self._store.call_probe("upload.finish:before", self._path)
        blocks = [BlobBlock(block_id=self._block_id(offset)) for offset in self._ledger.offsets()]

        async def call() -> bool:
            # Done twice it says the same: the first time the blocks are uncommitted, then they are the blob's
            # own.
            try:
                await self._blob.commit_block_list(blocks, **self._options)
            except HttpResponseError as error:
                if error_code(error) == "InvalidBlockList":
                    return False
                raise
            return True

        if not self._store.call("upload", self._path, call):
            self._is_over = True
            raise UploadLost(f"upload {self._path}: another writer finished it meanwhile")
        self._is_over = True
        self._store.call_probe("upload.finish:after", self._path)

    def abort(self) -> None:
        self._is_over = True

    def _block_id(self, offset: int) -> str:
        return f"{self._token}-{offset:016x}"  # of equal length, as the service demands

    def _check_alive(self) -> None:
        if self._is_over:
            raise UploadLost(f"upload {self._path}: the upload was ended meanwhile")


class _Body:
    """A request's body in pieces. Each is a copy: what lies in the socket's buffer when an attempt is given
    up must not hold on to, or show the later contents of, memory that the caller uses again."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._view), _BODY_BYTES):
            yield bytes(self._view[start : start + _BODY_BYTES])


def _is_folder(metadata: dict[str, str] | None) -> bool:
    return any(key.lower() == "hdi_isfolder" and value == "true" for key, value in (metadata or {}).items())
