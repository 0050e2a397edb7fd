"""Finds and ends processes by a variable in the environment they were started with. Linux only (/proc,
pidfd).

The environment is inherited by whatever a rank starts, and stays readable when its parents are long gone.
That is how ranks orphaned by a killed torchrun, or by a killed `stepfast run`, are still known. (A program
that overwrites its own environment block, as `setproctitle` can, escapes this.)
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress

_EXEC_SECONDS = 2.0  # an exec may wait for a busy machine, or for the disk that the program is on
_EXEC_POLL_SECONDS = 0.001


def marked(name: str, matches: Callable[[str], bool]) -> dict[int, str]:
    """The living processes (not this one) started with the variable `name` at a value that matches: pid to
    value.
    """
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        value = started_with(int(entry), name)
        if value is not None and matches(value):
            found[int(entry)] = value
    return found


def started_with(pid: int, name: str) -> str | None:
    """The variable's value in the process's environment; None without it, or when the process is gone or a
    zombie.
    """
    marker = f"{name}=".encode()
    for pair in _environment(pid).split(b"\0"):
        if pair.startswith(marker):
            return pair[len(marker) :].decode(errors="replace")
    return None


def _environment(pid: int) -> bytes:
    """The block the process was started with; empty when it is gone, a zombie, or a thread of the kernel.

    In the middle of an exec it is empty too, for as long as the kernel needs: a process that is read then must not
    be missed, or a gang could be taken for ended while it starts.
    """
    deadline = time.monotonic() + _EXEC_SECONDS
    while True:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                environment = file.read()
            if environment:
                return environment
            os.readlink(f"/proc/{pid}/exe")  # what has no program is no process that could be in an exec
            if _has_none(pid) or time.monotonic() > deadline:
                return b""
        except OSError:
            return b""
        time.sleep(_EXEC_POLL_SECONDS)


def _has_none(pid: int) -> bool:
    """Whether the process was started without any environment: the block ends where it begins, and that is no exec
    that has not filled it yet, as the program's place in memory, which comes after it, is known.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()  # proc(5), from field 3 on; a name may hold anything
    begin_of_code, begin, end = (int(fields[number - 3]) for number in (26, 50, 51))
    return begin_of_code != 0 and begin == end


def signal_marked(
    name: str, matches: Callable[[str], bool], number: signal.Signals, spared: Collection[int] = ()
) -> list[int]:
    """Sends the signal to every such process but those spared; returns pidfds, which the caller closes.

    Between finding and signalling a pid may come to mean another process: the environment is read again
    through the descriptor's lifetime, so that only what still is one of ours is hit.
    """
    descriptors = []
    for pid in marked(name, matches):
        if pid in spared:
            continue
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            continue
        value = started_with(pid, name)
        if value is not None and matches(value):
            with suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(descriptor, number)
            descriptors.append(descriptor)
        else:
            os.close(descriptor)
    return descriptors


def kill_marked(
    name: str, matches: Callable[[str], bool], timeout_seconds: float, spared: Collection[int] = ()
) -> bool:
    """Kills every such process but those spared, and what they start meanwhile, until none is left; False when some
    outlive that.

    Blocks. A process that hangs in the kernel may outlive the time-out.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        descriptors = signal_marked(name, matches, signal.SIGKILL, spared)
        try:
            if not descriptors:
                return True
            wait_ended(descriptors, min(1.0, max(0.0, deadline - time.monotonic())))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if time.monotonic() >= deadline:
            return marked(name, matches).keys() <= set(spared)


def wait_ended(descriptors: list[int], timeout_seconds: float) -> bool:
    """Waits until the processes behind all these pidfds have ended; False when the time is over first.
    Blocks.
    """
    deadline = time.monotonic() + timeout_seconds
    left = set(descriptors)
    poll = select.poll()
    for descriptor in left:
        poll.register(descriptor, select.POLLIN)
    while left:
        wait = deadline - time.monotonic()
        if wait <= 0:
            return False
        for descriptor, _ in poll.poll(wait * 1000):
            poll.unregister(descriptor)
            left.discard(descriptor)
    return True
