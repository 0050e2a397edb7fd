"""Events are posted beside each other, and each job's in their order."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from stepfast_operator.eventlog import EventLog


class SlowServer:
    """Keeps the Events, and does not answer to those of one job until it may."""

    def __init__(self, stuck: str) -> None:
        self._stuck = stuck
        self.may_answer = asyncio.Event()
        self.messages: dict[str, list[str]] = defaultdict(list)  # by job

    async def create(self, path: str, body: Any) -> None:
        name = body["involvedObject"]["name"]
        if name == self._stuck:
            await self.may_answer.wait()
        self.messages[name].append(body["message"])


def job(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "stepfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"namespace": "team", "name": name, "uid": f"uid of {name}"},
    }


def test_answer_that_does_not_come_holds_up_few_others_and_no_job_s_order_changes() -> None:
    async def run() -> None:
        server = SlowServer(stuck="job-0")
        log = EventLog(server, "operator")  # type: ignore[arg-type] # as much as is needed of one
        names = [f"job-{index}" for index in range(100)]
        for number in range(3):
            for name in names:
                log.tell_error(job(name), ValueError(f"number {number}"))
        posting = asyncio.create_task(log.run())
        try:
            for _ in range(1000):
                await asyncio.sleep(0)
            assert len(server.messages) > len(names) / 2
            server.may_answer.set()
            await log.drain(10)
            told = {name: [f"ValueError: number {number}" for number in range(3)] for name in names}
            assert server.messages == told
        finally:
            posting.cancel()
            await asyncio.gather(posting, return_exceptions=True)

    asyncio.run(run())
