"""A job's loop that is cancelled ends, whatever happens in the same moment: one that lived on would be waited for at
the operator's end, and would look after a job that is gone.
"""

from __future__ import annotations

import asyncio

import pytest

from stepfast_operator.jobs import until


@pytest.mark.parametrize("turns", range(8))
def test_wait_that_is_cancelled_as_its_event_comes_is_cancelled(turns: int) -> None:
    async def play() -> None:
        changed = asyncio.Event()
        went_on = False

        async def loop() -> None:
            nonlocal went_on
            await until(changed, 60)
            went_on = True
            await asyncio.sleep(60)

        task = asyncio.create_task(loop())
        await asyncio.sleep(0.01)
        changed.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        was_on = went_on
        task.cancel()
        await asyncio.wait({task}, timeout=5)
        is_over = task.cancelled()
        if not is_over:
            task.cancel()
        assert is_over
        assert went_on == was_on, "nothing is begun by who was cancelled"

    asyncio.run(play())
