"""Runs a scenario on an event loop of its own."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

from testoperator.polling import until

_FAREWELL_SECONDS = 20.0


def run_to_end(scenario: Coroutine[Any, Any, None]) -> None:
    """As asyncio.run, but the loop outlives its connections: a request that was cancelled, as tasks are at a scenario's
    end, still waits for TLS' farewell from the other end, and asyncio warns of what is open when its loop is closed.
    """
    with asyncio.Runner() as runner:
        try:
            runner.run(scenario)
        finally:
            runner.run(until("all connections are closed", lambda: not _has_open_ones(), seconds=_FAREWELL_SECONDS))


def _has_open_ones() -> bool:
    """Whether any transport has its socket: nothing public says which transports a loop has."""
    transports = (item for item in gc.get_objects() if issubclass(type(item), asyncio.Transport))
    sockets = (transport.get_extra_info("socket") for transport in transports)
    return any(socket is not None and socket.fileno() >= 0 for socket in sockets)
