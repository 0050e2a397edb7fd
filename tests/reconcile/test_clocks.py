"""Clocks of several machines tell of one recovery: none of its times lies in the future, or before the one that it
follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

import pytest

from stepfast_operator.record import Cause, State

MakeWorld = Callable[..., Any]
TIMES = (
    "failure_time", "detected_time", "flushed_time", "launched_time", "pods_ready_time", "restored_time",
    "resumed_time",
)  # fmt: skip


def test_gang_that_is_seen_to_make_steps_does_not_hang_though_a_clock_says_that_they_are_old(
    make_world: MakeWorld,
) -> None:
    world = make_world(progressPolicy={"progressDeadlineSeconds": 60})
    world.start(staged=10)
    for step in range(11, 31):
        world.advance(10)
        world.make_step(step)
        for rank, status in world.gang.ranks.items():
            world.gang.ranks[rank] = replace(status, step_time=world.now - 300)
        world.settle()
    assert (world.status.state, world.status.restarts) == (State.RUNNING, 0)
    world.advance(61)
    world.settle()
    assert world.status.last_failure.reason is Cause.HANG_DETECTED, "steps that are not made are missed"


@pytest.mark.parametrize("seconds", [4.0, -4.0], ids=["ahead", "behind"])
@pytest.mark.parametrize("ranks", [{0}, {1}, {0, 1}], ids=str)
def test_recoverys_times_are_in_order_whatever_the_ranks_clocks_say(
    make_world: MakeWorld, ranks: set[int], seconds: float
) -> None:
    world = make_world(trainer={"command": ["torchrun"], "numNodes": 2, "numProcPerNode": 1})

    def skew(*names: str) -> None:
        for rank in ranks:
            status = world.gang.ranks[rank]
            told = {name: getattr(status, name) + seconds for name in names}
            world.gang.ranks[rank] = replace(status, **told)

    world.start(staged=10)
    world.fail(rank=1)
    world.gang.failures[0] = replace(world.gang.failures[0], time=world.now + seconds)
    world.relaunched()
    world.advance(5)
    world.join()
    skew("joined_time", "restored_time")
    world.settle()
    world.advance(1)
    world.make_step(11)
    skew("step_time")
    world.settle()
    (recovery,) = world.status.recoveries
    times = [getattr(recovery, name) for name in TIMES]
    assert None not in times
    assert times == sorted(times), astuple(recovery)
    assert recovery.duration_seconds == pytest.approx(times[-1] - times[0])
