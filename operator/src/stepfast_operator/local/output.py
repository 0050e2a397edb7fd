"""Standard output that a training outlives: a pipe that nobody reads any more, a terminal that is gone, a full disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOBase
from typing import TextIO


class Output(TextIOBase):
    """Writes to another stream whatever that takes; what it does not take is lost, and no error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()  # once it has hung up it would deny that

    @property
    def encoding(self) -> str:  # type: ignore[override] # typeshed has a variable
        return self._stream.encoding

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._is_terminal

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        self.has_flushed()

    def has_flushed(self) -> bool:
        """Flushes; whether the stream took all of it."""
        try:
            self._stream.flush()
        except OSError:
            return False
        return True


@contextmanager
def lasting(stream: TextIO) -> Iterator[Output]:
    """The stream as an Output. What it has not taken by the end goes nowhere: Python would try once more when it exits,
    and make an exit status of its own of that.
    """
    output = Output(stream)
    try:
        yield output
    finally:
        if not output.has_flushed():
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
