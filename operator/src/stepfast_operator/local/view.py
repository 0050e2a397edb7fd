"""What the user sees while the job runs: on a terminal a live panel below the script's output, elsewhere
plain lines.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stepfast_operator.local.story import COMMIT_LINE_SECONDS, tell
from stepfast_operator.reconcile import Pass
from stepfast_operator.record import State, Status
from stepfast_operator.sentences import describe_commit

_COLOURS = {
    State.RUNNING: "green",
    State.COMPLETE: "green",
    State.FAILED: "red",
    State.RESTARTING: "yellow",
    State.SUSPENDING: "yellow",
    State.SUSPENDED: "yellow",
}


class PlainView:
    """Lines: the gang's as they are, ours marked with `stepfast:`. For pipes, files and CI."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._commit_said = 0.0

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._out.flush()

    def line(self, text: str) -> None:
        self._out.write(f"{text}\n")
        self._out.flush()

    def say(self, text: str) -> None:
        self.line(f"stepfast: {text}")

    def show(self, seen: Pass) -> None:
        for text in tell(seen):
            self.say(text)
        step = seen.after.checkpoint.latest_persisted_step
        if step is None or step == seen.before.checkpoint.latest_persisted_step:
            return
        # A job may commit every step: one line every few seconds tells as much.
        if time.monotonic() - self._commit_said >= COMMIT_LINE_SECONDS:
            self._commit_said = time.monotonic()
            self.say(describe_commit(seen.after))


class LiveView:
    """A panel that stays at the bottom of the terminal; everything else scrolls above it."""

    def __init__(self, console: Console, title: str) -> None:
        self._console, self._title = console, title
        self._live = Live(console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def line(self, text: str) -> None:
        self._console.print(Text.from_ansi(text))

    def say(self, text: str) -> None:
        self._console.print(Text(f"stepfast: {text}", style="bold cyan"))

    def show(self, seen: Pass) -> None:
        for text in tell(seen):
            self.say(text)
        self._live.update(panel(self._title, seen.after))


def panel(title: str, status: Status) -> Group:
    """The job at a glance."""
    head = Text.assemble(
        (f"{title}  ", "bold"),
        (str(status.state), _COLOURS.get(status.state, "white")),
        f"  attempt {status.attempt}  restarts {status.restarts}",
    )
    grid = Table.grid(padding=(0, 2))
    grid.add_row(*_training(status))
    grid.add_row(*_checkpoints(status))
    return Group(Text("─" * 60, style="dim"), head, grid)


def _training(status: Status) -> list[str]:
    trainer = status.trainer_status
    speed = trainer.steps_per_second
    far = f" ({trainer.progress_percentage} %)" if trainer.progress_percentage is not None else ""
    cells = [f"step {_number(trainer.global_step)}{far}", f"{speed:.2f} steps/s" if speed is not None else ""]
    return cells + [f"{metric.name} {metric.value:.4g}" for metric in trainer.metrics[:4]]


def _checkpoints(status: Status) -> list[str]:
    checkpoint = status.checkpoint
    saves = checkpoint.saves
    behind = checkpoint.persist_lag_steps
    return [
        f"in memory {_number(checkpoint.latest_memory_step)}",
        f"persisted {_number(checkpoint.latest_persisted_step)}" + (f" ({behind} behind)" if behind else ""),
        f"stall {saves.stall_seconds_last * 1000:.0f} ms, at most {saves.stall_seconds_max * 1000:.0f} ms",
        checkpoint.persist_error or "",
    ]


def _number(value: int | None) -> str:
    return "–" if value is None else str(value)
