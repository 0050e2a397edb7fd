"""`stepfast explain`: what is said of jobs in each state, and of what bounds them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lives import BEGIN, UID, attempt, recovery, suspended, training
from stepfast.step import JobKey
from stepfast_operator.backends.statefolder import Invocation, StateFolder
from stepfast_operator.explanation import Surroundings, explain
from stepfast_operator.limits import Limits, limits_of
from stepfast_operator.record import (
    Cause,
    CheckpointStatus,
    Condition,
    ConditionType,
    ExcludedNode,
    FailedReason,
    LastFailure,
    Leaving,
    Nodes,
    SparedNode,
    State,
    Status,
    Verdict,
)
from stepfast_operator.spec import parse_manifest

NOW = BEGIN + 1000


def limits(**spec: Any) -> Limits:
    manifest = {
        "apiVersion": "stepfast.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "gpt"},
        "spec": {"trainer": {"command": ["torchrun", "train.py"]}, **spec},
    }  # fmt: skip
    return limits_of(parse_manifest(manifest, default_namespace="team").spec)


def told(
    status: Status, bounds: Limits | None = None, seen: Surroundings | None = None, now: float = NOW
) -> dict[str, list[str]]:
    paragraphs = explain(status, bounds, seen or Surroundings(), now)
    return {paragraph.heading: list(paragraph.sentences) for paragraph in paragraphs}


def ended(**values: Any) -> Status:
    """Attempt 2 failed 4 s ago, the third has not begun."""
    over = attempt(2, 306, resume_step=90, newest_step=200, ended_time=NOW - 4, verdict=Verdict.RESTART, **values)
    failure = LastFailure(attempt=2, failure_time=NOW - 5, reason=Cause.RANK_FAILED, rank=3, exit_code=1)
    recoveries = (
        recovery(1, 300, counted=False),
        recovery(2, 995, resumed_time=None, duration_seconds=None, cause=Cause.RANK_FAILED),
    )
    return replace(
        training(), state=State.RESTARTING, attempt=2, restarts=1, restarts_count_towards_max=0, current=over,
        last_failure=failure, recoveries=recoveries,
        checkpoint=CheckpointStatus(latest_persisted_step=190, latest_persisted_time=NOW - 60),
    )  # fmt: skip


def starting(**values: Any) -> Status:
    """Attempt 3 was planned 40 s ago, and not all ranks are here."""
    return replace(
        training(), state=State.STARTING, nodes=Nodes(desired=4, ready=1, active=4),
        current=attempt(3, 960, resume_step=190), trainer_status=replace(training().trainer_status, global_step=190),
        **values,
    )  # fmt: skip


def leaving(why: Leaving) -> Status:
    """The first attempt trains, and is to save and to end."""
    return replace(
        training(), state=State.RESTARTING, attempt=1, restarts=0, recoveries=(), last_failure=None,
        current=attempt(1, 5, pods_ready_time=BEGIN + 10, first_step_time=BEGIN + 12, leaving=why),
    )  # fmt: skip


def test_training_job_tells_all_of_it() -> None:
    said = told(training(), limits(activeDeadlineSeconds=7200))
    assert said == {
        "now": ["attempt 3 trains: step 260, 0.50 steps/s"],
        "why it restarted": [
            "attempt 1 failed: NodeLost (node-2), 11.7 min ago",
            "attempt 2 failed: RankFailed (rank 3, exit code 1), 5.0 min ago",
        ],
        "what that cost": [
            "20 steps had to be made again, in 2 restarts",
            "the last recovery took 1.0 min, most of it to schedule (45 s); 10 steps lost",
            "goodput 83.9%: that share of the time that it was active went into training that is kept",
        ],
        "what comes next": [
            "unless a new step is made within 9.9 min, the gang is restarted (progressDeadlineSeconds)",
            "unless it is complete within 1.7 h, the job fails for good (activeDeadlineSeconds)",
            "8 more restarts of 10 may follow failures (maxRestarts)",
            "after a failure now it would go on from step 250, at most 10 steps lost",
        ],
    }


STALE = Condition(type=ConditionType.FITS_MEMORY, status="False", reason="TooSmall", message="no node has 80 GiB")
PENDING = Condition(
    type=ConditionType.PODS_READY, status="False", reason="PodsPending", message="still pending: gpt-3-1 (no room)"
)
NOTICE = Leaving(
    cause=Cause.EVICTION_NOTICE, begin_time=NOW - 2, save_until_time=NOW + 20, node="node-1", message="node-1 is to go"
)
RESIZE = Leaving(
    cause=Cause.RESIZED, begin_time=NOW - 2, save_until_time=NOW - 1, nodes=3, message="there is place for 3 nodes"
)
SPARED = SparedNode(name="node-3", reason="it failed twice", limit="2 nodes are kept off, at most 2 may be")
EXCLUDED = ExcludedNode(name="node-2", reason="it failed twice", since_time=BEGIN, until_time=BEGIN + 3600)
WAITS: dict[str, tuple[Status, Mapping[str, Any], Surroundings, list[str]]] = {
    "pods that may be read": (
        starting(), {}, Surroundings(pending=("gpt-3-1: Unschedulable: 0/3 nodes are available",)),
        ["for pod gpt-3-1: Unschedulable: 0/3 nodes are available"],
    ),
    "many pods": (
        starting(), {}, Surroundings(pending=tuple(f"gpt-3-{index}" for index in range(9))),
        [*(f"for pod gpt-3-{index}" for index in range(5)), "and for 4 more pods"],
    ),
    "pods that only the operator has seen": (
        starting(conditions=(PENDING,)), {}, Surroundings(), ["still pending: gpt-3-1 (no room)"],
    ),
    "pods that some nodes are kept from": (
        starting(excluded_nodes=(EXCLUDED,)), {}, Surroundings(pending=("gpt-3-1: Unschedulable",)),
        ["for pod gpt-3-1: Unschedulable", "node node-2 is kept off until 2027-01-15T09:00:00Z: it failed twice"],
    ),
    "pods, of which one is on a node that would be kept off": (
        starting(spared_nodes=(SPARED,)), {}, Surroundings(pending=("gpt-3-1: Unschedulable",)),
        [
            "for pod gpt-3-1: Unschedulable",
            "node node-3 is not kept off (it failed twice): 2 nodes are kept off, at most 2 may be",
        ],
    ),
    "a last checkpoint before a node goes": (
        leaving(NOTICE), {}, Surroundings(), ["for a last checkpoint to be committed, for at most 20 s more"],
    ),
    "a last checkpoint before it grows, for long": (
        leaving(RESIZE), {}, Surroundings(), ["for a last checkpoint to be committed"],
    ),
    "ranks": (starting(), {}, Surroundings(), ["for all ranks to join"]),
    "flush": (
        ended(), {}, Surroundings(),
        ["for what attempt 2 has staged to be persisted, for at most 1.9 min more (flushTimeoutSeconds)"],
    ),
    "flush whose time is over": (
        ended(), {"failurePolicy": {"flushTimeoutSeconds": 1}}, Surroundings(),
        ["for what attempt 2 has staged to be persisted; flushTimeoutSeconds are over"],
    ),
    "storage": (
        replace(ended(flushed_time=NOW - 3), checkpoint=CheckpointStatus(storage_error="no route to host")), {},
        Surroundings(), ["for the storage: no route to host"],
    ),
    "persisting": (
        replace(training(), checkpoint=CheckpointStatus(persist_error="the disk is full")), {}, Surroundings(),
        ["for the storage to take what is staged: the disk is full"],
    ),
    "memory": (
        Status(conditions=(STALE,)), {}, Surroundings(), ["for a place that it fits: no node has 80 GiB"],
    ),
    "a last checkpoint": (
        replace(training(), state=State.SUSPENDING, current=attempt(3, 705, suspending_time=NOW - 10)), {},
        Surroundings(), ["for a last checkpoint to be committed, for at most 50 s more (gracefulSuspendSeconds)"],
    ),
    "the last steps": (
        replace(training(), current=replace(training().current or attempt(3, 705), succeeded_time=NOW - 1)), {},
        Surroundings(), ["for the last steps to be persisted: every worker has succeeded"],
    ),
    "an operator": (
        Status(), {}, Surroundings(notes=(("operator", "has not looked at this job yet, 20 s after it was made"),)),
        ["operator: has not looked at this job yet, 20 s after it was made"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WAITS)
def test_what_is_waited_for_is_said(name: str) -> None:
    status, spec, seen, sentences = WAITS[name]
    assert told(status, limits(**spec), seen)["what it waits for"] == sentences


NEXT: dict[str, tuple[Status, Mapping[str, Any], list[str]]] = {
    "nothing has begun": (Status(), {}, ["attempt 1 begins when nothing stands in its way"]),
    "backoff": (
        replace(ended(flushed_time=NOW - 3), restarts_without_progress=2, progress_step=190), {},
        [
            "attempt 3 starts as soon as nothing stands in its way, from step 190",
            "10 more restarts of 10 may follow failures (maxRestarts)",
            "2 restarts in a row brought no newer committed step, at most 3 may (maxRestartsWithoutProgress)",
        ],
    ),
    "longer backoff": (
        replace(ended(flushed_time=NOW - 3), restarts_without_progress=2, progress_step=190),
        {"failurePolicy": {"maxRestarts": 0, "backoff": {"baseSeconds": 10}}},
        [
            "attempt 3 starts in 36 s, when the backoff is over, from step 190",
            "the next failure that counts ends the job: all 0 restarts are used (maxRestarts)",
            "2 restarts in a row brought no newer committed step, at most 3 may (maxRestartsWithoutProgress)",
        ],
    ),
    "starting": (
        starting(), {"startupDeadlineSeconds": 100},
        [
            "unless all ranks are here within 1.0 min, the job fails for good (startupDeadlineSeconds)",
            "8 more restarts of 10 may follow failures (maxRestarts)",
        ],
    ),
    "queued": (
        replace(starting(), current=attempt(3, 960, queued_time=NOW - 30)), {"activeDeadlineSeconds": 1000},
        [
            "while the gang waits in its queue no deadline runs: it starts once it is admitted as a whole",
            "8 more restarts of 10 may follow failures (maxRestarts)",
        ],
    ),
    "admitted by its queue": (
        replace(
            starting(), current=attempt(3, 500, queued_time=NOW - 400, dequeued_time=NOW - 10), queued_seconds=390.0
        ),
        {"startupDeadlineSeconds": 40, "activeDeadlineSeconds": 1000},
        [
            "unless all ranks are here within 30 s, the job fails for good (startupDeadlineSeconds)",
            "unless it is complete within 6.5 min, the job fails for good (activeDeadlineSeconds)",
            "8 more restarts of 10 may follow failures (maxRestarts)",
        ],
    ),
    "promised freshness, hangs that are only told": (
        training(),
        {
            "checkpoint": {"maxStalenessSeconds": 30},
            "progressPolicy": {"action": "Notify", "progressDeadlineSeconds": 3},
        },
        [
            "unless a new step is made at once, the gang is said to hang (progressDeadlineSeconds)",
            "unless a step is committed at once, CheckpointFresh is False (maxStalenessSeconds)",
            "8 more restarts of 10 may follow failures (maxRestarts)",
            "after a failure now it would go on from step 250, at most 10 steps lost",
        ],
    ),
    "never resumed": (
        training(), {"checkpoint": {"resumePolicy": "Never"}},
        [
            "unless a new step is made within 9.9 min, the gang is restarted (progressDeadlineSeconds)",
            "8 more restarts of 10 may follow failures (maxRestarts)",
            "after a failure now it would go on from scratch (resumePolicy: Never), at most 260 steps lost",
        ],
    ),
    "a node that is about to go": (
        leaving(NOTICE), {}, ["attempt 2 starts on other nodes once this one has saved and ended"],
    ),
    "another size": (leaving(RESIZE), {}, ["attempt 2 starts with 3 nodes once this one has saved and ended"]),
    "suspended": (
        suspended(), {}, ["it stays so until it is resumed; then it goes on from scratch: nothing is committed"],
    ),
    "over, to be deleted": (
        replace(training(), state=State.COMPLETE, terminal_state="Complete", completion_time=NOW - 60),
        {"ttlSecondsAfterFinished": 3600},
        [
            "it is never run again; a job of the same name goes on from step 250",
            "it is deleted in 59.0 min (ttlSecondsAfterFinished)",
        ],
    ),
    "over for nothing": (
        Status(state=State.FAILED, terminal_state="Failed"), {}, ["it is never run again; nothing was committed"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEXT)
def test_what_comes_next_is_said_with_when(name: str) -> None:
    status, spec, sentences = NEXT[name]
    assert told(status, limits(**spec))["what comes next"] == sentences


STATES: dict[str, tuple[Status, str]] = {
    "new": (Status(), "no attempt has begun"),
    "starting": (starting(), "attempt 3 starts from step 190, planned 40 s ago"),
    "between attempts": (ended(), "attempt 2 has ended 4.0 s ago; the next one is due"),
    "leaving": (leaving(NOTICE), "attempt 1 saves and leaves: node-1 is to go"),
    "suspending": (replace(training(), state=State.SUSPENDING), "attempt 3 is ending, as asked"),
    "suspended": (suspended(), "suspended: nothing of it runs"),
    "resumed": (replace(suspended(), state=State.PENDING), "asked to go on, and no attempt has begun since"),
    "failed": (
        replace(
            training(), state=State.FAILED, terminal_state="Failed", completion_time=NOW - 90,
            current=attempt(3, 705, fail_reason=FailedReason.NO_PROGRESS, fail_message="3 restarts in a row"),
        ),
        "failed: NoProgress: 3 restarts in a row, 1.5 min ago",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_state_is_said_in_one_sentence(name: str) -> None:
    status, sentence = STATES[name]
    assert told(status)["now"] == [sentence]


def test_restarts_that_are_not_remembered_are_counted() -> None:
    said = told(replace(training(), restarts=9))["why it restarted"]
    assert said[0] == "7 older restarts, of which no more is remembered"


def test_rule_and_uncounted_restarts_are_named() -> None:
    failure = LastFailure(
        attempt=1, failure_time=NOW - 700, reason=Cause.POD_EVICTED, node="node-2", pod="gpt-1-0", rule="spot",
        action="RestartJobAndIgnoreMaxRestarts",
    )  # fmt: skip
    status = replace(training(), restarts=1, last_failure=failure, recoveries=(recovery(1, 300, counted=False),))
    assert told(status)["why it restarted"] == [
        "attempt 1 failed: PodEvicted (gpt-1-0 on node-2), 11.7 min ago; rule spot says "
        "RestartJobAndIgnoreMaxRestarts; not counted towards maxRestarts"
    ]


@pytest.mark.parametrize(
    ("action", "ending"),
    [("RestartJob", ""), ("RestartJobAndIgnoreMaxRestarts", "; not counted towards maxRestarts")],
)
def test_last_failure_counts_or_not_whatever_was_survived_in_place_before(action: str, ending: str) -> None:
    failure = LastFailure(attempt=1, failure_time=NOW - 60, reason=Cause.RANK_FAILED, rank=1, action=action)
    in_place = recovery(1, 300, in_place_restart=1, cause=Cause.RANK_FAILED, rank=1, counted=False)
    status = replace(
        training(), state=State.FAILED, terminal_state="Failed", attempt=1, restarts=0,
        current=attempt(1, 5, ended_time=NOW - 60, fail_reason=FailedReason.MAX_RESTARTS_REACHED),
        last_failure=failure, recoveries=(in_place,),
    )  # fmt: skip
    assert told(status)["why it restarted"] == [
        "attempt 1: RankFailed (rank 1), 11.7 min ago; torchrun started all ranks anew (restart 1 in place)",
        f"attempt 1 failed: RankFailed (rank 1), 1.0 min ago{ending}",
    ]


def test_restart_in_place_is_told_apart() -> None:
    status = replace(
        training(), restarts=0, last_failure=None,
        recoveries=(recovery(1, 300, in_place_restart=2, cause=Cause.RANK_FAILED, rank=1),),
    )  # fmt: skip
    assert told(status)["why it restarted"] == [
        "attempt 1: RankFailed (rank 1), 11.7 min ago; torchrun started all ranks anew (restart 2 in place)"
    ]


def test_job_without_a_failure_says_so_and_paragraphs_without_a_sentence_are_left_out() -> None:
    status = replace(training(), restarts=0, steps_lost=0, last_failure=None, recoveries=())
    said = told(status)
    assert said["why it restarted"] == ["it has not restarted"]
    assert "what it waits for" not in said
    assert [sentence for sentence in said["what that cost"] if "restart" in sentence] == []


def test_job_that_leaves_for_the_first_time_says_so() -> None:
    assert told(leaving(NOTICE))["why it restarted"] == ["it is about to, for the first time"]


def test_command_tells_a_job_of_this_machine_with_the_limits_of_its_command(stepfast: Any) -> None:
    state = StateFolder(Path.cwd() / ".stepfast" / "jobs", JobKey(namespace="team", name="gpt"))
    state.path.mkdir(parents=True)
    state.write(UID, training())
    state.write_invocation(Invocation(folder="/there", limits=limits(failurePolicy={"maxRestarts": 3})))
    result = stepfast("explain", "gpt")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[:3] == ["team/gpt (this machine)", "now", "  - attempt 3 trains: step 260, 0.50 steps/s"]
    assert "  - 1 more restart of 3 may follow failures (maxRestarts)" in lines
    assert "process: none: `stepfast run` was ended from outside" in result.output
    document = json.loads(stepfast("explain", "gpt", "--json").stdout)
    assert document["where"]["kind"] == "Machine"
    assert document["paragraphs"][0] == {"heading": "now", "sentences": [lines[2].removeprefix("  - ")]}


def test_job_run_by_a_version_that_noted_no_limits_is_told_without_them(stepfast: Any) -> None:
    state = StateFolder(Path.cwd() / ".stepfast" / "jobs", JobKey(namespace="team", name="gpt"))
    state.path.mkdir(parents=True)
    state.write(UID, training())
    state.write_invocation(Invocation(folder="/there"))
    result = stepfast("explain", "gpt")
    assert result.exit_code == 0
    assert "maxRestarts" not in result.output
