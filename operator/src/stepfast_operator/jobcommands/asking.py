"""Which job a command line means, and how what goes wrong is told: the same for every command about one job.

Exit status 2: the command line asks for what is not there or may not be. 1: the cluster or the storage fails.
"""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepfast.errors import SpecError, StepfastError
from stepfast.step import JobKey
from stepfast_operator.document import JSON
from stepfast_operator.jobcommands.errors import AskedWrong, ClusterError, ClusterUnknown, JobDeleted, JobNotFound
from stepfast_operator.jobcommands.localjobs import LocalJob, LocalJobs
from stepfast_operator.jobcommands.sighting import Sighting, of_cluster, of_machine

if TYPE_CHECKING:
    from stepfast_operator.jobcommands.clusterjobs import ClusterJobs

INTERRUPTED = 130
_PACKAGES = ("kubernetes", "aiohttp")  # of the extra `cluster`

Job = Annotated[str, typer.Argument(metavar="JOB", help="The job's name, or NAMESPACE/NAME.")]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="The job's namespace in the cluster. Default: the context's own."),
]
Context = Annotated[
    str | None, typer.Option(help="The kubeconfig's context whose cluster has the job. Default: the current one.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The job that the command line means."""

    name: str
    namespace: str | None
    context: str | None
    in_cluster: bool  # said so by -n or --context
    machine: LocalJobs

    def on_this_machine(self) -> LocalJob | None:
        """None when it is to be looked for in a cluster. Raises SpecError, StatusUnreadable."""
        if self.in_cluster:
            return None
        found = self.machine.find(self.name, self.namespace)
        return self.machine.get(found) if found is not None else None

    @property
    def name_there(self) -> str:
        """As commands of the user's name the job in the cluster."""
        words = ["-n", self.namespace] if self.namespace is not None else []
        words += ["--context", self.context] if self.context is not None else []
        return " ".join([*words, self.name])

    @asynccontextmanager
    async def in_its_cluster(self) -> AsyncIterator[tuple[ClusterJobs, JobKey]]:
        """The jobs of its cluster, and its full name there. Errors say that this machine has no such job, either."""
        try:
            async with cluster_jobs(self.context) as jobs:
                yield jobs, jobs.key(self.name, self.namespace)
        except (JobNotFound, ClusterError) as error:
            if self.in_cluster or isinstance(error, JobDeleted):
                raise
            text = f"{self.machine.missing(self.name)}; {error}"
            raise (JobNotFound(text) if isinstance(error, ClusterUnknown) else type(error)(text)) from error


def cluster_jobs(context: str | None) -> AbstractAsyncContextManager[ClusterJobs]:
    """Imports what speaks to clusters only now: it takes a second, and may not be installed. Raises ClusterError."""
    if any(find_spec(package) is None for package in _PACKAGES):
        raise ClusterUnknown('to reach a cluster install more: pip install "stepfast-operator[cluster]"')
    from stepfast_operator.jobcommands.clusterjobs import connected

    return connected(context)


def asked_of(job: str, namespace: str | None, context: str | None) -> Asked:
    """What JOB, -n and --context name. Raises SpecError."""
    given = namespace
    if "/" in job:
        key = JobKey.parse(job)
        if namespace not in (None, key.namespace):
            raise SpecError("--namespace", f"{namespace} is not the namespace of {job}")
        namespace, job = key.namespace, key.name
    JobKey(namespace=namespace or "any", name=job)
    machine = LocalJobs(Path.cwd() / ".stepfast" / "jobs")
    in_cluster = given is not None or context is not None
    return Asked(name=job, namespace=namespace, context=context, in_cluster=in_cluster, machine=machine)


def sighting_here(found: LocalJob) -> Sighting:
    """The job of this machine as it is shown. Raises StatusForeign."""
    return of_machine(found.document, folder=str(found.folder), process=found.process)


def sighting_there(document: JSON, jobs: ClusterJobs) -> Sighting:
    """The job of a cluster as it is shown. Raises StatusForeign."""
    access = jobs.access
    return of_cluster(document, context=access.context, server=access.server, now=time.time())


@contextmanager
def told(name: str) -> Iterator[None]:
    """Errors become one line and an exit status."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except StepfastError as error:
        sys.stderr.write(f"stepfast {name}: {error}\n")
        raise typer.Exit(2 if isinstance(error, AskedWrong | SpecError) else 1) from error
