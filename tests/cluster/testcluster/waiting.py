"""Waiting for a condition, and for a command, each with a deadline."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class CommandFailed(Exception):
    """A command ended with a status other than 0; the message is what it wrote on standard error."""


def wait_until(what: str, is_so: Callable[[], object], *, seconds: float = 30.0, every_seconds: float = 0.1) -> None:
    """Asks until the answer is true; a command that fails is a no.

    `every_seconds`: how often. A kubectl costs a fifth of a second of a processor, which gangs need, too.

    Raises:
        TimeoutError: with `what`, and what the last command said.
    """
    deadline, answer = time.monotonic() + seconds, ""
    while True:
        try:
            if is_so():
                return
        except CommandFailed as error:
            answer = f" ({error})"
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:.0f} s: {what}{answer}")
        threading.Event().wait(every_seconds)


@contextmanager
def lasting(seconds: float) -> Iterator[None]:
    """What is inside takes at least so long: for a disturbance that is of a given length."""
    begin = time.monotonic()
    yield
    threading.Event().wait(max(0.0, begin + seconds - time.monotonic()))


def run_or_raise(*command: str, timeout_seconds: float = 300.0, environment: Mapping[str, str] | None = None) -> str:
    """The command's standard output.

    Raises:
        CommandFailed: its status is not 0.
    """
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=timeout_seconds, env=environment
    )
    if result.returncode:
        raise CommandFailed(f"{' '.join(command)}: {result.stderr.strip()[-4000:]}")
    return result.stdout
