"""When a gang counts as ready: its ranks say so, or, of a script that never uses the SDK, its pods have run for a
while. Nothing that is only assumed is told as if somebody had said it, or switches a deadline off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stepfast_operator.events import EventReason, events_of
from stepfast_operator.local import story
from stepfast_operator.observed import AgentState, Intent, WorkerPhase
from stepfast_operator.record import ConditionType, FailedReason, State

MakeWorld = Callable[..., Any]
TWO_NODES = {"command": ["torchrun", "t.py"], "numNodes": 2}
ASSUMED = "all pods run; no rank uses the SDK yet"


def pass_for(world: Any, seconds: float) -> None:
    """Passes, as the operator makes them, for so long."""
    end = world.now + seconds
    while world.now < end and not world.status.is_terminal:
        world.look()
        world.advance(min(end - world.now, world.passes[-1].decision.requeue_seconds or seconds, 5.0))
    world.look()


def is_ready(world: Any) -> bool:
    """What every surface says of it: they agree."""
    condition = world.status.condition(ConditionType.PODS_READY).status == "True"
    shown = world.status.nodes.ready == world.spec.trainer.num_nodes
    assert condition == shown == (world.status.state in (State.RUNNING, State.SUSPENDING)), world.status
    return condition


def ready_events(world: Any) -> list[str]:
    events = (event for seen in world.passes for event in events_of(seen))
    return [event.message for event in events if event.reason is EventReason.PODS_READY]


def failed_message(world: Any) -> str:
    failed = world.status.condition(ConditionType.FAILED)
    assert failed is not None, world.passes[-1].decision
    assert failed.reason == FailedReason.STARTUP_DEADLINE_EXCEEDED
    return str(failed.message)


def join_rank(world: Any, rank: int) -> None:
    """That rank says hello, and no other has."""
    world.join(restored_step=None)
    world.gang.ranks = {rank: world.gang.ranks[rank]}


def test_time_in_which_pods_are_pending_does_not_count_as_running(make_world: MakeWorld) -> None:
    world = make_world(trainer=TWO_NODES)
    world.launched()
    world.hold_up()
    pass_for(world, 60)
    assert not is_ready(world)
    world.begin_to_run(0)
    pass_for(world, 20)
    world.begin_to_run(1)
    pass_for(world, 29)
    assert not is_ready(world), "the last of them has run for less than 30 s"
    assert world.status.state is State.STARTING
    pass_for(world, 6)
    assert is_ready(world)
    assert ready_events(world) == [ASSUMED]


def test_worker_that_is_said_to_run_but_has_not_begun_to_is_no_running_one(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod runs as soon as any container of it does."""
    world = make_world()
    world.launched()
    observe = world.observe

    async def without_a_start(status: Any) -> Any:
        observed = await observe(status)
        workers = [replace(worker, running_since=None) for worker in observed.gang.workers]
        return replace(observed, gang=replace(observed.gang, workers=workers))

    monkeypatch.setattr(world, "observe", without_a_start)
    pass_for(world, 100)
    assert not is_ready(world)


def test_script_without_the_sdk_runs_and_is_not_failed_by_the_start_deadline(make_world: MakeWorld) -> None:
    world = make_world(trainer=TWO_NODES, startupDeadlineSeconds=60)
    world.launched()
    pass_for(world, 300)
    assert is_ready(world)
    world.gang.phases[0] = WorkerPhase.SUCCEEDED
    pass_for(world, 100)
    assert world.status.state is State.RUNNING, "a node that is done makes the others no less ready"
    assert ready_events(world) == [ASSUMED]
    assert [line for seen in world.passes for line in story.tell(seen) if "SDK" in line] == [
        "the gang runs; no rank uses the SDK yet"
    ]
    world.succeed()
    world.settle()
    assert world.status.state is State.COMPLETE


def test_script_without_the_sdk_is_restarted_as_any_other_and_runs_again(make_world: MakeWorld) -> None:
    world = make_world(startupDeadlineSeconds=60)
    world.launched()
    pass_for(world, 100)
    world.fail()
    world.relaunched()
    assert not is_ready(world)
    pass_for(world, 100)
    assert is_ready(world)
    assert ready_events(world) == [ASSUMED, ASSUMED]
    assert world.status.recoveries[-1].pods_ready_time is None, "no rank ever joined"


def test_gang_that_was_taken_to_be_ready_stays_so_while_it_is_suspended(make_world: MakeWorld) -> None:
    world = make_world()
    world.launched()
    pass_for(world, 40)
    world.intent = Intent.SUSPEND
    world.look()
    world.look()
    assert world.status.state is State.SUSPENDING
    assert is_ready(world)


def test_ranks_that_join_late_are_ready_when_they_joined(make_world: MakeWorld) -> None:
    world = make_world()
    world.launched()
    pass_for(world, 40)
    world.fail()
    world.relaunched()
    pass_for(world, 45)
    assert world.status.current.pods_ready_time is None
    assert world.status.recoveries[-1].pods_ready_time is None
    world.join()
    joined = world.now
    pass_for(world, 5)
    assert world.status.current.pods_ready_time == joined
    assert world.status.recoveries[-1].pods_ready_time == joined
    assert is_ready(world)
    assert ready_events(world)[-1] == "all ranks are here"


def test_agent_that_is_restarted_does_not_move_the_time_when_all_ranks_were_here(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    ready = world.status.current.pods_ready_time
    pass_for(world, 50)
    ranks, world.gang.ranks = world.gang.ranks, {}
    pass_for(world, 2)
    assert is_ready(world)
    world.gang.ranks = {rank: replace(status, joined_time=world.now) for rank, status in ranks.items()}
    pass_for(world, 10)
    assert world.status.current.pods_ready_time == ready
    assert ready_events(world) == ["all ranks are here"]


def test_gang_of_which_one_rank_joins_is_not_ready_any_more_until_the_others_do(make_world: MakeWorld) -> None:
    world = make_world()
    world.launched()
    pass_for(world, 40)
    assert is_ready(world)
    join_rank(world, 0)
    pass_for(world, 5)
    assert not is_ready(world)
    assert world.status.state is State.STARTING
    world.join()
    joined = world.now
    pass_for(world, 5)
    assert is_ready(world)
    assert world.status.current.pods_ready_time == joined
    assert ready_events(world) == [ASSUMED, "all ranks are here"]


def test_start_deadline_holds_for_a_gang_that_was_taken_to_be_ready_and_of_which_one_rank_joins(
    make_world: MakeWorld,
) -> None:
    world = make_world(startupDeadlineSeconds=60)
    world.launched()
    planned = world.status.current.planned_time
    pass_for(world, 45)
    assert is_ready(world)
    join_rank(world, 1)
    pass_for(world, 100)
    assert failed_message(world) == "only 1 of 2 ranks joined within 60 s (startupDeadlineSeconds)"
    assert 60 <= world.status.current.ended_time - planned < 66


def test_ranks_that_begin_to_join_after_the_start_deadline_have_as_long_again(make_world: MakeWorld) -> None:
    """A script may make its data ready for an hour before it uses the SDK; its ranks do not join in one moment."""
    world = make_world(startupDeadlineSeconds=60)
    world.launched()
    pass_for(world, 3600)
    join_rank(world, 1)
    began = world.now
    pass_for(world, 50)
    assert not world.status.is_terminal
    pass_for(world, 50)
    assert failed_message(world) == "only 1 of 2 ranks joined within 60 s (startupDeadlineSeconds)"
    assert 60 <= world.status.current.ended_time - began < 66


def train_and_forget(world: Any, *, saves: int = 0, seconds: float = 0.0) -> None:
    """The first attempt trains, and fails. No agent remembers it."""
    world.start(staged=10)
    world.advance(seconds)
    world.make_step(20)
    world.settle()
    if saves:
        saved = replace(world.status.checkpoint.saves, count=saves)
        world.status = replace(world.status, checkpoint=replace(world.status.checkpoint, saves=saved))
    world.fail()
    world.relaunched()
    forget(world)


def train(world: Any) -> None:
    world.start(staged=10)
    world.fail()
    world.relaunched()


def forget(world: Any) -> None:
    world.gangs.pop("uid-1")
    for held in (world.staged, world.parted, world.committed):
        held.clear()


JOINED_BEFORE: dict[str, Callable[[Any], None]] = {
    "an agent remembers": train,
    "it saved": lambda world: train_and_forget(world, saves=1),
    "it trained": lambda world: train_and_forget(world, seconds=40),
}


@pytest.mark.parametrize("before", [pytest.param(before, id=name) for name, before in JOINED_BEFORE.items()])
def test_start_deadline_holds_for_a_script_that_has_used_the_sdk_and_of_which_no_rank_joins(
    make_world: MakeWorld, before: Callable[[Any], None]
) -> None:
    world = make_world(startupDeadlineSeconds=60)
    before(world)
    launched = world.now
    pass_for(world, 50)
    assert world.status.state is State.STARTING, "nobody takes it to be one that uses no SDK"
    pass_for(world, 50)
    assert failed_message(world) == "no rank joined within 60 s (startupDeadlineSeconds)"
    assert 60 <= world.status.current.ended_time - launched < 66
    assert len(ready_events(world)) == 1


def test_ranks_of_which_nobody_tells_are_not_said_to_be_missing(make_world: MakeWorld) -> None:
    world = make_world(startupDeadlineSeconds=60)
    train(world)
    world.agent = AgentState.STARTING
    pass_for(world, 100)
    assert not world.status.is_terminal
    world.agent = AgentState.READY
    world.join()
    pass_for(world, 5)
    assert is_ready(world)


@pytest.mark.parametrize("is_agent_back", [False, True], ids=["agent is away", "agent is back before its ranks are"])
def test_ranks_of_which_nobody_tells_fail_no_gang_that_trains(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, is_agent_back: bool
) -> None:
    """One node's agent is away while torchrun starts all ranks anew: only the other node's are known."""
    world = make_world(startupDeadlineSeconds=60, failurePolicy={"restartStrategy": "InPlace"})
    world.start(staged=10)
    world.die()
    world.rejoin(restored_step=10)
    known, world.gang.ranks = world.gang.ranks, {0: world.gang.ranks[0]}
    observe = world.observe

    async def without_one_agent(status: Any) -> Any:
        return replace(await observe(status), agent=AgentState.STARTING)

    monkeypatch.setattr(world, "observe", without_one_agent)
    for step in range(11, 31):
        world.make_step(step)
        pass_for(world, 5)
    assert world.status.current.ended_time is None, world.status.current.fail_message
    if is_agent_back:
        monkeypatch.setattr(world, "observe", observe)
        pass_for(world, 5)
        assert world.status.current.ended_time is None, world.status.current.fail_message
    world.gang.ranks = known
    pass_for(world, 5)
    assert is_ready(world)


def test_steps_of_a_job_that_had_the_name_before_do_not_tell_that_a_script_uses_the_sdk(make_world: MakeWorld) -> None:
    world = make_world(startupDeadlineSeconds=60)
    world.steps = {50: 1.0}
    world.launched()
    assert world.launches[-1].resume_step == 50
    pass_for(world, 100)
    world.fail()
    world.relaunched()
    pass_for(world, 100)
    assert is_ready(world)
