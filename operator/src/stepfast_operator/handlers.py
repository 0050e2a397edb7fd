"""kopf watches TrainingJobs and tells of them here; nothing is decided here, and nothing is waited for.

kopf's own traces on an object are the finalizer, without which a job that is deleted could not save a last time, and
annotations while its deletion waits; both carry our prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kopf

from stepfast_operator import clusterjob, labels
from stepfast_operator.document import JSON
from stepfast_operator.jobs import Jobs
from stepfast_operator.jobwatch import JobWatch

_RESOURCE = ("stepfast.dev", "v1alpha1", "trainingjobs")
_DRAIN_POLL_SECONDS = 0.5
# A watch that dies without a word ends after these (kopf issues 1145 and 1276); `JobWatch` notices one that does not.
_SERVER_TIMEOUT_SECONDS = 300
_CLIENT_TIMEOUT_SECONDS = 310
_CONNECT_TIMEOUT_SECONDS = 30
_REQUEST_TIMEOUT_SECONDS = 30
_ERROR_DELAYS = (1, 1, 2, 3, 5, 8, 13, 21, 34, 55)


def settings_of() -> kopf.OperatorSettings:
    """How kopf is to behave."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True  # the Lease fences; somebody else's peering object must not freeze us
    settings.posting.enabled = False  # the job's story is told by Events of our own
    settings.scanning.disabled = True  # needs to list CRDs and namespaces, which we may not
    settings.watching.server_timeout = _SERVER_TIMEOUT_SECONDS
    settings.watching.client_timeout = _CLIENT_TIMEOUT_SECONDS
    settings.watching.connect_timeout = _CONNECT_TIMEOUT_SECONDS
    settings.networking.request_timeout = _REQUEST_TIMEOUT_SECONDS
    settings.queueing.error_delays = _ERROR_DELAYS
    settings.persistence.finalizer = labels.FINALIZER
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=labels.PREFIX)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=labels.PREFIX, key="last-handled")
    return settings


def registry_of(jobs: Jobs, watch: JobWatch) -> kopf.OperatorRegistry:
    """The handlers, which hand everything on."""
    registry = kopf.OperatorRegistry()

    def is_ours(body: Mapping[str, Any], **_: Any) -> bool:
        return clusterjob.is_managed(body)

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> Any:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.event(*_RESOURCE, registry=registry)
    async def seen(type: str | None, body: Mapping[str, Any], **_: Any) -> None:
        document: JSON = dict(body)
        uid, version = document["metadata"]["uid"], int(document["metadata"]["resourceVersion"])
        if type == "DELETED":
            watch.forget(uid)
            jobs.forget(uid)
            return
        watch.note(uid, version)
        if clusterjob.is_managed(document):
            jobs.take(document)

    @kopf.on.delete(*_RESOURCE, registry=registry, when=is_ours)
    async def deleted(uid: str, **_: Any) -> None:
        """The object stays until its gang has ended."""
        if not jobs.is_drained(uid):
            raise kopf.TemporaryError("its gang is saving a last time", delay=_DRAIN_POLL_SECONDS)

    return registry
