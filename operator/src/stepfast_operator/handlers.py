"""kopf watches TrainingJobs and tells of them here; nothing is decided here, and nothing is waited for.

Of kopf's high-level handlers none is used: they are told of differences, and keep a copy of each spec on the object to
find them. The finalizer is our own, too (`jobs.py`).
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
    # Kopf takes its own finalizer off whatever no handler of it needs; ours is another one.
    settings.persistence.finalizer = f"{labels.FINALIZER}-of-kopf"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=labels.PREFIX)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=labels.PREFIX, key="last-handled")
    return settings


def registry_of(jobs: Jobs, watch: JobWatch) -> kopf.OperatorRegistry:
    """The handlers, which hand everything on."""
    registry = kopf.OperatorRegistry()

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

    return registry
