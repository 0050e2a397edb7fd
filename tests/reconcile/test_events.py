"""A job's Events: `kubectl describe` reads as its story, and nothing is said twice."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stepfast_operator.events import EventReason, JobEvent, events_of, events_of_refusal
from stepfast_operator.observed import Intent
from stepfast_operator.record import Cause, Status
from stepfast_operator.status import refuse

MakeWorld = Callable[..., Any]


def told(world: Any) -> list[JobEvent]:
    return [event for seen in world.passes for event in events_of(seen)]


def story(world: Any) -> list[tuple[str, str]]:
    """Without the fractions of seconds that passes take."""
    return [(str(event.reason), re.sub(r"\b(\d+)\.\d s\b", r"\1 s", event.message)) for event in told(world)]


def reasons(world: Any) -> list[str]:
    return [reason for reason, _ in story(world)]


def test_life_of_a_job_reads_as_a_story(make_world: MakeWorld) -> None:
    world = make_world(trainer={"command": ["torchrun", "t.py"], "numNodes": 2})
    world.start_fail_and_recover()
    world.take_away(Cause.POD_EVICTED, node=1)
    world.relaunched()
    world.join()
    world.settle()
    world.make_step(13)
    world.settle()
    world.succeed()
    world.settle()
    world.settle()
    assert story(world) == [
        ("PodsCreated", "attempt 1 starts from scratch: 2 pods, run uid-1"),
        ("PodsReady", "all ranks are here"),
        ("Restarting", "attempt 1 failed: RankFailed (rank 1, exit code 137): failed"),
        ("PodsCreated", "attempt 2 starts from step 10, 2 steps lost: 2 pods, run uid-2"),
        ("PodsReady", "all ranks are here"),
        ("CheckpointRestored", "all ranks restored step 10 from Memory"),
        ("Recovered", "training goes on 7 s after the failure of attempt 1, 2 steps lost"),
        (
            "Restarting",
            "attempt 2 failed: PodEvicted (uid-2-1 on node-1): was taken away; not counted towards maxRestarts",
        ),
        ("PodsCreated", "attempt 3 starts from step 10, 1 step lost: 2 pods, run uid-3"),
        ("PodsReady", "all ranks are here"),
        ("CheckpointRestored", "all ranks restored step 10 from Persistent"),
        ("Recovered", "training goes on 1 s after the failure of attempt 2, 1 step lost"),
        ("Completed", "complete"),
    ]
    assert {event.reason: event.type for event in told(world)} == {
        EventReason.PODS_CREATED: "Normal",
        EventReason.PODS_READY: "Normal",
        EventReason.RESTARTING: "Warning",
        EventReason.CHECKPOINT_RESTORED: "Normal",
        EventReason.RECOVERED: "Normal",
        EventReason.COMPLETED: "Normal",
    }


def test_recovery_is_told_once_though_the_one_before_it_failed_at_the_same_time(make_world: MakeWorld) -> None:
    world = make_world()
    world.start(staged=10)
    lost = world.now
    for _ in range(2):
        world.take_away(Cause.NODE_LOST)
        world.gang.failures[0] = replace(world.gang.failures[0], time=lost)
        world.relaunched()
    world.join()
    world.settle()
    for step in (11, 12, 13):
        world.advance(1)
        world.make_step(step)
        world.settle()
    assert [recovery.failure_time for recovery in world.status.recoveries] == [lost, lost]
    assert reasons(world).count("Recovered") == 1


def test_spent_budget_is_named_before_the_end(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"maxRestarts": 1})
    world.start()
    while not world.status.is_terminal:
        world.fail()
        world.relaunched()
    world.settle()
    assert story(world)[-3:] == [
        ("Restarting", "attempt 2 failed: RankFailed (rank 1, exit code 1): failed"),
        ("ReachedMaxRestarts", "1 restart of at most 1 (maxRestarts)"),
        (
            "Failed",
            "failed: MaxRestartsReached: 1 restart of at most 1 (maxRestarts); "
            "attempt 2 failed: RankFailed (rank 1, exit code 1): failed",
        ),
    ]


def test_crash_loop_without_progress_is_told_as_one(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"maxRestartsWithoutProgress": 1})
    world.start()
    while not world.status.is_terminal:
        world.fail()
        world.relaunched()
    assert reasons(world)[-2:] == ["NoProgress", "Failed"]


def test_rule_that_ends_the_job_leaves_no_talk_of_a_restart(make_world: MakeWorld) -> None:
    rule = {"name": "bad", "action": "FailJob", "onExitCodes": {"operator": "In", "values": [3]}}
    world = make_world(failurePolicy={"rules": [rule]})
    world.start()
    world.fail(exit_code=3)
    world.settle()
    assert reasons(world) == ["PodsCreated", "PodsReady", "Failed"]
    assert "rule 'bad' ends the job on exit code 3; attempt 1 failed" in story(world)[-1][1]


def test_suspension_and_resumption_are_told(make_world: MakeWorld) -> None:
    world = make_world()
    world.start(staged=5)
    world.intent = Intent.STOP_NOW
    world.settle()
    world.settle()
    world.intent = Intent.RUN
    world.relaunched()
    assert story(world)[2:] == [
        ("Suspended", "suspended; it will go on from step 5"),
        ("Resumed", "the job goes on"),
        ("PodsCreated", "attempt 2 starts from step 5: 1 pod, run uid-2"),
    ]


def test_hang_is_told_with_the_restart_that_it_causes(make_world: MakeWorld) -> None:
    world = make_world(progressPolicy={"progressDeadlineSeconds": 30})
    world.start()
    world.advance(31)
    world.relaunched()
    assert reasons(world)[2:] == ["HangDetected", "Restarting", "PodsCreated"]


def test_hang_that_is_only_to_be_notified_is_told_once(make_world: MakeWorld) -> None:
    world = make_world(progressPolicy={"progressDeadlineSeconds": 30, "action": "Notify"})
    world.start()
    world.advance(31)
    for _ in range(5):
        world.settle()
        world.advance(5)
    assert reasons(world)[2:] == ["HangDetected"]


def test_storage_that_is_away_is_told_once_each_time(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"flushTimeoutSeconds": 5}, checkpoint={"maxStalenessSeconds": 20})
    world.start(staged=3)
    world.is_storage_down = True
    world.advance(21)
    world.settle()
    world.settle()
    assert story(world)[2:] == [("CheckpointStale", "no step was committed for 20 s (maxStalenessSeconds)")]
    world.fail()
    for _ in range(60):
        world.turn()
    assert reasons(world)[3:] == ["Restarting", "FlushTimedOut", "StorageUnavailable"]
    world.is_storage_down = False
    world.relaunched()
    assert reasons(world)[6:] == ["PodsCreated"]


def test_in_place_restart_is_told(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"restartStrategy": "InPlace"})
    world.start(staged=10)
    world.die(rank=1)
    world.advance(3)
    world.rejoin(restored_step=10)
    world.settle()
    world.make_step(11)
    world.settle()
    assert story(world)[2:] == [
        (
            "Restarting",
            "attempt 1: rank 1 on node-0 died; torchrun has started all ranks anew (restart 1 in place)",
        ),
        ("PodsReady", "all ranks are here"),
        ("CheckpointRestored", "all ranks restored step 10 from Memory"),
        ("Recovered", "training goes on 3 s after the failure of attempt 1, nothing lost"),
    ]


def test_older_step_than_planned_is_a_warning(make_world: MakeWorld) -> None:
    world = make_world()
    world.steps = {50: 1.0, 100: 2.0}
    world.launched()
    world.join(restored_step=50)
    world.settle()
    (restored,) = (event for event in told(world) if event.reason is EventReason.CHECKPOINT_RESTORED)
    assert restored.type == "Warning"
    assert restored.message.endswith("all ranks restored step 50 from Persistent, 50 steps lost")


def test_spec_that_makes_no_sense_is_told() -> None:
    before = Status()
    after = refuse(before, "spec.trainer.command: is required", 1.0)
    (event,) = events_of_refusal(before, after)
    assert (event.type, event.reason) == ("Warning", EventReason.FAILED)
    assert event.message == "failed: InvalidSpec: spec.trainer.command: is required"
    assert events_of_refusal(after, after) == ()


def test_steps_and_commits_are_no_events(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    for step in range(1, 200):
        world.advance(1)
        world.make_step(step)
        world.stage(step)
        world.persist("uid-1")
        world.look()
    assert Counter(reasons(world)) == {"PodsCreated": 1, "PodsReady": 1}
