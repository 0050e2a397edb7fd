"""A fake world, and the loop that reconciles it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from stepfast_operator.actions import LaunchGang
from stepfast_operator.backends.fake import FakeBackend
from stepfast_operator.document import decode
from stepfast_operator.reconcile import Pass, reconcile
from stepfast_operator.record import State, Status
from stepfast_operator.spec import TrainingSpec


class World(FakeBackend):
    """A fake backend with the operator's loop around it."""

    def __init__(self, spec: TrainingSpec) -> None:
        super().__init__(spec)
        self.status = Status(start_time=self.now)
        self.passes: list[Pass] = []

    def look(self) -> Pass:
        """One pass."""
        seen = asyncio.run(reconcile(self, self.status))
        self.status = seen.after
        self.passes.append(seen)
        return seen

    def settle(self, *, limit: int = 60) -> Status:
        """Passes, with the waits that they ask for, until one asks for a wait of more than two seconds or
        for none.
        """
        for _ in range(limit):
            wait = self.look().decision.requeue_seconds
            if wait is None or wait > 2:
                return self.status
            self.advance(wait)
        raise AssertionError(f"does not settle: {[seen.decision.why for seen in self.passes[-5:]]}")

    def turn(self) -> None:
        """One pass, and the wait that it asks for."""
        self.advance(self.look().decision.requeue_seconds or 0.0)

    @contextmanager
    def pods_that_stay(self) -> Iterator[None]:
        """While the pods of the first gang are told to end and do not go."""
        stop = self.stop

        async def stop_later(runs: Any, mode: Any) -> None:
            await stop(runs, mode)
            self.gangs["uid-1"].lives = True

        self.stop = stop_later  # type: ignore[method-assign]
        yield
        self.stop = stop  # type: ignore[method-assign]

    def launched(self) -> None:
        """Until the first gang is launched; its ranks are yet to join."""
        while not self.launches:
            self.turn()

    def start(self, *, staged: int | None = None) -> Status:
        """Until the first gang runs with all its ranks, and has made and staged that step."""
        self.launched()
        self.join()
        self.settle()
        assert self.status.state is State.RUNNING
        if staged is not None:
            self.make_step(staged)
            self.stage(staged)
        return self.status

    def start_fail_and_recover(self) -> None:
        """A gang stages step 10 and makes 12; rank 1 is killed; the next gang restores from memory and makes 11."""
        self.start(staged=10)
        self.advance(20)
        self.make_step(12)
        self.settle()
        self.fail(rank=1, exit_code=137)
        self.relaunched()
        self.advance(5)
        self.join(tier="Memory")
        self.settle()
        self.advance(2)
        self.make_step(11)
        self.settle()

    def launch_of(self, attempt: int) -> LaunchGang:
        return next(launch for launch in self.launches if launch.attempt == attempt)

    def relaunched(self) -> Status:
        """Until the next attempt's gang runs, or the job is over."""
        before = len(self.launches)
        for _ in range(2000):
            wait = self.look().decision.requeue_seconds
            if self.status.is_terminal or len(self.launches) > before:
                return self.status
            self.advance(wait or 0.0)
        raise AssertionError("no further attempt")


@pytest.fixture
def make_spec() -> Callable[..., TrainingSpec]:
    def make(**fields: Any) -> TrainingSpec:
        return decode(TrainingSpec, {"trainer": {"command": ["torchrun", "train.py"]}, **fields}, "spec")

    return make


@pytest.fixture
def make_world(make_spec: Callable[..., TrainingSpec]) -> Callable[..., World]:
    def make(**fields: Any) -> World:
        return World(make_spec(**fields))

    return make
