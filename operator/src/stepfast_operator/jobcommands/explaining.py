"""`stepfast explain`: why a job is as it is, what it waits for, what comes next."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from stepfast.errors import SpecError
from stepfast_operator.clusterjob import parse_job
from stepfast_operator.document import JSON, encode
from stepfast_operator.explanation import Paragraph, Surroundings, text_of
from stepfast_operator.explanation import explain as explanation_of
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
from stepfast_operator.jobcommands.errors import ClusterError
from stepfast_operator.jobcommands.sighting import Sighting
from stepfast_operator.limits import Limits, limits_of
from stepfast_operator.observed import WorkerPhase
from stepfast_operator.podview import pod_of
from stepfast_operator.workers import workers_of


def explain(
    job: Job,
    namespace: Namespace = None,
    context: Context = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print headings and sentences as JSON.")] = False,
) -> None:
    """Say why a job restarted, what that cost, what it waits for, and what comes next.

    It is looked for as `stepfast status` does.
    """
    with told("explain"):
        asked = asked_of(job, namespace, context)
        seen, paragraphs = asyncio.run(_explain(asked))
    if as_json:
        typer.echo(json.dumps({"where": seen.where, "paragraphs": encode(paragraphs)}, indent=2))
        return
    typer.echo(f"{seen.title}\n{text_of(paragraphs)}")


async def _explain(asked: Asked) -> tuple[Sighting, Sequence[Paragraph]]:
    """Raises StepfastError when there is no such job, or its cluster cannot be asked."""
    local = asked.on_this_machine()
    if local is not None:
        seen = sighting_here(local)
        limits = local.again.limits if local.again is not None else None
        return seen, _paragraphs(seen, limits, ())
    async with asked.in_its_cluster() as (jobs, key):
        document = await jobs.get(key)
        seen = sighting_there(document, jobs)
        try:
            pods: Sequence[JSON] = await jobs.pods(key, document["metadata"]["uid"])
        except ClusterError:
            pods = ()  # the operator has said what it saw of them
    return seen, _paragraphs(seen, _limits_of(document), _pending(pods, seen))


def _paragraphs(seen: Sighting, limits: Limits | None, pending: tuple[str, ...]) -> Sequence[Paragraph]:
    surroundings = Surroundings(pending=pending, notes=seen.notes)
    return explanation_of(seen.status, limits, surroundings, time.time())


def _limits_of(document: JSON) -> Limits | None:
    """None of a spec that this version does not know."""
    try:
        return limits_of(parse_job(document).spec)
    except SpecError:
        return None


def _pending(pods: Sequence[JSON], seen: Sighting) -> tuple[str, ...]:
    """The pods of the current attempt that do not run yet, each with why."""
    views = [view for pod in pods if (view := pod_of(pod)) is not None and view.attempt == seen.status.attempt]
    workers = workers_of(
        views, seen.status.nodes.desired, lambda _: None, is_gone=lambda _: False, now=time.time(), is_stopping=True
    )
    return tuple(worker.message for worker in workers if worker.phase is WorkerPhase.PENDING)
