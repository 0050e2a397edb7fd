"""A job's status on a disk that may take nothing for a while: full, read-only, away.

`status.json` is what the next `stepfast run` goes on from. It may be older than what has happened, as after a kill at
that moment, with one exception: the attempt that it names is never older than the gang that was launched last. So
training goes on while it cannot be written, and no launch is made.
"""

from __future__ import annotations

from collections.abc import Callable

from stepfast_operator.backends.statefolder import StateFolder
from stepfast_operator.record import Status


class StatusWriter:
    """Writes one job's status now, or once it can be; says when that changes."""

    def __init__(self, state: StateFolder, uid: str, say: Callable[[str], None]) -> None:
        self._state, self._uid, self._say = state, uid, say
        self._unwritten: Status | None = None
        self._is_refused = False

    def write(self, status: Status) -> None:
        """Writes it. Raises OSError."""
        self._state.write(self._uid, status)

    def write_when_possible(self, status: Status) -> None:
        """Writes it, now or with a later `catch_up`; until then the old one stays."""
        self._unwritten = status
        self.catch_up()

    def catch_up(self) -> bool:
        """Writes what could not be written before; whether nothing is left."""
        if self._unwritten is None:
            return True
        try:
            self.write(self._unwritten)
        except OSError as error:
            if not self._is_refused:
                self._is_refused = True
                self._say(
                    f"{self._state.status_file} cannot be written ({error.strerror or error}): training goes on, no "
                    "other attempt is launched until it is written again"
                )
            return False
        self._unwritten = None
        if self._is_refused:
            self._is_refused = False
            self._say(f"{self._state.status_file} is written again")
        return True
