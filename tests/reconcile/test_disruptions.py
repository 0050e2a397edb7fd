"""What is done to pods from outside, and what rules say of failures, in a fake world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stepfast_operator.observed import Failure, WorkerPhase
from stepfast_operator.policies.restart import judge
from stepfast_operator.record import Cause, ConditionType, FailedReason, State, Verdict
from stepfast_operator.spec import TrainingSpec

MakeWorld = Callable[..., Any]
MakeSpec = Callable[..., TrainingSpec]

DISRUPTED = (("PodScheduled", "True"), ("DisruptionTarget", "True"))
OOM = Failure(cause=Cause.OOM_KILLED, time=1.0, exit_code=137, reason="OOMKilled")
EVICTED = Failure(cause=Cause.POD_EVICTED, time=1.0, exit_code=143, reason="Evicted", pod_conditions=DISRUPTED)
CRASHED = Failure(cause=Cause.RANK_FAILED, time=1.0, exit_code=1, reason="Error")

ON_OOM = {"name": "oom", "action": "FailJob", "onReasons": ["OOMKilled"]}
ON_EXIT = {"name": "exit", "action": "FailJob", "onExitCodes": {"operator": "In", "values": [137, 143]}}
ON_DISRUPTION = {"name": "gone", "action": "RestartJob", "onPodConditions": [{"type": "DisruptionTarget"}]}
ON_SCHEDULED = {"name": "never", "action": "FailJob", "onPodConditions": [{"type": "PodScheduled", "status": "False"}]}


@pytest.mark.parametrize(
    ("rules", "failure", "verdict", "rule"),
    [
        pytest.param([], OOM, Verdict.RESTART, None, id="oom-counts"),
        pytest.param([], CRASHED, Verdict.RESTART, None, id="crash-counts"),
        pytest.param([], EVICTED, Verdict.RESTART_UNCOUNTED, None, id="eviction-never-counts"),
        pytest.param([], replace(EVICTED, cause=Cause.RANK_FAILED), Verdict.RESTART_UNCOUNTED, None, id="by-condition"),
        pytest.param([], replace(EVICTED, pod_conditions=()), Verdict.RESTART_UNCOUNTED, None, id="by-cause"),
        pytest.param([], Failure(cause=Cause.POD_DELETED, time=1.0), Verdict.RESTART_UNCOUNTED, None, id="deletion"),
        pytest.param([], Failure(cause=Cause.NODE_LOST, time=1.0), Verdict.RESTART_UNCOUNTED, None, id="node-lost"),
        pytest.param([ON_OOM], OOM, Verdict.FAIL, "oom", id="reason-of-the-container"),
        pytest.param([ON_OOM], replace(OOM, reason=None), Verdict.FAIL, "oom", id="reason-that-the-status-shows"),
        pytest.param([ON_OOM], CRASHED, Verdict.RESTART, None, id="other-reason"),
        pytest.param([ON_DISRUPTION], EVICTED, Verdict.RESTART, "gone", id="users-rule-before-the-built-in"),
        pytest.param([ON_SCHEDULED], EVICTED, Verdict.RESTART_UNCOUNTED, None, id="condition-with-another-status"),
        pytest.param([ON_DISRUPTION, ON_EXIT], EVICTED, Verdict.RESTART, "gone", id="first-match-wins"),
        pytest.param([ON_EXIT, ON_DISRUPTION], EVICTED, Verdict.FAIL, "exit", id="in-their-order"),
    ],
)
def test_rule_that_matches_first_decides_then_the_built_in_ones(
    make_spec: MakeSpec, rules: list[dict[str, Any]], failure: Failure, verdict: Verdict, rule: str | None
) -> None:
    judged = judge(make_spec(failurePolicy={"rules": rules}).failure_policy, failure)
    assert (judged.verdict, judged.rule) == (verdict, rule)


def test_rule_that_ends_the_job_says_on_what(make_world: MakeWorld) -> None:
    world = make_world(failurePolicy={"rules": [ON_OOM]})
    world.start()
    world.fail(exit_code=137)
    world.gang.failures[0] = replace(OOM, time=world.now, pod="job-1-0", node="node-0")
    world.settle()
    failed = world.status.condition(ConditionType.FAILED)
    assert (failed.reason, failed.message) == (
        FailedReason.FAILURE_POLICY,
        "rule 'oom' ends the job on reason OOMKilled",
    )
    assert (world.status.last_failure.reason, world.status.last_failure.pod) == (Cause.OOM_KILLED, "job-1-0")


@pytest.mark.parametrize("cause", [Cause.POD_EVICTED, Cause.POD_DELETED, Cause.NODE_LOST])
def test_disruption_ends_the_attempt_at_once_and_uses_no_restart(make_world: MakeWorld, cause: Cause) -> None:
    world = make_world(failurePolicy={"maxRestarts": 0})
    world.start(staged=10)
    world.advance(1)
    world.take_away(cause)
    failed = world.now
    world.relaunched()
    assert world.status.attempt == 2
    assert world.status.last_failure.reason is cause
    assert (world.status.restarts, world.status.restarts_count_towards_max) == (1, 0)
    assert not world.status.recoveries[-1].counted
    assert world.launch_of(2).resume_step == 10
    assert world.now - failed < 1, "a disruption after progress is not backed off"


def test_disruptions_without_progress_back_off_and_come_to_an_end(make_world: MakeWorld) -> None:
    limits = {"maxRestarts": 0, "maxRestartsWithoutProgress": 2, "backoff": {"baseSeconds": 4}}
    world = make_world(failurePolicy=limits)
    world.start()
    waits = []
    while not world.status.is_terminal:
        world.take_away(Cause.POD_EVICTED)
        failed = world.now
        world.relaunched()
        waits.append(world.now - failed)
    assert waits[:2] == pytest.approx([4, 8], abs=0.5)
    assert world.status.condition(ConditionType.FAILED).reason == FailedReason.NO_PROGRESS


def test_ranks_that_fail_because_a_pod_was_taken_away_are_not_blamed(make_world: MakeWorld) -> None:
    world = make_world(trainer={"command": ["torchrun", "t.py"], "numNodes": 2})
    world.start(staged=10)
    world.take_away(Cause.POD_EVICTED, node=1)
    world.advance(0.2)
    world.fail(rank=0)
    world.settle()
    assert world.status.last_failure.reason is Cause.POD_EVICTED
    assert world.status.last_failure.pod == "uid-1-1"


ON_ONE = {"name": "one", "action": "FailJob", "onExitCodes": {"operator": "In", "values": [1]}}
NONE_LEFT = {"maxRestarts": 0, "rules": [ON_ONE]}


@pytest.mark.parametrize("strategy", ["Recreate", "InPlace"])
def test_pod_that_vanished_while_nobody_looked_is_blamed_and_not_the_peer_that_failed_without_it(
    make_world: MakeWorld, strategy: str
) -> None:
    """A drain takes the operator and a pod along: the next operator finds the peer's failure, and no pod."""
    policy = {**NONE_LEFT, "restartStrategy": strategy}
    world = make_world(trainer={"command": ["torchrun", "t.py"], "numNodes": 2}, failurePolicy=policy)
    world.start(staged=10)
    world.fail(rank=0)
    failed = world.now
    world.advance(20)
    world.vanish(node=1)
    world.relaunched()
    last, recovery = world.status.last_failure, world.status.recoveries[-1]
    assert (last.reason, last.rank, last.exit_code, last.rule) == (Cause.POD_DELETED, None, None, None)
    assert last.message == "the pod of node index 1 is gone; seen first: rank 0 failed: failed"
    assert (last.failure_time, recovery.failure_time) == (failed, failed), "not after what came of it"
    assert (world.status.attempt, recovery.counted, world.status.restarts_count_towards_max) == (2, False, 0)


@pytest.mark.parametrize("cause", [Cause.OOM_KILLED, Cause.POD_EVICTED, Cause.NODE_LOST])
def test_failure_that_a_vanished_pod_cannot_have_caused_is_told_as_it_is(make_world: MakeWorld, cause: Cause) -> None:
    world = make_world(trainer={"command": ["torchrun", "t.py"], "numNodes": 2})
    world.start(staged=10)
    world.take_away(cause, node=0)
    world.advance(20)
    world.vanish(node=1)
    world.relaunched()
    assert (world.status.last_failure.reason, world.status.last_failure.node) == (cause, "node-0")


def test_pods_that_go_while_a_failed_gang_is_ended_change_nothing_of_why(make_world: MakeWorld) -> None:
    world = make_world(trainer={"command": ["torchrun", "t.py"], "numNodes": 2}, failurePolicy=NONE_LEFT)
    world.start(staged=10)
    world.fail(rank=0)
    world.look()
    world.vanish(node=1)
    world.settle()
    assert world.status.state is State.FAILED
    assert world.status.last_failure.reason is Cause.RANK_FAILED


def fail_by_a_lost_node(world: Any) -> None:
    """A node is lost; at first all that shows is that a rank elsewhere lost its peer, and a pod that does not end."""
    world.start(staged=10)
    world.fail(rank=0)
    with world.pods_that_stay():
        for _ in range(20):
            world.turn()
        assert world.status.last_failure.reason is Cause.RANK_FAILED
        assert len(world.launches) == 1
        world.take_away(Cause.NODE_LOST, node=1)
        world.gang.phases[1] = WorkerPhase.RUNNING
        world.turn()


def test_failure_of_a_rank_that_a_lost_node_turns_out_to_have_caused_is_not_counted(make_world: MakeWorld) -> None:
    world = make_world(trainer={"command": ["torchrun", "t.py"], "numNodes": 2}, failurePolicy={"maxRestarts": 0})
    fail_by_a_lost_node(world)
    world.relaunched()
    last, recovery = world.status.last_failure, world.status.recoveries[-1]
    assert (last.reason, last.pod, last.rank) == (Cause.NODE_LOST, "uid-1-1", None)
    assert last.message == "was taken away; seen first: rank 1 failed: failed".replace("rank 1", "rank 0")
    assert (recovery.cause, recovery.node, recovery.counted) == (Cause.NODE_LOST, "node-1", False)
    assert (world.status.attempt, world.status.restarts_count_towards_max) == (2, 0)


def test_lost_node_undoes_what_a_rule_made_of_the_rank_that_failed_first(make_world: MakeWorld) -> None:
    rules = [{"name": "any", "action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [0]}}]
    world = make_world(
        trainer={"command": ["torchrun", "t.py"], "numNodes": 2}, failurePolicy={"maxRestarts": 0, "rules": rules}
    )
    fail_by_a_lost_node(world)
    world.relaunched()
    assert world.status.attempt == 2
    assert world.status.last_failure.rule is None
    assert [recovery.cause for recovery in world.status.recoveries] == [Cause.NODE_LOST]


def test_next_attempt_waits_for_every_pod_of_the_one_before_it(make_world: MakeWorld) -> None:
    """Pods that are slow to end delay the launch, and nothing else does."""
    world = make_world()
    fail_by_a_lost_node(world)
    world.gangs["uid-1"].lives = True
    stop = world.stop

    async def refuse_to_end(runs: Any, mode: Any) -> None:
        """The node does not answer: the pods stay."""

    world.stop = refuse_to_end
    for _ in range(50):
        world.turn()
    assert len(world.launches) == 1
    world.stop = stop
    world.gangs["uid-1"].lives = False
    freed = world.now
    world.relaunched()
    assert len(world.launches) == 2
    assert world.now - freed < 0.5
    assert world.status.state is State.STARTING
