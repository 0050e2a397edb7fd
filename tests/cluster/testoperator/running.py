"""Runs a scenario on an event loop of its own."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from testoperator.polling import until

_FAREWELL_SECONDS = 20.0

T = TypeVar("T")


def run_to_end(scenario: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run, but the loop outlives its connections: a request that was cancelled, as tasks are at a scenario's
    end, still waits for TLS' farewell from the other end, and asyncio warns of what is open when its loop is closed.
    """
    with asyncio.Runner() as runner:
        try:
            result = runner.run(scenario)
        except BaseException:
            with suppress(TimeoutError):  # the scenario's own failure is the one to tell
                runner.run(_connections_closed())
            raise
        runner.run(_connections_closed())
        return result


async def _connections_closed() -> None:
    loop = asyncio.get_running_loop()
    await until("all connections are closed", lambda: not _has_open_ones(loop), seconds=_FAREWELL_SECONDS)


def _has_open_ones(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether a transport of the loop has its socket, as asyncio itself looks for it before it warns."""
    transports = (item for item in gc.get_objects() if issubclass(type(item), asyncio.Transport))
    return any(getattr(it, "_loop", None) is loop and getattr(it, "_sock", None) is not None for it in transports)
