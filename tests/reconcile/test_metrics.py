"""What the operator counts of a job's life."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepfast_operator.metrics import Metrics
from stepfast_operator.recoveryphases import PHASES

MakeWorld = Callable[..., Any]


def counted(world: Any) -> Any:
    """The metrics after all passes so far: a sample's value by name and labels."""
    metrics = Metrics()
    for seen in world.passes:
        metrics.observe(seen)
    return metrics.registry.get_sample_value


def test_restarts_steps_lost_and_phases_of_recoveries_are_counted(make_world: MakeWorld) -> None:
    world = make_world(trainer={"command": ["torchrun", "t.py"], "numNodes": 2})
    world.start_fail_and_recover()
    world.settle()
    sample = counted(world)
    assert sample("stepfast_restarts_total", {"cause": "RankFailed", "counted": "true"}) == 1
    assert sample("stepfast_steps_lost_total") == 2
    for phase in PHASES:
        assert sample("stepfast_recovery_duration_seconds_count", {"phase": phase}) == 1, phase
    assert sample("stepfast_recovery_duration_seconds_sum", {"phase": "schedule"}) >= 5
    assert sample("stepfast_recovery_duration_seconds_sum", {"phase": "resume"}) >= 2
    assert sample("stepfast_hangs_total") == 0


def test_a_newer_step_than_was_known_when_it_was_planned_takes_nothing_back(make_world: MakeWorld) -> None:
    """Who commits as the gang dies, tells of it too late; a counter cannot go down."""
    world = make_world()
    world.start(staged=3)
    world.persist("uid-1")
    world.make_step(5)
    world.settle()
    world.fail()
    world.relaunched()
    assert world.status.steps_lost == 2
    assert counted(world)("stepfast_steps_lost_total") == 0
    world.join(restored_step=4)
    world.settle()
    assert world.status.steps_lost == 1
    assert counted(world)("stepfast_steps_lost_total") == 1


def test_hang_is_counted_once_whatever_follows_from_it(make_world: MakeWorld) -> None:
    for action in ("RestartJob", "Notify"):
        world = make_world(progressPolicy={"progressDeadlineSeconds": 60, "action": action})
        world.start(staged=1)
        world.make_step(2)
        world.settle()
        world.advance(61)
        world.settle()
        world.settle()
        assert counted(world)("stepfast_hangs_total") == 1, action


def test_phases_are_there_before_anything_has_failed() -> None:
    sample = Metrics().registry.get_sample_value
    assert [sample("stepfast_recovery_duration_seconds_count", {"phase": phase}) for phase in PHASES] == [0] * 5
