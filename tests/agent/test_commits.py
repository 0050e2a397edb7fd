"""Who writes a step's manifest, when nobody but the persister is in the way."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest

from stepfast.messages import Hello, Message
from stepfast.step import JobKey
from stepfast_sidecar.commits import Commits
from stepfast_sidecar.flow import RunFlow
from stepfast_sidecar.history import History
from stepfast_sidecar.intake import Peer
from stepfast_sidecar.metrics import Metrics
from stepfast_sidecar.persisterprocess import PersisterProcess
from stepfast_sidecar.run import Run, Session
from stepfast_sidecar.tasks import Tasks

RUN = "uid-1"


class Asked:
    """A persister whose storage has the manifest as soon as somebody may write it."""

    is_closed = False

    def __init__(self) -> None:
        self.may_write: list[bool] = []

    async def request(self, command: str, **values: Any) -> Mapping[str, Any]:
        assert command == "commit"
        self.may_write.append(values["may_write"])
        return {"committed": True, "run": RUN, "time": 1.0, "size": 1}


class Deaf:
    """A rank that nobody reads from."""

    def send(self, message: Message) -> None:
        pass


@pytest.mark.parametrize(
    ("rank", "alive", "writes"),
    [(0, True, True), (1, True, False), (1, False, True)],
    ids=["rank-0s-node", "another-node", "another-node-and-nobody-lives"],
)
def test_agent_leaves_the_manifest_to_rank_0s_only_while_training_goes_on(
    ranks: Any, rank: int, alive: bool, writes: bool
) -> None:
    asked, job = Asked(), JobKey(namespace="default", name="train")
    hello: Hello = ranks.hello("file:///nowhere", rank=rank, world_size=2, run=RUN)
    session = Session(hello=hello, peer=cast(Peer, Deaf()), joined_time=0.0, alive=alive)
    run = Run(flow=RunFlow(RUN, 1), world_size=2, sessions={rank: session})

    async def commit() -> None:
        tasks, persister = Tasks(), cast(PersisterProcess, asked)
        commits = Commits(
            job,
            {RUN: run},
            persister,
            patience_seconds=60,
            tasks=tasks,
            history=History(job, persister, tasks),
            metrics=Metrics(),
            give_up=lambda run, step: None,
            changed=lambda at_once: None,
        )
        await commits.commit(run, 5)
        await tasks.cancel()

    asyncio.run(commit())
    assert asked.may_write == [writes]
    assert run.flow.is_committed(5)
