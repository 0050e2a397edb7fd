"""`stepfast report`: a job's life as one HTML file, with all of it that can be read from here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from stepfast.errors import StepfastError
from stepfast.histories import MAX_ROWS, SaveRow, read_rows
from stepfast.storage import open_store
from stepfast.storage.target import placed_file
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
from stepfast_operator.jobcommands.errors import ClusterError
from stepfast_operator.jobcommands.sighting import Sighting, checkpoints_uri
from stepfast_operator.life import Happening, Life, life_of
from stepfast_operator.lifepage.html import Told, life_page
from stepfast_operator.record import MAX_RECOVERIES
from stepfast_operator.sentences import count_text

_NOTED = ("eventTime", "lastTimestamp", "firstTimestamp")


def report(
    job: Job,
    namespace: Namespace = None,
    context: Context = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Where the page goes. Default: JOB.html here.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
) -> None:
    """Write a job's life as one page for a browser: attempts, steps, saves, stalls, recoveries.

    It is looked for as `stepfast status` does. The page needs nothing else, and says what could not be read from here.
    """
    with told("report"):
        asked = asked_of(job, namespace, context)
        target = out if out is not None else Path(f"{asked.name}.html")
        with placed_file(target, force=force, option="--out") as temporary:
            temporary.write_text(asyncio.run(_page(asked)), encoding="utf-8")
    typer.echo(f"{target}: written; open it in a browser", err=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sources:
    """What the page is made of. `notes`: what could not be read, and why."""

    seen: Sighting
    launches: dict[int, float]
    happenings: tuple[Happening, ...] = ()
    notes: tuple[str, ...] = ()


async def _page(asked: Asked) -> str:
    sources = await _read(asked)
    seen, now = sources.seen, time.time()
    saves, unread = await asyncio.to_thread(_saves, seen.document)
    life = life_of(
        seen.status,
        uid=str(seen.document["metadata"]["uid"]),
        now=now,
        saves=saves,
        launches=sources.launches,
        happenings=sources.happenings,
    )
    notes = [*sources.notes, *unread, *_unseen(life, len(saves))]
    facts = seen.report(now).facts
    return life_page(
        life, seen.status, Told(title=str(seen.job), where=_where(seen), facts=facts, notes=notes, seen_time=now)
    )


def _where(seen: Sighting) -> str:
    if seen.where["kind"] == "Machine":
        return "On one machine"
    return f"In {seen.title.partition(' (')[2].rstrip(')')}"


async def _read(asked: Asked) -> _Sources:
    """Raises StepfastError when there is no such job, or its cluster cannot be asked."""
    local = asked.on_this_machine()
    if local is not None:
        seen = sighting_here(local)
        return _Sources(seen=seen, launches=local.launches(asked.machine.root, seen.status.attempt))
    async with asked.in_its_cluster() as (jobs, key):
        document = await jobs.get(key)
        seen = sighting_there(document, jobs)
        try:
            events = await jobs.events(key, document["metadata"]["uid"])
        except ClusterError as error:
            return _Sources(seen=seen, launches={}, notes=(f"Events are not shown: {error}",))
    return _Sources(seen=seen, launches={}, happenings=tuple(_happening(event) for event in events))


def _happening(event: JSON) -> Happening:
    noted = next((event[name] for name in _NOTED if event.get(name)), event["metadata"]["creationTimestamp"])
    series = event.get("series") or {}
    return Happening(
        time=datetime.fromisoformat(series.get("lastObservedTime") or noted).timestamp(),
        type=str(event.get("type") or ""),
        reason=str(event.get("reason") or ""),
        message=str(event.get("message") or ""),
        count=int(series.get("count") or event.get("count") or 1),
    )


def _saves(document: JSON) -> tuple[Sequence[SaveRow], list[str]]:
    """The rows in the job's storage, or why they are not shown."""
    uri = checkpoints_uri(document)
    if uri is None:
        return (), ["saves are not shown: where they are is known with the first commit"]
    try:
        store = open_store(uri)
        try:
            return read_rows(store, ""), []
        finally:
            store.close()
    except StepfastError as error:
        return (), [f"saves are not shown, because {uri} cannot be read from here: {error}"]


def _unseen(life: Life, rows: int) -> list[str]:
    """What of the picture is missing or not exact."""
    said = []
    if rows >= MAX_ROWS:
        said.append(f"of the saves only the last {MAX_ROWS} are written down")
    if life.foreign_saves:
        said.append(f"{count_text(life.foreign_saves, 'save')} of earlier jobs of this name left out")
    if len(life.recoveries) == MAX_RECOVERIES:
        said.append(
            f"of the recoveries the last {MAX_RECOVERIES} are remembered; older attempts are drawn by their saves"
        )
    if life.unseen:
        said.append(f"{count_text(life.unseen, 'attempt')} left no trace, and cannot be drawn")
    return said
