"""The commands `stepfast status`, `suspend` and `resume`: what is shown or changed."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import aclosing
from typing import Annotated

import typer

from stepfast import catalog
from stepfast.errors import StepfastError
from stepfast.storage import open_store
from stepfast_operator.document import JSON
from stepfast_operator.jobcommands.asking import (
    Asked,
    Context,
    Job,
    Namespace,
    asked_of,
    sighting_here,
    sighting_there,
    told,
)
from stepfast_operator.jobcommands.errors import JobRefused
from stepfast_operator.jobcommands.explaining import explain
from stepfast_operator.jobcommands.localjobs import LocalJob
from stepfast_operator.jobcommands.reporting import report
from stepfast_operator.jobcommands.sighting import (
    Sighting,
    checkpoints_uri,
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


def register(app: typer.Typer) -> None:
    """Adds what is done about one job to the `stepfast` command."""
    for command in (status, explain, report, suspend, resume):
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
    with told("status"):
        asked = asked_of(job, namespace, context)
        with screen_of(as_json=as_json, watch=watch) as screen:
            last = asyncio.run(_follow(asked, screen, watch=watch))
    if watch and last.status.state is State.FAILED:
        raise typer.Exit(1)


def suspend(job: Job, namespace: Namespace = None, context: Context = None) -> None:
    """Stop a job after a last checkpoint; `stepfast resume` lets it go on from there.

    For a job on this machine it says how: a signal to its own process does that.
    """
    with told("suspend"):
        asked = asked_of(job, namespace, context)
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
    with told("resume"):
        asked = asked_of(job, namespace, context)
        local = asked.on_this_machine()
        if local is not None:
            typer.echo(_resume_here(local, step, check=check))
        else:
            typer.echo(asyncio.run(_resume_there(asked, step, check=check)))


async def _follow(asked: Asked, screen: Screen, *, watch: bool) -> Sighting:
    """Shows the job once, or until it is over; returns how it was last."""
    local = asked.on_this_machine()
    if local is not None:
        changes = asked.machine.follow(local.job)
        async with aclosing(changes):
            async for found in changes:
                seen = sighting_here(found)
                screen.show(seen)
                if seen.is_over or not watch:
                    break
        return seen
    async with asked.in_its_cluster() as (jobs, key):
        if not watch:
            seen = sighting_there(await jobs.get(key), jobs)
            screen.show(seen)
            return seen
        documents = jobs.follow(key, screen.say)
        async with aclosing(documents):
            async for document in documents:
                seen = sighting_there(document, jobs)
                screen.show(seen)
                if seen.is_over:
                    break
        return seen


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
