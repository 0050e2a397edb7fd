"""How `stepfast status` shows a job, once or for as long as it changes: tables, lines, JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import datetime
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from stepfast_operator.jobcommands.sighting import Sighting
from stepfast_operator.report import glance
from stepfast_operator.sentences import describe_failure

_PIPE_WIDTH = 120


class Screen(Protocol):
    """Where sightings are shown."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, seen: Sighting) -> None:
        """The job as it is now."""

    def say(self, text: str) -> None:
        """One line of our own."""


def screen_of(*, as_json: bool, watch: bool, clock: Callable[[], float] = time.time) -> Screen:
    """JSON and tables once; while the job changes: JSON lines, on a terminal live tables, elsewhere plain lines."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)
    if as_json:
        return JsonLines(indent=None if watch else 2)
    if not watch:
        return Tables(console, clock)
    return LiveTables(console, clock) if console.is_terminal else Lines(console, clock)


class _Plain:
    """A screen that needs no clearing up."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.stdout.flush()

    def say(self, text: str) -> None:
        """On standard error, so that nothing stands among the job's own lines."""
        sys.stderr.write(f"stepfast: {text}\n")


class JsonLines(_Plain):
    """The job as JSON each time."""

    def __init__(self, *, indent: int | None) -> None:
        self._indent = indent

    def show(self, seen: Sighting) -> None:
        sys.stdout.write(json.dumps(seen.summary(), indent=self._indent) + "\n")
        sys.stdout.flush()


class Tables(_Plain):
    """The report each time."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console, self._clock = console, clock

    def show(self, seen: Sighting) -> None:
        self._console.print(seen.report(self._clock()).render())


class Lines(_Plain):
    """A line when the job has changed at a glance, and the report once it is over. For pipes and files."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console, self._clock = console, clock
        self._said: tuple[str, ...] = ()

    def show(self, seen: Sighting) -> None:
        failure = seen.status.last_failure
        lines = (*([describe_failure(failure)] if failure is not None else []), glance(seen.status))
        at = datetime.fromtimestamp(self._clock()).astimezone().strftime("%H:%M:%S")
        for line in lines:
            if line not in self._said:
                sys.stdout.write(f"{at}  {line}\n")
        self._said = lines
        if seen.is_over:
            self._console.print(seen.report(self._clock()).render())
        sys.stdout.flush()


class LiveTables:
    """The report, drawn anew every second: ages grow though nothing changes. What it showed last stays."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console, self._clock = console, clock
        self._seen: Sighting | None = None
        self._live = Live(
            console=console, refresh_per_second=1, get_renderable=self._render, vertical_overflow="visible"
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, seen: Sighting) -> None:
        self._seen = seen
        self._live.refresh()

    def say(self, text: str) -> None:
        self._console.print(Text(f"stepfast: {text}", style="bold cyan"))

    def _render(self) -> RenderableType:
        return self._seen.report(self._clock()).render() if self._seen is not None else Text("")
