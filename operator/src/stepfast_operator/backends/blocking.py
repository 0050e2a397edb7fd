"""Blocking calls for an event loop: each in a daemon thread of its own.

A pool would make one call that never returns (a dead NFS server, an agent that stands still) hold up those behind it,
the kill of the gang among them, and in the end the exit of the process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def call_in_thread(call: Callable[[], T], *, name: str) -> asyncio.Future[T]:
    """Starts the call in a thread of that name. Who stops waiting for the future leaves the thread to itself."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type] # without an error it is the call's own result

    def work() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as raised:  # noqa: BLE001 - the thread's outermost frame; the waiting side raises it
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future
