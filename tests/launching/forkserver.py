"""Runs scripts as forks of this process, for programs that stand in `python`'s place; see `forkedpython.py`."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

_LARGEST_REQUEST = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`command`: as behind `python`: a file and its arguments, or `-m` and a module. `streams`: the descriptors of its
    input, its output and its errors.
    """

    command: tuple[str, ...]
    folder: Path
    environment: dict[str, str]
    streams: tuple[int, ...]


def serve(listener: socket.socket, control: Connection) -> Request:
    """Returns in forks alone, each with what it is to run. On `control` anything that is said is answered by the
    processor time, in seconds, of those that have ended; once it is closed, so is everything here.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for whoever began this
    is_served, serving = os.pipe()  # closed with this process: none of its forks outlives it
    keepers: set[int] = set()
    while True:
        ready, _, _ = select.select([listener.fileno(), control.fileno()], [], [])
        if control.fileno() in ready:
            try:
                control.recv()
            except EOFError:
                os.close(serving)
                for keeper in keepers:
                    os.waitpid(keeper, 0)
                os._exit(0)
            keepers = {keeper for keeper in keepers if not os.waitpid(keeper, os.WNOHANG)[0]}
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            control.send(used.ru_utime + used.ru_stime)
        if listener.fileno() in ready:
            client, _ = listener.accept()
            keeper = os.fork()
            if keeper:
                client.close()
                keepers.add(keeper)
                continue
            listener.close()
            control.close()
            os.close(serving)
            return _kept(client, is_served)


def _kept(client: socket.socket, is_served: int) -> Request:
    """Returns in a fork of this process, which keeps it for that client: it ends with the client."""
    said, streams, _, _ = socket.recv_fds(client, _LARGEST_REQUEST, 3)
    if not said:
        os._exit(0)
    pid = os.fork()
    if not pid:
        client.close()
        os.close(is_served)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        told = json.loads(said)
        return Request(
            command=tuple(told["command"]), folder=Path(told["folder"]), environment=told["environment"],
            streams=tuple(streams),
        )  # fmt: skip
    for stream in streams:
        os.close(stream)
    with suppress(PermissionError, ProcessLookupError):  # it has done so itself, or has ended
        os.setpgid(pid, pid)
    ended = os.pidfd_open(pid)
    while True:
        ready, _, _ = select.select([ended, client.fileno(), is_served], [], [])
        if ended in ready:
            break
        number = client.recv(1) if client.fileno() in ready else b""
        os.killpg(pid, number[0] if number else signal.SIGKILL)
        if not number:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(ConnectionError):  # nobody waits for it any more
        client.send(str(code).encode())
    os._exit(0)
