"""Where a cluster's job has its checkpoints, for `stepfast checkpoints -n NAMESPACE JOB`."""

from __future__ import annotations

import asyncio

from stepfast.errors import SpecError
from stepfast_operator.jobcommands.asking import cluster_jobs
from stepfast_operator.jobcommands.errors import AskedWrong
from stepfast_operator.jobcommands.sighting import checkpoints_uri


def checkpoints_of(name: str, namespace: str | None, context: str | None) -> str:
    """The URI of the job's folder; an entry point of the group `stepfast.jobs`. Raises SpecError,
    ClusterError.
    """
    return asyncio.run(_uri(name, namespace, context))


async def _uri(name: str, namespace: str | None, context: str | None) -> str:
    async with cluster_jobs(context) as jobs:
        key = jobs.key(name, namespace)
        try:
            uri = checkpoints_uri(await jobs.get(key))
        except AskedWrong as error:
            raise SpecError("JOB", str(error)) from error
    if uri is None:
        raise SpecError(
            "JOB",
            f"{key} has committed nothing yet and names no storageUri: give the URI instead, <the cluster's storage>/"
            f"{key}, of which its administrator knows",
        )
    return uri
