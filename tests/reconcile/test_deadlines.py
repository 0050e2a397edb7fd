"""Hangs, deadlines and suspension in a fake world, one behaviour a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stepfast_operator.actions import LaunchGang, StopGang, StopMode
from stepfast_operator.observed import AgentState, Intent
from stepfast_operator.record import Cause, ConditionType, FailedReason, State

MakeWorld = Callable[..., Any]


def test_hung_gang_is_killed_and_restarted(make_world: MakeWorld) -> None:
    world = make_world(progressPolicy={"progressDeadlineSeconds": 30})
    world.start()
    world.make_step(5)
    world.settle()
    world.advance(31)
    world.relaunched()
    assert world.status.last_failure.reason is Cause.HANG_DETECTED
    assert len(world.launches) == 2


def test_step_that_its_agent_may_keep_to_itself_for_a_while_is_waited_for(make_world: MakeWorld) -> None:
    world = make_world(progressPolicy={"progressDeadlineSeconds": 10})
    world.untold_seconds = 30.0  # behind an API server that is slow
    world.start()
    world.make_step(5)
    world.settle()
    world.advance(35)
    world.settle()
    assert len(world.launches) == 1
    world.advance(6)
    world.relaunched()
    assert world.status.last_failure.reason is Cause.HANG_DETECTED


def test_hang_is_only_said_when_the_policy_says_notify(make_world: MakeWorld) -> None:
    world = make_world(progressPolicy={"progressDeadlineSeconds": 30, "action": "Notify"})
    world.start()
    world.advance(31)
    world.settle()
    assert world.status.condition(ConditionType.PROGRESSING).reason == "ProgressDeadlineExceeded"
    world.make_step(1)
    world.settle()
    assert world.status.condition(ConditionType.PROGRESSING).status == "True"
    assert len(world.launches) == 1


def test_rank_that_waits_for_memory_is_not_hung_and_has_its_time_again_after_it(make_world: MakeWorld) -> None:
    world = make_world(progressPolicy={"progressDeadlineSeconds": 30})
    world.start()
    world.make_step(5)
    world.gang.ranks[1] = replace(world.gang.ranks[1], waiting=True)
    world.advance(300)
    world.settle()
    assert world.status.state == State.RUNNING
    world.gang.ranks[1] = replace(world.gang.ranks[1], waiting=False, waited_time=world.now)
    world.advance(25)
    world.settle()
    assert world.status.state == State.RUNNING
    world.advance(10)
    world.relaunched()
    assert world.status.last_failure.reason is Cause.HANG_DETECTED


def test_gang_that_nobody_lets_be_launched_ends_the_job_at_the_start_deadline(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(startupDeadlineSeconds=60)

    async def refuse(launch: LaunchGang) -> None:
        raise ProcessLookupError("exceeded quota")

    monkeypatch.setattr(world, "launch", refuse)
    while world.status.attempt == 0:
        world.turn()
    tries = 0
    while not world.status.is_terminal:
        try:
            world.look()
        except ProcessLookupError:
            tries += 1
        world.advance(5)
    assert 10 <= tries <= 13
    failed = world.status.condition(ConditionType.FAILED)
    assert failed.reason == FailedReason.STARTUP_DEADLINE_EXCEEDED
    assert failed.message == "the gang was not launched within 60 s (startupDeadlineSeconds)"


def test_script_that_never_uses_the_sdk_is_never_called_hung(make_world: MakeWorld) -> None:
    world = make_world(progressPolicy={"progressDeadlineSeconds": 30})
    world.launched()
    for _ in range(10):
        world.advance(300)
        world.look()
    assert world.status.state == State.RUNNING
    assert len(world.launches) == 1


def test_ranks_that_said_goodbye_are_not_waited_for(make_world: MakeWorld) -> None:
    world = make_world(progressPolicy={"progressDeadlineSeconds": 30})
    world.start()
    world.make_step(5)
    for rank, status in world.gang.ranks.items():
        world.gang.ranks[rank] = replace(status, alive=False, clean=True, ended_time=world.now)
    world.advance(100)
    world.settle()
    assert world.status.state == State.RUNNING


def test_an_agent_that_restarted_and_knows_no_steps_yet_is_no_hang(make_world: MakeWorld) -> None:
    world = make_world(progressPolicy={"progressDeadlineSeconds": 30})
    world.start()
    for step in range(1, 10):
        world.advance(10)
        world.make_step(step)
        world.look()
    world.join()
    world.settle()
    assert world.status.state == State.RUNNING


def test_gang_of_which_only_some_ranks_join_fails_at_the_start_deadline(make_world: MakeWorld) -> None:
    world = make_world(startupDeadlineSeconds=60)
    world.launched()
    world.join()
    del world.gang.ranks[1]
    world.advance(61)
    world.settle()
    assert world.status.condition(ConditionType.FAILED).reason == FailedReason.STARTUP_DEADLINE_EXCEEDED


def test_activity_deadline_ends_the_job_and_begins_again_on_resume(make_world: MakeWorld) -> None:
    world = make_world(activeDeadlineSeconds=100)
    world.start()
    world.advance(90)
    world.intent = Intent.STOP_NOW
    world.settle()
    assert world.status.state == State.SUSPENDED
    world.advance(500)
    world.intent = Intent.RUN
    world.relaunched()
    assert world.status.state == State.STARTING
    world.advance(101)
    world.settle()
    assert world.status.condition(ConditionType.FAILED).reason == FailedReason.DEADLINE_EXCEEDED


def test_suspend_saves_waits_for_the_commit_and_stops_in_order(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.make_step(12)
    world.intent = Intent.SUSPEND
    while not world.final:
        world.turn()
    world.look()
    assert world.gang.lives
    assert world.status.state == State.SUSPENDING
    world.persist("uid-1")
    world.settle()
    assert world.status.state == State.SUSPENDED
    assert world.steps.keys() == {12}
    assert world.status.restarts == 0
    world.intent = Intent.RUN
    world.relaunched()
    assert (world.launch_of(2).resume_step, world.status.restarts) == (12, 0)


def forget_ranks(world: Any, *which: int) -> dict[int, Any]:
    """An agent was restarted: it knows what the run left in memory, and none of its ranks until they come back."""
    return {rank: world.gang.ranks.pop(rank) for rank in which or tuple(world.gang.ranks)}


@pytest.mark.parametrize("which", [(), (1,)], ids=["every agent", "the one whose rank lives"])
def test_suspend_waits_for_ranks_that_have_yet_to_come_back_to_their_agent(
    make_world: MakeWorld, which: tuple[int, ...]
) -> None:
    world = make_world()
    world.start()
    world.make_step(12)
    world.settle()
    if which:
        world.gang.ranks[0] = replace(world.gang.ranks[0], alive=False, clean=True, ended_time=world.now)
    world.committed["uid-1"] = 0  # the agent knows the run
    ranks = forget_ranks(world, *which)
    world.intent = Intent.SUSPEND
    for _ in range(3):
        world.turn()
    assert world.gang.lives
    assert world.status.current.stopping_time is None
    world.gang.ranks |= ranks
    pass_until(world, lambda: world.final)
    world.persist("uid-1")
    world.settle()
    assert world.status.state == State.SUSPENDED
    assert 12 in world.steps


def test_suspend_waits_for_ranks_that_never_come_back_no_longer_than_its_grace(make_world: MakeWorld) -> None:
    world = make_world(checkpoint={"gracefulSuspendSeconds": 20})
    world.start()
    world.make_step(12)
    world.settle()
    forget_ranks(world)
    world.intent = Intent.SUSPEND
    began = world.now
    pass_until(world, lambda: not world.gang.lives)
    assert 20 <= world.now - began < 22


def end_ranks(world: Any) -> None:
    world.start()
    world.make_step(12)
    world.settle()
    for rank, status in world.gang.ranks.items():
        world.gang.ranks[rank] = replace(status, alive=False, clean=True, ended_time=world.now)


def run_without_ranks(world: Any) -> None:
    world.launched()
    for _ in range(10):
        world.advance(5)
        world.look()
    assert world.status.state is State.RUNNING


NOBODY: dict[str, Callable[[Any], None]] = {
    "all ranks have ended": end_ranks,
    "no rank has joined yet": lambda world: world.launched(),
    "a script without the SDK": run_without_ranks,
}


@pytest.mark.parametrize("begin", [pytest.param(begin, id=name) for name, begin in NOBODY.items()])
def test_suspend_waits_for_no_save_where_nobody_is_to_save(make_world: MakeWorld, begin: Callable[[Any], None]) -> None:
    world = make_world(checkpoint={"gracefulSuspendSeconds": 20})
    begin(world)
    world.intent = Intent.SUSPEND
    began = world.now
    pass_until(world, lambda: world.status.current.stopping_time is not None)
    assert world.now - began < 2


def test_second_interrupt_stops_at_once_and_still_flushes(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.make_step(12)
    world.stage(11)
    world.intent = Intent.STOP_NOW
    seen = world.look()
    assert StopGang(runs=("uid-1",), mode=StopMode.KILL) in seen.decision.actions
    world.settle()
    assert world.status.state == State.SUSPENDED
    assert list(world.steps) == [11]


def test_changed_mind_while_suspending_resumes_after_the_stop(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.make_step(12)
    world.intent = Intent.SUSPEND
    while not world.final:
        world.turn()
    world.intent = Intent.RUN
    world.persist("uid-1")
    world.relaunched()
    assert (world.launch_of(2).resume_step, world.status.restarts) == (12, 0)


def test_suspend_gives_up_on_the_last_save_after_its_grace(make_world: MakeWorld) -> None:
    world = make_world(checkpoint={"gracefulSuspendSeconds": 20})
    world.start()
    world.make_step(12)
    world.is_storage_down = True
    world.intent = Intent.SUSPEND
    began = world.now
    while world.gang.lives:
        world.turn()
    assert 20 <= world.now - began < 22


def pass_until(world: Any, condition: Callable[[], bool], *, limit: int = 200) -> None:
    for _ in range(limit):
        if condition():
            return
        world.turn()
    raise AssertionError(f"never: {[seen.decision.why for seen in world.passes[-5:]]}")


def suspended_with_the_storage_away(world: Any) -> None:
    """Step 12 is staged, and memory alone holds it when the job is suspended."""
    world.start()
    world.make_step(12)
    world.steps[4] = world.now
    world.stage(12)
    world.is_storage_down = True
    world.intent = Intent.STOP_NOW
    pass_until(world, lambda: world.status.state is State.SUSPENDED)
    assert world.status.current.flush_timed_out
    world.agent = AgentState.GONE
    world.advance(8 * 3600)


def test_what_a_suspended_job_could_not_flush_is_flushed_when_it_is_resumed(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"flushTimeoutSeconds": 5})
    suspended_with_the_storage_away(world)
    world.is_storage_down = False
    world.intent = Intent.RUN
    world.relaunched()
    assert (world.launch_of(2).resume_step, world.status.restarts) == (12, 0)


def test_resumed_job_starts_an_agent_for_what_is_left_before_it_is_stopped_again(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"flushTimeoutSeconds": 5})
    suspended_with_the_storage_away(world)
    world.intent = Intent.RUN
    world.look()
    world.intent = Intent.SUSPEND
    began = world.now
    pass_until(world, lambda: world.status.state is State.SUSPENDED)
    assert world.agent is AgentState.READY
    assert 5 <= world.now - began < 6
    world.is_storage_down = False
    world.intent = Intent.RUN
    world.relaunched()
    assert world.launch_of(2).resume_step == 12


def test_resumed_job_waits_for_the_storage_as_long_as_any_other(make_world: MakeWorld) -> None:
    world = make_world(startupDeadlineSeconds=60)
    world.start()
    world.intent = Intent.STOP_NOW
    world.settle()
    world.advance(8 * 3600)
    world.is_storage_down = True
    world.intent = Intent.RUN
    resumed = world.now
    pass_until(world, lambda: world.now - resumed > 50)
    assert not world.status.is_terminal
    pass_until(world, lambda: world.status.is_terminal)
    assert 60 <= world.now - resumed < 65
    assert world.status.condition(ConditionType.FAILED).reason == FailedReason.CHECKPOINT_UNAVAILABLE


def test_supervisor_that_comes_late_between_two_attempts_waits_for_the_storage(make_world: MakeWorld) -> None:
    world = make_world(startupDeadlineSeconds=60)
    world.start()
    world.make_step(5)
    world.is_storage_down = True
    world.fail()
    pass_until(world, lambda: world.status.current.flushed_time is not None)
    world.advance(8 * 3600)
    world.lose_supervisor()
    world.look()
    world.is_storage_down = False
    world.relaunched()
    assert len(world.launches) == 2
