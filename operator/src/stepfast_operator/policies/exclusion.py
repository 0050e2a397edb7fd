"""Which nodes the gang keeps off: those that are known to be ill, for as long as they are, and those on which the job
failed too often, for a while. Pure.

The circuit breaker: a fault that is everywhere is none of the nodes'. Never are more nodes excluded than the policy
says, nor so many that too few are left for the gang; the status tells which ones are spared for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stepfast_operator.failurepolicy import FailurePolicy, NodeExclusionPolicy
from stepfast_operator.observed import Failure, NodeCondition, Observed, Worker, WorkerPhase
from stepfast_operator.record import MAX_NODE_FAULTS, Cause, ExcludedNode, NodeFault, SparedNode, Status
from stepfast_operator.sentences import count_text

# What speaks against the node that it happened on. Who takes a pod away says nothing of it, a hang has no place, and
# a container that takes too much memory does so everywhere.
_FAULTS = frozenset({Cause.RANK_FAILED, Cause.WORKER_FAILED, Cause.NODE_LOST, Cause.NODE_UNHEALTHY})


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """The nodes that the next attempts keep off, and those that they would have to if it were not for the limits."""

    excluded: tuple[ExcludedNode, ...] = ()
    spared: tuple[SparedNode, ...] = ()


def is_asked(status: Status, policy: FailurePolicy) -> bool:
    """Whether the next attempt depends on which nodes there are."""
    return bool(status.node_faults or status.excluded_nodes or wanted_conditions(policy))


# ---------------------------------------------------------------- nodes that are ill


def wanted_conditions(policy: FailurePolicy) -> frozenset[tuple[str, str]]:
    """The conditions of nodes that some rule asks about, by type and status."""
    return frozenset((wanted.type, wanted.status) for rule in policy.rules for wanted in rule.on_node_conditions)


def unhealthy_of(observed: Observed) -> Failure | None:
    """The first node of the gang that a rule is about, as a failure, though nothing may have failed there yet."""
    gang = observed.gang
    if gang is None:
        return None
    found = [
        _unhealthy(worker, condition, gang.launched_time)
        for worker in gang.workers
        if worker.phase is not WorkerPhase.SUCCEEDED
        for condition in worker.node_conditions
    ]
    return min(found, key=lambda failure: failure.time, default=None)


def _unhealthy(worker: Worker, condition: NodeCondition, launched: float) -> Failure:
    return Failure(
        cause=Cause.NODE_UNHEALTHY,
        time=max(condition.since, launched),  # a node of the gang before that was none
        node=worker.node,
        pod=worker.pod,
        node_conditions=worker.condition_pairs,
        message=f"node {worker.node} has {condition}",
    )


def avoided(observed: Observed) -> tuple[str, ...]:
    """The names of the nodes that pods which are made now must not go to."""
    if observed.nodes is None:
        return ()
    unfit = [node.name for node in observed.nodes if not node.is_fit]
    excluded = [node.name for node in observed.status.excluded_nodes if node.until_time > observed.now]
    return tuple(sorted({*unfit, *excluded}))


def available(observed: Observed) -> frozenset[str]:
    """The names of the nodes that pods which are made now may go to, as far as anything depends on them."""
    return frozenset(node.name for node in observed.nodes or ()).difference(avoided(observed))


# ---------------------------------------------------------------- nodes on which the job fails


def with_fault(status: Status, attempt: int, failure: Failure, rule: str | None, policy: NodeExclusionPolicy) -> Status:
    """Remembers what the attempt's end says of a node, in place of what it was taken for before. `rule`: the one that
    excludes the node from the first time.
    """
    oldest = failure.time - policy.ttl_seconds
    faults = [fault for fault in status.node_faults if fault.attempt != attempt and fault.fault_time > oldest]
    if failure.node is not None and (failure.cause in _FAULTS or rule is not None):
        fault = NodeFault(node=failure.node, attempt=attempt, fault_time=failure.time, reason=failure.cause, rule=rule)
        faults.append(fault)
    return replace(status, node_faults=tuple(faults[-MAX_NODE_FAULTS:]))


def exclusion_of(observed: Observed) -> Exclusion:
    """Which nodes are to be excluded from now on. Those that are stay so until their time is over, or until too few
    others are left: then the oldest go first.
    """
    policy, now = observed.spec.node_exclusion_policy, observed.now
    if observed.nodes is None:
        return Exclusion()
    excluded = [node for node in observed.status.excluded_nodes if node.until_time > now]
    excluded = excluded[max(0, len(excluded) - policy.max_excluded_nodes) :]
    while excluded and _left(observed, excluded) < _needed(observed):
        del excluded[0]
    spared = []
    for suspect in _suspects(observed):
        if any(node.name == suspect.name for node in excluded):
            continue
        limit = _limit(observed, excluded, suspect)
        if limit is None:
            excluded.append(suspect)
        else:
            spared.append(SparedNode(name=suspect.name, reason=suspect.reason, limit=limit))
    return Exclusion(excluded=tuple(excluded), spared=tuple(spared))


def _suspects(observed: Observed) -> list[ExcludedNode]:
    """The nodes that would have to be excluded, the one that failed last first."""
    policy, now = observed.spec.node_exclusion_policy, observed.now
    by_node: dict[str, list[NodeFault]] = {}
    for fault in reversed(observed.status.node_faults):
        if fault.fault_time > now - policy.ttl_seconds:
            by_node.setdefault(fault.node, []).append(fault)
    return [
        ExcludedNode(name=name, reason=reason, since_time=now, until_time=now + policy.ttl_seconds)
        for name, faults in by_node.items()
        if (reason := _reason(faults, policy)) is not None
    ]


def _reason(faults: Sequence[NodeFault], policy: NodeExclusionPolicy) -> str | None:
    """Why the node of these faults, newest first, is to be excluded; None when it is not."""
    rule = next((fault.rule for fault in faults if fault.rule is not None), None)
    if rule is not None:
        return f"rule {rule!r} excludes it"
    if len(faults) < policy.max_failures_per_node:
        return None
    causes = ", ".join(dict.fromkeys(str(fault.reason) for fault in faults))
    return f"{count_text(len(faults), 'failure')} there: {causes}"


def _limit(observed: Observed, excluded: Sequence[ExcludedNode], suspect: ExcludedNode) -> str | None:
    """What stands against excluding that node, too."""
    most = observed.spec.node_exclusion_policy.max_excluded_nodes
    if len(excluded) >= most:
        return f"at most {count_text(most, 'node')} may be excluded (maxExcludedNodes)"
    left, needed = _left(observed, [*excluded, suspect]), _needed(observed)
    return f"{left} of the {needed} nodes that the gang needs would be left" if left < needed else None


def _left(observed: Observed, excluded: Sequence[ExcludedNode]) -> int:
    """How many nodes that the gang may run on are neither excluded, nor ill, nor about to go."""
    names = {node.name for node in excluded}
    return sum(node.is_fit and node.name not in names for node in observed.nodes or ())


def _needed(observed: Observed) -> int:
    return observed.spec.min_nodes
