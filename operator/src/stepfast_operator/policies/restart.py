"""Whether an attempt has failed, what follows, and whether the budget allows another. Pure.

Counting: `maxRestarts` limits counted restarts over the job's life. `maxRestartsWithoutProgress` limits
restarts in a row between which no newer step was committed: the first of them waits for baseSeconds, each
further one for twice as long. A restart after progress comes at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import assert_never

from stepfast_operator.failurepolicy import Backoff, FailurePolicy, Rule, RuleAction
from stepfast_operator.observed import DeadRank, Failure, Observed, WorkerPhase
from stepfast_operator.policies import exclusion, inplace
from stepfast_operator.record import NO_FAILURES, Cause, FailedReason, Status, Verdict
from stepfast_operator.sentences import with_seen_first

# torchrun tells the exit code within milliseconds; only when it cannot is the agent's word alone taken for a
# death.
DEAD_RANK_GRACE_SECONDS = 2.0
# Within this its kubelet has told of what a rank died whose peers failed because of it.
UNTOLD_SECONDS = 3.0

# Not the training's fault: neither counted nor backed off.
UNCOUNTED = frozenset({Cause.SUPERVISOR_RESTARTED, Cause.SUSPENDED}) | NO_FAILURES
# Done to a gang from outside: never counted towards maxRestarts, backed off only without progress.
DISRUPTIONS = frozenset({Cause.POD_DELETED, Cause.POD_EVICTED, Cause.NODE_LOST, Cause.EVICTION_NOTICE})
# How a worker ends whose peer was taken away, seen from itself.
PEERS_FAIL_WITH = frozenset({Cause.RANK_FAILED, Cause.WORKER_FAILED})
_DISRUPTED = ("DisruptionTarget", "True")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """`excludes`: whether the rule keeps the next attempts off the node."""

    verdict: Verdict
    rule: str | None = None
    excludes: bool = False
    fail_message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """`denied` says why there is no further attempt."""

    without_progress: int
    counted: bool
    denied: FailedReason | None = None
    message: str = ""


def failure_of(observed: Observed) -> Failure | None:
    """The first failure of the current gang, if any: the first failed rank ends the attempt for all."""
    failures = [_dated(observed, failure) for failure in _worker_failures(observed)]
    unhealthy = exclusion.unhealthy_of(observed)
    if failures:
        earliest = min(failures, key=lambda failure: failure.time)
        return None if _untold(observed, earliest.time) else _blamed(earliest, failures, unhealthy)
    if unhealthy is not None:
        return unhealthy
    dead = [rank for rank in _dead_ranks(observed) if observed.now - rank.ended_time >= DEAD_RANK_GRACE_SECONDS]
    if not dead:
        return None
    first = min(dead, key=lambda rank: rank.ended_time)
    return Failure(
        cause=Cause.RANK_FAILED,
        time=first.ended_time,
        node=first.node,
        rank=first.rank,
        message="its process is gone; nobody saw its exit status",
    )


def _blamed(earliest: Failure, failures: Iterable[Failure], unhealthy: Failure | None) -> Failure:
    """A pod that vanished, or a node that is ill, if there is one, where ranks seem to have failed first: either is
    dated when it was noticed, after the peers that failed because of it. What else befell a pod has its cause in that
    pod.
    """
    gone = next((failure for failure in failures if failure.is_vanished_pod), unhealthy)
    if gone is None or earliest.cause not in PEERS_FAIL_WITH or earliest.node == gone.node:
        return earliest
    return replace(gone, time=earliest.time, message=with_seen_first(gone.message, earliest))


def _untold(observed: Observed, time: float) -> list[DeadRank]:
    """The ranks that died before that time, a moment ago, in pods that have yet to say of what: what is known by then
    may be no more than how their peers took it.
    """
    current, gang = observed.status.current, observed.gang
    if current is None or gang is None:
        return []
    silent = {worker.node for worker in gang.workers if worker.failure is None and worker.phase is WorkerPhase.RUNNING}
    return [
        rank
        for rank in inplace.untold_ranks(observed, current.run)
        if rank.node in silent and rank.ended_time < time and observed.now - rank.ended_time < UNTOLD_SECONDS
    ]


def next_check_seconds(observed: Observed) -> float | None:
    """When a dead rank, of which nothing else is known yet, becomes a failure, or is waited for no more."""
    waits = [rank.ended_time + DEAD_RANK_GRACE_SECONDS - observed.now for rank in _dead_ranks(observed)]
    waits += [rank.ended_time + UNTOLD_SECONDS - observed.now for rank in _untold(observed, observed.now)]
    return max(0.0, min(waits)) if waits else None


def _dead_ranks(observed: Observed) -> list[DeadRank]:
    """Dead ranks that nobody will start anew."""
    current = observed.status.current
    if current is None or inplace.may_follow(observed, current.run):
        return []
    return inplace.dead_ranks(observed, current.run)


def judge(policy: FailurePolicy, failure: Failure) -> Judgement:
    """What the failure rules say: the first of the user's that matches, then the built-in ones.

    Built in: what was done to a pod from outside is not the training's fault. All else restarts the gang, and counts.
    """
    if failure.cause in UNCOUNTED:
        return Judgement(verdict=Verdict.RESTART_UNCOUNTED)
    for rule in policy.rules:
        matched = _match(rule, failure)
        if matched is not None:
            return _apply(rule, matched)
    return Judgement(verdict=Verdict.RESTART_UNCOUNTED if is_disruption(failure) else Verdict.RESTART)


def is_disruption(failure: Failure) -> bool:
    """Whether the pod was taken away, rather than failed."""
    return failure.cause in DISRUPTIONS or _DISRUPTED in failure.pod_conditions


def _match(rule: Rule, failure: Failure) -> str | None:
    """What the rule matches of the failure, in words; None when nothing."""
    code = failure.exit_code
    if rule.on_exit_codes is not None:
        return f"exit code {code}" if code is not None and rule.on_exit_codes.matches(code) else None
    for what, wanted, found in (
        ("pod", rule.on_pod_conditions, failure.pod_conditions),
        ("node", rule.on_node_conditions, failure.node_conditions),
    ):
        pairs = [(one.type, one.status) for one in wanted]
        matched = next((pair for pair in pairs if pair in found), None)
        if matched is not None:
            return f"{what} condition {'='.join(matched)}"
    # The status shows the cause: whoever copies that word into a rule means it.
    reasons = (failure.reason, str(failure.cause))
    return next((f"reason {wanted}" for wanted in rule.on_reasons if wanted in reasons), None)


def _apply(rule: Rule, matched: str) -> Judgement:
    judgement = Judgement(verdict=Verdict.RESTART, rule=rule.name, excludes=rule.exclude_node)
    match rule.action:
        case RuleAction.FAIL_JOB:
            message = f"rule {rule.name!r} ends the job on {matched}"
            return replace(judgement, verdict=Verdict.FAIL, fail_message=message)
        case RuleAction.RESTART_JOB:
            return judgement
        case RuleAction.RESTART_IGNORING_MAX:
            return replace(judgement, verdict=Verdict.RESTART_UNCOUNTED)
        case _:
            assert_never(rule.action)


def budget_of(policy: FailurePolicy, status: Status, cause: Cause, newest_committed: int | None) -> Budget:
    """Whether another attempt may follow one that ended for this cause."""
    current = status.current
    counted = cause not in UNCOUNTED and current is not None and current.verdict is Verdict.RESTART
    without = status.restarts_without_progress
    if has_progress(status, newest_committed):
        without = 0
    elif cause not in UNCOUNTED:
        without += 1
    budget = Budget(without_progress=without, counted=counted)
    if counted and status.restarts_count_towards_max >= policy.max_restarts:
        message = f"{_restarts(status.restarts_count_towards_max)} of at most {policy.max_restarts} (maxRestarts)"
        return replace(budget, denied=FailedReason.MAX_RESTARTS_REACHED, message=message)
    if cause not in UNCOUNTED and without > policy.max_restarts_without_progress:
        message = (
            f"{_restarts(without - 1)} in a row brought no newer committed step; at most "
            f"{policy.max_restarts_without_progress} may (maxRestartsWithoutProgress)"
        )
        return replace(budget, denied=FailedReason.NO_PROGRESS, message=message)
    return budget


def _restarts(count: int) -> str:
    return "1 restart" if count == 1 else f"{count} restarts"


def has_progress(status: Status, newest_committed: int | None) -> bool:
    """Whether a newer step is committed than when the last attempt was planned, or one in place of a damaged one."""
    if newest_committed is None:
        return False
    if status.progress_step is None or newest_committed > status.progress_step:
        return True
    return has_replaced(status, newest_committed)


def has_replaced(status: Status, newest_committed: int) -> bool:
    """Whether the last attempt, which had to go back, committed a step in place of those that it could not restore.

    While one of those is still the newest, nothing was committed: the first save marks them superseded.
    """
    current = status.current
    return current is not None and current.went_back and current.start_step < newest_committed < current.resume_step


def backoff_seconds(backoff: Backoff, without_progress: int) -> float:
    """How long after the failure the next attempt may start."""
    if without_progress == 0:
        return 0.0
    # The exponent is bounded so that a large budget cannot overflow.
    return min(backoff.max_seconds, backoff.base_seconds * 2.0 ** min(without_progress - 1, 60))


def _worker_failures(observed: Observed) -> list[Failure]:
    gang = observed.gang
    if gang is None:
        return []
    is_healed = inplace.may_follow(observed, gang.run)
    found = []
    for worker in gang.workers:
        if worker.failure is not None:
            is_rank = worker.phase is WorkerPhase.RUNNING and worker.failure.cause is Cause.RANK_FAILED
            failure = replace(worker.failure, node_conditions=worker.condition_pairs)
            found += [] if is_rank and is_healed else [failure]
        elif worker.phase is WorkerPhase.FAILED:
            found.append(
                Failure(
                    cause=Cause.WORKER_FAILED,
                    time=observed.now,
                    node=worker.node,
                    pod=worker.pod,
                    message="it ended in failure",
                )
            )
    return found


def _dated(observed: Observed, failure: Failure) -> Failure:
    """The failure with the best known time: the agent saw the connection end before torchrun polled. Clocks of several
    machines told of it, and it is never yet to come.
    """
    dead = inplace.dead_ranks(observed, observed.gang.run) if observed.gang is not None else []
    times = [rank.ended_time for rank in dead if rank.rank == failure.rank]
    return replace(failure, time=min([failure.time, observed.now, *times]))
