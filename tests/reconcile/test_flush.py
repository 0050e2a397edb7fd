"""What is staged when an attempt ends, in a fake world, one behaviour a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stepfast.nodestatus import JobStatus, RankStatus, SaveStatus
from stepfast_operator.local.session import exit_code_of
from stepfast_operator.observed import AgentState, DeadRank, Observed
from stepfast_operator.policies import flush
from stepfast_operator.record import ConditionType, FailedReason, State, Status

MakeWorld = Callable[..., Any]


def _flushed(world: Any) -> None:
    """Until what the failed attempt staged is no longer waited for."""
    while world.status.current.flushed_time is None:
        world.turn()


def test_staged_steps_of_the_failed_run_are_flushed_before_the_resume_step_is_fixed(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.start(staged=30)
    world.fail()
    world.relaunched()
    assert world.launch_of(2).resume_step == 30
    assert world.status.recoveries[0].steps_lost == 0


def test_step_whose_part_is_written_is_waited_for_until_it_is_committed(make_world: MakeWorld) -> None:
    world = make_world()
    world.start(staged=30)
    world.is_commit_held = True
    world.fail()
    for _ in range(20):
        world.turn()
    assert world.parted == {"uid-1": [30]}
    assert len(world.launches) == 1, "the next attempt did not wait for the manifest"
    world.is_commit_held = False
    world.relaunched()
    assert world.launch_of(2).resume_step == 30
    assert not world.status.recoveries[0].steps_lost


def test_step_whose_other_parts_no_agent_has_missed_is_waited_for(make_world: MakeWorld) -> None:
    world = make_world()
    world.start(staged=30)
    world.is_commit_held = True
    world.fail()
    held_up = {"incomplete_steps": ()}
    _change_reports(world, lambda report: [replace(report, **held_up)])
    began = world.now
    while world.now - began < 2 * flush.COMMIT_SECONDS:
        world.turn()
    assert len(world.launches) == 1, "the storage stands still, and the step is whole"
    held_up["incomplete_steps"] = (30,)
    _flushed(world)
    assert not world.status.current.flush_timed_out
    world.relaunched()
    assert world.launch_of(2).resume_step == 0


def test_step_whose_other_parts_nobody_will_write_is_not_waited_for_until_the_flush_times_out(
    make_world: MakeWorld,
) -> None:
    world = make_world(failurePolicy={"flushTimeoutSeconds": 600})
    world.start()
    world.make_step(30)
    world.steps[10] = world.now
    world.stage(30)
    world.is_commit_held = True
    world.fail()
    began = world.now
    _flushed(world)
    assert flush.COMMIT_SECONDS <= world.now - began < flush.COMMIT_SECONDS + 5
    assert not world.status.current.flush_timed_out, "nothing was left that waiting would have saved"
    world.relaunched()
    assert world.launch_of(2).resume_step == 10
    assert world.status.recoveries[0].steps_lost == 20


def _change_reports(world: Any, change: Callable[[JobStatus], list[JobStatus]]) -> None:
    """From now on the agents report what becomes of each report."""
    observe = world.observe

    async def observe_changed(status: Status) -> Observed:
        observed = await observe(status)
        return replace(observed, reports=[changed for report in observed.reports for changed in change(report)])

    world.observe = observe_changed


def _as_two_nodes(world: Any, second: dict[str, Any], *, alive: bool) -> None:
    """Each rank's node reports for itself from now on; the second node, of which rank 1 is, as told."""

    def split(report: JobStatus) -> list[JobStatus]:
        first, last = report.ranks[:1], tuple(replace(rank, alive=alive) for rank in report.ranks[1:])
        return [replace(report, ranks=first), replace(report, ranks=last, **second)]

    _change_reports(world, split)


@pytest.mark.parametrize(
    ("second", "alive", "waits"),
    [
        ({"pending_steps": ()}, False, False),
        ({"pending_steps": ()}, True, True),
        ({"pending_steps": (30,)}, False, True),
    ],
    ids=["has-not-got-it", "may-stage-it-yet", "has-written-it"],
)
def test_part_of_a_step_that_another_node_has_not_got_is_not_waited_for(
    make_world: MakeWorld, second: dict[str, Any], alive: bool, waits: bool
) -> None:
    world = make_world()
    world.start()
    world.make_step(30)
    world.steps[10] = world.now
    world.stage(30)
    world.is_commit_held = True
    world.fail()
    _as_two_nodes(world, second, alive=alive)
    began = world.now
    world.relaunched()
    assert world.launch_of(2).resume_step == 10
    # Even then no longer than a part takes to be found that is there all the same.
    assert world.now - began >= (flush.COMMIT_SECONDS if waits else flush.HOPELESS_SECONDS)
    assert (world.now - began >= flush.COMMIT_SECONDS) == waits


def test_flush_is_bounded_when_the_storage_does_not_take_it(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"flushTimeoutSeconds": 5})
    world.start()
    world.make_step(30)
    world.steps[10] = world.now
    world.stage(30)
    world.is_storage_down = True
    world.fail()
    began = world.now
    _flushed(world)
    assert 5 <= world.status.current.flushed_time - began < 6
    assert world.status.current.flush_timed_out
    world.is_storage_down = False
    world.relaunched()
    assert world.launch_of(2).resume_step == 10


def test_agent_killed_with_the_gang_is_started_and_flushed_before_the_next_attempt(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.start(staged=30)
    world.agent = AgentState.GONE
    world.fail()
    world.relaunched()
    assert world.launch_of(2).resume_step == 30


def test_success_is_flushed_and_terminal(make_world: MakeWorld) -> None:
    world = make_world()
    world.start(staged=9)
    world.succeed()
    world.settle()
    assert world.status.state == State.COMPLETE
    assert list(world.steps) == [9]
    launches = len(world.launches)
    world.advance(1000)
    world.settle()
    assert world.status.state == State.COMPLETE
    assert len(world.launches) == launches


def test_success_whose_last_step_the_storage_does_not_take_is_no_success(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"flushTimeoutSeconds": 5})
    world.start(staged=10)
    world.is_storage_down = True
    world.succeed()
    began = world.now
    world.relaunched()
    failed = world.status.condition(ConditionType.FAILED)
    assert failed.reason == FailedReason.CHECKPOINT_UNAVAILABLE
    assert "step 10 " in failed.message
    assert "same command" in failed.message
    assert 5 <= world.now - began < 6
    assert exit_code_of(world.status) == 1


def test_error_of_a_step_that_was_given_up_holds_nobody_up(make_world: MakeWorld) -> None:
    world = make_world()
    world.start(staged=30)
    world.persist("uid-1")
    _change_reports(world, lambda report: [replace(report, persist_error="step 20: its slot was damaged")])
    began = world.now
    world.succeed()
    world.relaunched()
    assert world.status.state == State.COMPLETE
    assert world.now - began < 1


@pytest.mark.parametrize("lone", [20, 30], ids=["older", "committed-elsewhere"])
@pytest.mark.parametrize("end", ["success", "failure"])
def test_nobody_waits_for_the_part_of_a_step_that_a_committed_one_has_overtaken(
    make_world: MakeWorld, end: str, lone: int
) -> None:
    world = make_world()
    world.start(staged=30)
    world.persist("uid-1")
    _change_reports(world, lambda report: [replace(report, pending_steps=(lone,))])
    began = world.now
    if end == "success":
        world.succeed()
        world.relaunched()
        assert world.status.state == State.COMPLETE
    else:
        world.fail()
        _flushed(world)
        assert not world.status.current.flush_timed_out
        world.relaunched()
        assert world.launch_of(2).resume_step == 30
    assert world.now - began < flush.COMMIT_SECONDS


def test_part_that_was_left_behind_by_an_in_place_restart_fails_no_job(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"restartStrategy": "InPlace", "maxInPlaceRestarts": 1})
    world.start(staged=20)
    world.persist("uid-1")
    world.die()
    world.advance(1)
    world.rejoin(restored_step=20)
    world.settle()
    world.make_step(40)
    world.stage(40)

    def with_lone_part(report: JobStatus) -> list[JobStatus]:
        """Of the launch before: the rank died before it staged its share."""
        return [replace(report, pending_steps=(25,)) if report.run == "uid-1" else report]

    _change_reports(world, with_lone_part)
    world.succeed()
    world.relaunched()
    assert world.status.state == State.COMPLETE
    assert max(world.steps) == 40


def test_success_whose_last_part_lacks_the_others_is_no_success(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.make_step(30)
    world.steps[10] = world.now
    world.stage(30)
    world.is_commit_held = True
    world.succeed()
    world.relaunched()
    failed = world.status.condition(ConditionType.FAILED)
    assert failed.reason == FailedReason.CHECKPOINT_UNAVAILABLE
    assert "step 30 is not whole in the storage" in failed.message


def test_rank_that_succeeded_without_a_goodbye_has_not_failed_while_its_steps_are_flushed(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.start(staged=10)
    world.is_commit_held = True
    world.succeed()
    dead = DeadRank(rank=1, node="node-0", ended_time=world.now, run="uid-1")
    observe = world.observe

    async def with_dead(status: Status) -> Observed:
        return replace(await observe(status), dead_ranks=[dead])

    world.observe = with_dead
    for _ in range(20):
        world.turn()
    world.is_commit_held = False
    world.relaunched()
    assert (world.status.state, world.status.attempt) == (State.COMPLETE, 1)


def test_success_is_not_trusted_while_no_agent_can_say_what_is_left(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"flushTimeoutSeconds": 5})
    world.start(staged=10)
    world.settle()
    world.succeed()
    for _ in range(100):
        world.agent = AgentState.STARTING
        world.turn()
    assert world.status.condition(ConditionType.FAILED).reason == FailedReason.CHECKPOINT_UNAVAILABLE


def last_words(
    world: Any, *, memory: int, persisted: int | None, ranks: int = 2, clean: bool = True, alive: bool = False
) -> JobStatus:
    """What a node's agent reported of the first run before it fell silent."""
    known = [
        RankStatus(rank=rank, pid=1, alive=alive, clean=clean, joined_time=world.now, ended_time=world.now)
        for rank in range(ranks)
    ]
    return JobStatus(
        job=world.job, run="uid-1", world_size=2, ranks=known, saves=SaveStatus(), latest_memory_step=memory,
        latest_persisted_step=persisted,
    )  # fmt: skip


def fall_silent(world: Any, report: JobStatus, **seen: Any) -> None:
    """From now on no agent serves; in a cluster its last report stays for everybody to read."""
    observe = world.observe
    silent = {"agent": AgentState.STARTING, **seen}

    async def observe_silence(status: Status) -> Observed:
        return replace(await observe(status), reports=[report], **silent)

    world.observe = observe_silence


@pytest.mark.parametrize(
    "silence",
    [{}, {"agent": AgentState.READY, "awaited_agents": ("node-0",)}],
    ids=["no agent serves", "it never answers what it is asked"],
)
def test_success_whose_last_step_is_committed_needs_no_word_of_an_agent_that_fell_silent(
    make_world: MakeWorld, silence: dict[str, Any]
) -> None:
    world = make_world(failurePolicy={"flushTimeoutSeconds": 600})
    world.start(staged=30)
    world.settle()
    world.persist("uid-1")
    world.succeed()
    began = world.now
    fall_silent(world, last_words(world, memory=30, persisted=30), **silence)
    world.settle()
    assert world.status.state is State.COMPLETE
    assert world.now - began < 1, "there is nothing that could be waited for"


@pytest.mark.parametrize(
    "words",
    [
        {"memory": 30, "persisted": 20},
        {"memory": 30, "persisted": None},
        {"memory": 30, "persisted": 30, "alive": True, "clean": False},
        {"memory": 30, "persisted": 30, "clean": False},
        {"memory": 30, "persisted": 30, "ranks": 1},
    ],
    ids=["staged, not due", "nothing committed", "may save once more", "may have been launched anew", "half the ranks"],
)
def test_step_that_a_silent_agent_may_hold_is_waited_for_until_the_time_is_up(
    make_world: MakeWorld, words: dict[str, Any]
) -> None:
    world = make_world(failurePolicy={"flushTimeoutSeconds": 5})
    world.start(staged=30)
    world.settle()
    world.succeed()
    began = world.now
    fall_silent(world, last_words(world, **words))
    world.relaunched()
    assert world.status.condition(ConditionType.FAILED).reason == FailedReason.CHECKPOINT_UNAVAILABLE
    assert 5 <= world.now - began < 6


def test_success_of_a_script_that_saved_nothing_needs_no_agent(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"flushTimeoutSeconds": 5})
    world.start()
    world.succeed()
    for _ in range(100):
        world.agent = AgentState.STARTING
        world.turn()
    assert world.status.state is State.COMPLETE


def test_flush_is_asked_for_once_even_without_time_for_it(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"flushTimeoutSeconds": 0})
    world.start(staged=10)
    world.succeed()
    world.relaunched()
    assert (world.status.state, list(world.steps)) == (State.COMPLETE, [10])


def test_agent_that_was_replaced_during_the_flush_is_asked_again(make_world: MakeWorld) -> None:
    world = make_world()
    world.start(staged=30)
    world.is_storage_down = True
    world.fail()
    while world.status.current.flush_asked_time is None:
        world.turn()
    world.agent = AgentState.GONE
    # To the one after it the step is not due yet: nothing seems to be pending.
    world.staged_not_due, world.staged = world.staged, {}
    world.is_storage_down = False
    world.relaunched()
    assert world.launch_of(2).resume_step == 30
