"""TrainingJobs of a cluster, as a user reads and steers them. Needs the extra `cluster`.

Every error of the API server leaves here as one line that says what to do.
"""

from __future__ import annotations

import asyncio
import difflib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

from stepfast.kube import (
    Conflict,
    Expired,
    Forbidden,
    Invalid,
    Kube,
    KubeError,
    KubeUnavailable,
    NotFound,
    Unauthorized,
)
from stepfast.step import JobKey
from stepfast_operator import labels
from stepfast_operator.document import JSON
from stepfast_operator.jobcommands.errors import ClusterError, JobDeleted, JobNotFound, JobRefused
from stepfast_operator.jobcommands.kubeaccess import Access, access_of
from stepfast_operator.lease import PATIENCE

_GROUP = "/apis/stepfast.dev/v1alpha1"
_KIND = "trainingjobs.stepfast.dev"
_WATCH_IDLE_SECONDS = 90.0  # bookmarks come once a minute
_AGAIN_SECONDS = 2.0
_LISTED = "500"
_SUGGESTIONS = 5
_PATCHES = 5


class ClusterJobs:
    """The jobs of one cluster."""

    def __init__(self, kube: Kube, access: Access) -> None:
        self._kube, self.access = kube, access

    def key(self, name: str, namespace: str | None) -> JobKey:
        """That job's full name: in the current namespace where none is given."""
        return JobKey(namespace=namespace or self.access.namespace, name=name)

    async def get(self, job: JobKey) -> JSON:
        """The TrainingJob. Raises JobNotFound, ClusterError."""
        try:
            return await self._kube.get(_path(job))
        except NotFound:
            raise await self._missing(job) from None
        except KubeError as error:
            raise self._told(error, job, "get") from error

    async def pods(self, job: JobKey, uid: str) -> list[JSON]:
        """Those of its gangs. Raises ClusterError."""
        path = f"/api/v1/namespaces/{job.namespace}/pods"
        try:
            return list((await self._kube.get(path, labelSelector=f"{labels.JOB_UID}={uid}")).get("items") or ())
        except KubeError as error:
            raise self._told(error, job, "list", "pods") from error

    async def events(self, job: JobKey, uid: str) -> list[JSON]:
        """What the cluster still remembers of the job's Events (an hour of them, by default). Raises ClusterError."""
        selector = f"involvedObject.kind=TrainingJob,involvedObject.uid={uid}"
        path = f"/api/v1/namespaces/{job.namespace}/events"
        try:
            return list((await self._kube.get(path, fieldSelector=selector)).get("items") or ())
        except KubeError as error:
            raise self._told(error, job, "list", "events") from error

    async def follow(self, job: JobKey, tell: Callable[[str], None]) -> AsyncGenerator[JSON, None]:
        """The job now, and each time that it changes, until it is deleted. When the API server stops to answer, `tell`
        is told so, and it is asked again. Raises JobNotFound, ClusterError.
        """
        document = await self.get(job)
        uid = document["metadata"]["uid"]
        while True:
            yield document
            try:
                changes = self._changes(job, document["metadata"]["resourceVersion"])
                async with aclosing(changes):
                    async for document in changes:
                        yield document
            except Expired:
                pass
            except KubeUnavailable as error:
                tell(f"{self._told(error, job, 'watch')}; trying again")
            except KubeError as error:
                raise self._told(error, job, "watch") from error
            document = await self._again(job, uid)

    async def _changes(self, job: JobKey, version: str) -> AsyncGenerator[JSON, None]:
        query = {"fieldSelector": f"metadata.name={job.name}", "resourceVersion": version}
        events = self._kube.watch(_path(job).rpartition("/")[0], idle_seconds=_WATCH_IDLE_SECONDS, **query)
        async with aclosing(events):
            async for event in events:
                if event.kind == "DELETED":
                    raise JobDeleted(f"{job} was deleted")
                if event.kind != "BOOKMARK":
                    yield event.object

    async def _again(self, job: JobKey, uid: str) -> JSON:
        """The same job, as soon as the API server answers."""
        while True:
            try:
                document = await self._kube.get(_path(job))
            except NotFound:
                raise JobDeleted(f"{job} was deleted") from None
            except KubeUnavailable:
                await asyncio.sleep(_AGAIN_SECONDS)
            except KubeError as error:
                raise self._told(error, job, "get") from error
            else:
                if document["metadata"]["uid"] != uid:
                    raise JobDeleted(f"{job} was deleted; another job has that name now")
                return document

    async def steer(self, job: JobKey, patch_of: Callable[[JSON], JSON | None]) -> JSON:
        """Patches the job as `patch_of` says for the job as it stands (None: not at all), and returns it. Nobody else's
        change in between is overwritten. Raises JobNotFound, JobRefused, ClusterError.
        """
        for _ in range(_PATCHES):
            document = await self.get(job)
            patch = patch_of(document)
            if patch is None:
                return document
            read = {name: document["metadata"][name] for name in ("uid", "resourceVersion")}
            metadata = {**patch.get("metadata", {}), **read}
            try:
                return await self._kube.patch(_path(job), {**patch, "metadata": metadata})
            except Conflict:
                continue
            except NotFound:
                raise JobDeleted(f"{job} was deleted") from None
            except KubeError as error:
                raise self._told(error, job, "patch") from error
        raise ClusterError(f"{job} is changed by others all the time: try again")

    async def _missing(self, job: JobKey) -> JobNotFound | ClusterError | JobRefused:
        """Why the job was not found: where was looked, and what is near."""
        where = f"there is no job {job.name} in namespace {job.namespace} of {self.access.name} ({self.access.server})"
        try:
            found = await self._kube.get(_path(job).rpartition("/")[0], limit=_LISTED)
        except NotFound as error:
            return self._told(error, job, "list")
        except KubeError:
            return JobNotFound(where)
        if not await self._has_namespace(job.namespace):
            return JobNotFound(
                f"there is no namespace {job.namespace} in {self.access.name} ({self.access.server})"
                f"{await self._elsewhere(job)}"
            )
        names = sorted(item["metadata"]["name"] for item in found.get("items") or ())
        near = difflib.get_close_matches(job.name, names, n=_SUGGESTIONS) or names[:_SUGGESTIONS]
        elsewhere = await self._elsewhere(job)
        if elsewhere or not near:
            return JobNotFound(f"{where}{elsewhere or '; there are none'}")
        return JobNotFound(f"{where}: did you mean {' or '.join(near)}?")

    async def _has_namespace(self, namespace: str) -> bool:
        """Also when we may not know."""
        try:
            await self._kube.get(f"/api/v1/namespaces/{namespace}")
        except NotFound:
            return False
        except KubeError:
            return True
        return True

    async def _elsewhere(self, job: JobKey) -> str:
        """Jobs of that name in other namespaces, for who may look there."""
        try:
            found = await self._kube.get(f"{_GROUP}/trainingjobs", fieldSelector=f"metadata.name={job.name}")
        except KubeError:
            return ""
        spaces = sorted(item["metadata"]["namespace"] for item in found.get("items") or ())[:_SUGGESTIONS]
        return f": did you mean {' or '.join(f'-n {space}' for space in spaces)}?" if spaces else ""

    def _told(self, error: KubeError, job: JobKey, verb: str, kind: str = _KIND) -> ClusterError | JobRefused:
        where = f"{self.access.name} ({self.access.server})"
        match error:
            case Unauthorized():
                return ClusterError(f"{where} does not take your credentials: log in again, as for kubectl")
            case Forbidden():
                return ClusterError(
                    f"you may not {verb} {kind} in namespace {job.namespace} of {where}: ask its administrator for "
                    f"the role {'view' if verb in ('get', 'list', 'watch') else 'edit'} there"
                )
            case NotFound():
                return ClusterError(
                    f"Stepfast is not installed in {where}, which knows no {_KIND}: helm install stepfast "
                    "charts/stepfast, or name another --context"
                )
            case Invalid():
                return JobRefused(f"{job}: {_reason(error)}")
            case KubeUnavailable():
                return ClusterError(f"{where} does not answer ({_reason(error)}): check the network, and the context")
            case _:
                return ClusterError(f"{where}: {_reason(error)}")


@asynccontextmanager
async def connected(context: str | None) -> AsyncIterator[ClusterJobs]:
    """The jobs of the cluster of that context, else of the current one. Raises ClusterError."""
    access = await access_of(context)
    try:
        kube = Kube(access.configuration, PATIENCE)
    except (ssl.SSLError, OSError) as error:
        raise ClusterError(f"the certificates of {access.name} cannot be used: {error}") from error
    try:
        yield ClusterJobs(kube, access)
    finally:
        await kube.close()


def _path(job: JobKey) -> str:
    return f"{_GROUP}/namespaces/{job.namespace}/trainingjobs/{job.name}"


def _reason(error: KubeError) -> str:
    """What the API server says, or what kept us from it, without our own path before it."""
    cause = error.__cause__
    text = str(error).partition(": ")[2] if cause is None else str(cause) or "no answer in time"
    return " ".join(text.split())
