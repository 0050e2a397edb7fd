"""The launchers of a gang's next attempt, started while this one trains: a restart then waits for its ranks alone.

They carry the next run's name in their environment from their start, as what they become is found by it; until they are
given their order they are nobody's gang.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from stepfast_operator.backends.gangprocess import RUN, GangProcess, Start, launcher_arguments, standby_command

_REAP_SECONDS = 5.0


class Standby:
    """At most one launcher a node, waiting for its order."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._waiting: dict[int, GangProcess] = {}
        self._run: str | None = None

    @property
    def run(self) -> str | None:
        """That they were started for; it stays when a command needed none, or none could be started."""
        return self._run

    @property
    def pids(self) -> frozenset[int]:
        """Of those that wait."""
        return frozenset(process.process.pid for process in self._waiting.values())

    def prepare(self, run: str, starts: Sequence[Start]) -> None:
        """Starts what these would need; a command that is no torchrun needs nothing that could wait."""
        self.end()
        self._run = run
        for start in starts:
            if launcher_arguments(start.command) is not None:
                # Without memory or descriptors for it the next attempt starts as the first one did.
                with suppress(OSError):
                    self._waiting[start.node] = GangProcess(
                        replace(start, command=standby_command()), self._on_line, takes_order=True
                    )

    def take(self, start: Start) -> GangProcess | None:
        """The node's launcher, with its order given; None when there is none for this run."""
        arguments = launcher_arguments(start.command)
        if start.env[RUN] != self._run or start.node not in self._waiting or arguments is None:
            return None
        process = self._waiting.pop(start.node)
        if process.exit_code() is None and process.give_order(arguments, start):
            return process
        _discard(process)
        return None

    def end(self) -> None:
        """Ends those that still wait."""
        for process in self._waiting.values():
            _discard(process)
        self._waiting, self._run = {}, None


def _discard(process: GangProcess) -> None:
    with suppress(ProcessLookupError):
        os.kill(process.process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.process.wait(_REAP_SECONDS)
    process.close()
