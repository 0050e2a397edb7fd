"""What the next attempt is told of the job's failures: out of the status alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from stepfast.environment import read_environment


def crash(world: Any, step: int, after: float) -> None:
    """Trains for that long, then a rank fails; until the next gang has joined."""
    world.make_step(step - 1)
    world.settle()
    world.advance(after)
    world.make_step(step)
    world.stage(step)
    world.settle()
    world.fail()
    world.relaunched()
    world.join()
    world.settle()


def test_each_launch_is_told_how_often_training_was_interrupted_so_far(
    make_world: Callable[..., Any],
) -> None:
    world = make_world()
    world.start()
    assert (world.launches[0].interruptions, world.launches[0].trained_seconds) == (0, 0.0)
    crash(world, 10, 100.0)
    crash(world, 20, 300.0)
    assert [launch.interruptions for launch in world.launches] == [0, 1, 2]
    trained = [launch.trained_seconds for launch in world.launches]
    assert trained[1] == pytest.approx(100.0, abs=5.0)
    assert trained[2] == pytest.approx(400.0, abs=10.0)
    assert world.launches[2].planned_time == world.status.current.planned_time
    assert (world.status.interruptions, world.status.trained_seconds) == (2, trained[2])


def test_restart_in_place_is_an_interruption(make_world: Callable[..., Any]) -> None:
    world = make_world(failurePolicy={"restartStrategy": "InPlace", "maxInPlaceRestarts": 2})
    world.start(staged=5)
    world.settle()
    world.die()
    world.settle()
    world.rejoin(5)
    world.settle()
    assert (world.status.interruptions, world.status.restarts) == (1, 0)


def settings(**values: object) -> dict[str, str]:
    return {"STEPFAST_SETTINGS": json.dumps(values), "STEPFAST_RUN": "uid-1", "STEPFAST_JOB": "local/train"}


def test_rank_reads_what_the_launcher_was_told() -> None:
    environment = read_environment(settings(interruptions=3, trainedSeconds=500.0, plannedTime=time.time() - 50))
    assert (environment.mtbf_seconds, environment.interruptions, environment.trained_seconds) == (None, 3, 500.0)
    assert read_environment(settings(mtbfSeconds=60)).mtbf_seconds == 60.0


def test_rank_that_torchrun_started_anew_counts_that_and_the_time_since_the_plan() -> None:
    told = settings(interruptions=3, trainedSeconds=500.0, plannedTime=time.time() - 50)
    environment = read_environment({**told, "TORCHELASTIC_RESTART_COUNT": "2"})
    assert environment.interruptions == 5
    assert environment.trained_seconds == pytest.approx(550.0, abs=10.0)
