"""The commands `stepfast status`, `suspend` and `resume`: where the job is, what is shown or changed, the exit status.

Exit status 2: the command line asks for what is not there or may not be. 1: the cluster or the storage fails.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepfast import catalog
from stepfast.errors import SpecError, StepfastError
from stepfast.step import JobKey
from stepfast.storage import open_store
from stepfast_operator.document import JSON
from stepfast_operator.jobcommands.errors import (
    AskedWrong,
    ClusterError,
    ClusterUnknown,
    JobDeleted,
    JobNotFound,
    JobRefused,
)
from stepfast_operator.jobcommands.localjobs import LocalJob, LocalJobs
from stepfast_operator.jobcommands.sighting import (
    Sighting,
    checkpoints_uri,
    of_cluster,
    of_machine,
    read_status,
)
from stepfast_operator.jobcommands.steering import (
    StepRequest,
    over_text,
    resume_patch,
    start_text,
    suspend_patch,
)
from stepfast_operator.jobcommands.watching import Screen, screen_of
from stepfast_operator.record import State

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


def register(app: typer.Typer) -> None:
    """Adds `status`, `suspend` and `resume` to the `stepfast` command."""
    for command in (status, suspend, resume):
        app.command(no_args_is_help=True)(command)


def status(
    job: Job,
    namespace: Namespace = None,
    context: Context = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the status as JSON, as `stepfast run --summary` writes it.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Go on until the job is over. Exit status 1 when it has failed.")
    ] = False,
) -> None:
    """Show how a job is: its state and why, steps, checkpoints, recoveries.

    With -n or --context a job of the cluster. Without: the job of this name on this machine (below .stepfast/jobs
    here), else the one in the cluster's current namespace.
    """
    with _told("status"):
        asked = _asked(job, namespace, context)
        with screen_of(as_json=as_json, watch=watch) as screen:
            last = asyncio.run(_follow(asked, screen, watch=watch))
    if watch and last.status.state is State.FAILED:
        raise typer.Exit(1)


def suspend(job: Job, namespace: Namespace = None, context: Context = None) -> None:
    """Stop a job after a last checkpoint; `stepfast resume` lets it go on from there.

    For a job on this machine it says how: a signal to its own process does that.
    """
    with _told("suspend"):
        asked = _asked(job, namespace, context)
        local = asked.on_this_machine()
        typer.echo(_suspend_here(local) if local is not None else asyncio.run(_suspend_there(asked)))


def resume(
    job: Job,
    namespace: Namespace = None,
    context: Context = None,
    step: Annotated[
        int | None,
        typer.Option(
            min=0, help="Go back to this committed step; later ones are superseded, not deleted. 0: from scratch."
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check", help="Look into the storage first: a step that is not committed fails the job."
        ),
    ] = True,
) -> None:
    """Let a suspended job go on, from its latest committed step or from the one that is named.

    For a job on this machine it prints the command that goes on with it.
    """
    with _told("resume"):
        asked = _asked(job, namespace, context)
        local = asked.on_this_machine()
        if local is not None:
            typer.echo(_resume_here(local, step, check=check))
        else:
            typer.echo(asyncio.run(_resume_there(asked, step, check=check)))


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


def _asked(job: str, namespace: str | None, context: str | None) -> Asked:
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


async def _follow(asked: Asked, screen: Screen, *, watch: bool) -> Sighting:
    """Shows the job once, or until it is over; returns how it was last."""
    local = asked.on_this_machine()
    if local is not None:
        changes = asked.machine.follow(local.job)
        async with aclosing(changes):
            async for found in changes:
                seen = _sighting_here(found)
                screen.show(seen)
                if seen.is_over or not watch:
                    break
        return seen
    async with asked.in_its_cluster() as (jobs, key):
        if not watch:
            seen = _sighting_there(await jobs.get(key), jobs)
            screen.show(seen)
            return seen
        documents = jobs.follow(key, screen.say)
        async with aclosing(documents):
            async for document in documents:
                seen = _sighting_there(document, jobs)
                screen.show(seen)
                if seen.is_over:
                    break
        return seen


def _sighting_here(found: LocalJob) -> Sighting:
    return of_machine(found.document, folder=str(found.folder), process=found.process)


def _sighting_there(document: JSON, jobs: ClusterJobs) -> Sighting:
    access = jobs.access
    return of_cluster(document, context=access.context, server=access.server, now=time.time())


def _suspend_here(found: LocalJob) -> str:
    state = read_status(found.document).state
    if found.process is None:
        raise JobRefused(f"nothing runs {found.job} on this machine ({state}): there is nothing to suspend")
    if state is State.SUSPENDING:
        return f"{found.job} is being suspended already"
    return (
        f"{found.job} is run by process {found.process} on this machine. This saves a last checkpoint and ends it, as "
        f"Ctrl-C does:\n  kill -TERM {found.process}"
    )


def _resume_here(found: LocalJob, step: int | None, *, check: bool) -> str:
    status = read_status(found.document)
    command = found.command(step) or "(how `stepfast run` was called is not written down in its folder)"
    if found.process is not None:
        raise JobRefused(f"{found.job} is run already, by process {found.process} on this machine ({status.state})")
    if status.is_terminal:
        raise JobRefused(
            f"{found.job} is over ({over_text(status)}) and is never run again. The same command begins a new job of "
            f"that name, which goes on from its checkpoints:\n  {command}"
        )
    if step is not None and check:
        _check_committed(status.checkpoint.latest_persisted_uri, step)
    return f"{found.job} is a job of this machine ({status.state}). This goes on with it:\n  {command}"


async def _suspend_there(asked: Asked) -> str:
    async with asked.in_its_cluster() as (jobs, key):
        was_asked = False

        def patch_of(document: JSON) -> JSON | None:
            nonlocal was_asked
            patch = suspend_patch(document)
            was_asked = patch is None
            return patch

        document = await jobs.steer(key, patch_of)
    state = read_status(document).state
    if was_asked:
        return f"{key} in {jobs.access.name} is suspended already ({state})"
    return (
        f"{key} in {jobs.access.name} is asked to save a last checkpoint and to stop ({state}): "
        f"`stepfast status -w {asked.name_there}` shows when it is Suspended"
    )


async def _resume_there(asked: Asked, step: int | None, *, check: bool) -> str:
    request = StepRequest(step=step, command=uuid.uuid4().hex) if step is not None else None
    async with asked.in_its_cluster() as (jobs, key):
        if request is not None and check:
            document = await jobs.get(key)
            resume_patch(document, request)  # what is refused anyway needs no look into the storage
            await asyncio.to_thread(_check_committed, checkpoints_uri(document), request.step)
        goes_on = False

        def patch_of(document: JSON) -> JSON | None:
            nonlocal goes_on
            patch = resume_patch(document, request)
            goes_on = patch is None
            return patch

        document = await jobs.steer(key, patch_of)
    if goes_on:
        return f"{key} in {jobs.access.name} is not suspended: it is {read_status(document).state}"
    if request is not None:
        where = f"goes back to step {step}" if step else "starts from scratch"
        start = f"it {where}; later steps are superseded"
    else:
        start = start_text(document)
    return f"{key} in {jobs.access.name} is resumed: {start}. `stepfast status -w {asked.name_there}` follows it"


def _check_committed(uri: str | None, step: int) -> None:
    """A step that is not there would end the job for good. Raises JobRefused."""
    if step == 0:
        return
    without = "--no-check asks for it all the same; if it is not there, the job fails for good (CheckpointUnavailable)"
    if uri is None:
        raise JobRefused(f"nothing was committed yet, as far as the job's status tells: there is no step {step}")
    try:
        store = open_store(uri)
        try:
            steps = [found.step for found in catalog.committed_steps(store, "") if found.damage is None]
        finally:
            store.close()
    except StepfastError as error:
        raise JobRefused(f"whether step {step} is committed cannot be read from here ({error}). {without}") from error
    if step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise JobRefused(f"step {step} is not committed in {uri}; these are: {known}. {without}")


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Errors become one line and an exit status."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except StepfastError as error:
        sys.stderr.write(f"stepfast {name}: {error}\n")
        raise typer.Exit(2 if isinstance(error, AskedWrong | SpecError) else 1) from error
