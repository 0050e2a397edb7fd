"""Whatever happens in whatever order, and wherever the operator is killed: the invariants I8 and I9 hold."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepfast_operator.actions import LaunchGang, PlanAttempt
from stepfast_operator.decide import decide
from stepfast_operator.document import decode, encode
from stepfast_operator.events import EventReason, events_of
from stepfast_operator.observed import AgentState, Intent
from stepfast_operator.reconcile import reconcile
from stepfast_operator.record import Cause, State, Status
from stepfast_operator.status import next_status

# Said once an attempt, and once in a job's life.
ONCE_AN_ATTEMPT = (EventReason.PODS_CREATED, EventReason.FLUSH_TIMED_OUT)
ONCE = (
    EventReason.COMPLETED,
    EventReason.FAILED,
    EventReason.REACHED_MAX_RESTARTS,
    EventReason.NO_PROGRESS,
)

KILL = "kill the operator before it writes the status"
POLICY = {
    "maxRestarts": 4,
    "flushTimeoutSeconds": 10,
    "restartStrategy": "InPlace",
    "maxInPlaceRestarts": 2,
}
COUNTERS = ("attempt", "restarts", "restarts_count_towards_max", "steps_lost")


class Killed(Exception):
    """The operator was killed after its effects and before its status."""


def newest(world: Any) -> int:
    return max((rank.global_step or 0 for rank in world.gang.ranks.values()), default=0)


def in_gang(act: Callable[[Any], None]) -> Callable[[Any], None]:
    """Something that only a living gang can do."""
    return lambda world: act(world) if world.launches and world.gang.lives else None


def persist(world: Any) -> None:
    if world.launches and not world.is_storage_down:
        world.persist(world.gang.run)


def revive_first_gang(world: Any) -> None:
    if world.launches:
        world.gangs[world.launches[0].run].lives = True


def rejoin(world: Any) -> None:
    if world.gang.ranks and not all(rank.alive for rank in world.gang.ranks.values()):
        world.rejoin(max(world.steps, default=0))


def take_away(cause: Cause) -> Callable[[Any], None]:
    return in_gang(lambda world: world.take_away(cause))


# What the operator has no hand in.
EVENTS: dict[str, Callable[[Any], None]] = {
    "join": in_gang(lambda world: world.join()),
    "step": in_gang(lambda world: world.make_step(newest(world) + 1)),
    "stage": in_gang(lambda world: world.stage(newest(world)) if world.gang.ranks else None),
    "fail": in_gang(lambda world: world.fail()),
    "succeed": in_gang(lambda world: world.succeed()),
    "rank dies": in_gang(lambda world: world.die() if world.gang.ranks else None),
    "rejoin in place": in_gang(rejoin),
    "evict": take_away(Cause.POD_EVICTED),
    "delete pod": take_away(Cause.POD_DELETED),
    "lose node": take_away(Cause.NODE_LOST),
    "agents are slow": lambda world: setattr(world, "awaited_agents", ("node-0",)),
    "agents answer": lambda world: setattr(world, "awaited_agents", ()),
    "persist": persist,
    "stray": revive_first_gang,
    "kill agent": lambda world: setattr(world, "agent", AgentState.GONE),
    "storage down": lambda world: setattr(world, "is_storage_down", True),
    "storage up": lambda world: setattr(world, "is_storage_down", False),
    "lose supervisor": lambda world: world.lose_supervisor(),
    "suspend": lambda world: setattr(world, "intent", Intent.SUSPEND),
    "stop now": lambda world: setattr(world, "intent", Intent.STOP_NOW),
    "resume": lambda world: setattr(world, "intent", Intent.RUN),
    "wait": lambda world: world.advance(1),
    "wait long": lambda world: world.advance(90),
    # What the agents have yet to take in outlives it: that stands in their CheckpointNodes.
    KILL: lambda world: None,
}


def look(world: Any, *, is_killed: bool) -> None:
    """One pass, checked."""
    observed = asyncio.run(world.observe(world.status))
    first, again = decide(observed), decide(observed)
    assert first == again
    assert next_status(observed, first) == next_status(observed, again)
    launches, before = len(world.launches), world.status
    if is_killed:
        write = world.write_status

        async def die(status: Status) -> None:
            raise Killed

        world.write_status = die
        try:
            world.look()
        except Killed:
            pass
        finally:
            world.write_status = write
        # All that a new operator knows is what was written.
        world.status = decode(Status, json.loads(json.dumps(encode(world.status))), "status")
    else:
        seen = world.look()
        if any(isinstance(action, LaunchGang) for action in seen.decision.actions):
            assert not seen.observed.live_runs
        plan = next((action for action in seen.decision.actions if isinstance(action, PlanAttempt)), None)
        if plan is not None:
            assert plan.resume_step == max(world.steps, default=0)
            assert plan.run not in world.gangs
    after = world.status
    assert [recovery.counted for recovery in after.recoveries].count(True) <= after.restarts_count_towards_max + 1
    assert after.restarts_count_towards_max <= min(after.restarts, POLICY["maxRestarts"])
    assert sum(gang.lives for gang in world.gangs.values()) <= 2 - (len(world.launches) > launches)
    for counter in COUNTERS:
        assert getattr(after, counter) >= getattr(before, counter), counter
    if before.is_terminal:
        assert replace(after, conditions=()) == replace(before, conditions=())
        assert len(world.launches) == launches
    if len(world.launches) > launches:
        assert world.launches[-1].run == before.current.run
        assert world.launches[-1].resume_step == before.current.resume_step
        assert [gang.run for gang in world.gangs.values() if gang.lives] == [world.launches[-1].run]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(st.sampled_from(sorted(EVENTS)), max_size=50))
def test_invariants_hold_whatever_happens(make_world: Callable[..., Any], events: list[str]) -> None:
    world = make_world(failurePolicy=POLICY, checkpoint={"maxStalenessSeconds": 60}, ttlSecondsAfterFinished=200)
    for event in events:
        EVENTS[event](world)
        look(world, is_killed=event == KILL)
    launched = [launch.run for launch in world.launches]
    assert len(launched) == len(set(launched))
    told = Counter(event.reason for seen in world.passes for event in events_of(seen))
    assert all(told[reason] <= 1 for reason in ONCE)
    # A flush that took too long is tried, and may take too long, anew when a suspended job goes on.
    anew = events.count(KILL) + events.count("resume")
    assert all(told[reason] <= len(launched) + anew for reason in ONCE_AN_ATTEMPT)
    assert not (told[EventReason.COMPLETED] and told[EventReason.FAILED])
    assert world.is_deleted <= world.status.is_terminal


CAUSES = (Cause.POD_EVICTED, Cause.POD_DELETED, Cause.NODE_LOST)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(causes=st.lists(st.sampled_from(CAUSES), min_size=1, max_size=12))
def test_what_is_done_to_pods_from_outside_never_uses_the_budget(
    make_world: Callable[..., Any], causes: list[Cause]
) -> None:
    world = make_world(failurePolicy={"maxRestarts": 0})
    world.start()
    for step, cause in enumerate(causes, 1):
        world.make_step(step)
        world.stage(step)
        world.settle()
        world.take_away(cause)
        world.relaunched()
        world.join()
        world.settle()
    assert (world.status.state, world.status.restarts) == (State.RUNNING, len(causes))
    assert world.status.restarts_count_towards_max == 0
    assert world.status.steps_lost == 0


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(st.sampled_from(sorted(EVENTS)), max_size=30))
def test_left_alone_every_job_comes_to_rest(make_world: Callable[..., Any], events: list[str]) -> None:
    """No sequence of events leaves the loop spinning, or waiting for something that will not come."""
    world = make_world(failurePolicy=POLICY)
    for event in events:
        EVENTS[event](world)
        look(world, is_killed=event == KILL)
    world.is_storage_down = False
    for _ in range(3000):
        seen = asyncio.run(reconcile(world, world.status))
        world.status = seen.after
        if world.launches and world.gang.lives and world.status.state == State.RUNNING:
            world.succeed()
        elif world.launches and world.gang.lives:
            world.join()
        if world.status.is_terminal or (world.status.state is State.SUSPENDED and world.intent is not Intent.RUN):
            break
        world.advance(seen.decision.requeue_seconds or 0.01)
    assert world.status.state in (State.COMPLETE, State.FAILED, State.SUSPENDED)


@given(st.integers(0, 5), st.floats(0, 1e6))
def test_status_reads_back_as_written(attempt: int, seconds: float) -> None:
    status = Status(attempt=attempt, start_time=round(seconds, 6), restarts=attempt)
    assert decode(Status, json.loads(json.dumps(encode(status))), "status") == status
