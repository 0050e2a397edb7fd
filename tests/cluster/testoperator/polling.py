"""Waiting for a condition on an event loop, with a deadline."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable

DEADLINE_SECONDS = 60.0
POLL_SECONDS = 0.02


async def until(
    what: str, is_so: Callable[[], object | Awaitable[object]], *, seconds: float = DEADLINE_SECONDS
) -> None:
    """Until the condition holds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        answer = is_so()
        if await answer if inspect.isawaitable(answer) else answer:
            return
        if loop.time() > deadline:
            raise TimeoutError(f"not within {seconds:.0f} s: {what}")
        await asyncio.sleep(POLL_SECONDS)
