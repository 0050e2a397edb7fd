"""Waits until the name of the rendezvous can be looked up: pods start before their names are published, and torchrun
gives up at the first name that it cannot resolve (pytorch issue 73682).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from stepfast.errors import GangError

_PAUSE_SECONDS = 0.2
TIMEOUT_SECONDS = 600.0


def host_of(endpoint: str) -> str:
    """The host of torchrun's `--rdzv-endpoint`: `host`, `host:port` or `[address]:port`."""
    if endpoint.startswith("["):
        return endpoint[1:].partition("]")[0]
    return endpoint.rpartition(":")[0] if endpoint.count(":") == 1 else endpoint


def wait_for_host(
    endpoint: str,
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    resolve: Callable[[str], object] = lambda host: socket.getaddrinfo(host, None),
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Returns once the endpoint's host resolves. Raises GangError naming it when it never does."""
    host = host_of(endpoint)
    if not host:
        return
    deadline = clock() + timeout_seconds
    while True:
        try:
            resolve(host)
            return
        except OSError as error:
            if clock() >= deadline:
                raise GangError(
                    f"the gang's rendezvous {host!r} could not be looked up for {timeout_seconds:g} s ({error}): see "
                    "whether the job's Service is there and the cluster's DNS answers"
                ) from error
        sleep(_PAUSE_SECONDS)
