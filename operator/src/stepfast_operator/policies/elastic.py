"""How many nodes the gang has. One that is elastic goes on with fewer when there is no place for all its pods, and with
more once there is. Pure.

An attempt's size is fixed when it is planned. A smaller one begins only when the scheduler has found no place for
`scaleDownTimeoutSeconds`. Whether there is room for a larger one the scheduler alone can say: spares are there for it
to place, which hold the place until the gang has saved, ended, and is launched anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepfast_operator.actions import SetSpares
from stepfast_operator.observed import Intent, Observed, Spare, Worker
from stepfast_operator.policies import exclusion
from stepfast_operator.record import Attempt, Cause, Leaving, Status, Verdict
from stepfast_operator.sentences import count_text
from stepfast_operator.spec import ElasticPolicy, TrainingSpec

# Nodes come in groups: a gang that has grown by the first of them is not to be stopped for the second.
SETTLE_SECONDS = 10.0
_MOST_HELD_SECONDS = 3600.0
_MOST_DOUBLINGS = 16  # more change nothing, and would in the end be no number any more


def size_of(attempt: Attempt, spec: TrainingSpec) -> int:
    """How many nodes the attempt's gang has."""
    return attempt.nodes or spec.trainer.num_nodes


def size_of_next(observed: Observed) -> int:
    """How many the next attempt's gang gets: as many as the one before, unless that left for another number. The first
    one, and the first after a suspension, get `numNodes`.
    """
    spec, current = observed.spec, observed.status.current
    wanted = spec.trainer.num_nodes
    if spec.elastic_policy is not None and current is not None and current.verdict is not Verdict.SUSPEND:
        left_for = current.leaving.nodes if current.leaving is not None else None
        wanted = left_for or size_of(current, spec)
    return min(max(wanted, spec.min_nodes), spec.max_nodes)


def shrinks_of_next(observed: Observed) -> tuple[int, int]:
    """`shrinks` and `shrunk_from` of the next attempt: those of the one before, until there was place for as many."""
    spec, current = observed.spec, observed.status.current
    if spec.elastic_policy is None or current is None or current.verdict is Verdict.SUSPEND:
        return 0, 0
    size = size_of(current, spec)
    if current.pods_ready_time is not None or current.in_place_restarts > 0:
        return (0, 0) if size >= current.shrunk_from else (current.shrinks, current.shrunk_from)
    if current.leaving is not None and current.leaving.nodes is not None and current.leaving.nodes < size:
        return current.shrinks + 1, max(size, current.shrunk_from)
    return current.shrinks, current.shrunk_from


def held_until(policy: ElasticPolicy, attempt: Attempt) -> float | None:
    """Until when the gang does not try to grow, once it trains.

    A place that a spare finds may be none for the gang's own pods, which have volumes that not every node reaches, or
    it may be taken in between. Each try that fails costs the gang `scaleDownTimeoutSeconds`: after the second one in a
    row it trains for twice as long before the next, then for four times, and so on.
    """
    if attempt.shrinks < 2 or attempt.first_step_time is None:
        return None
    held = policy.scale_down_timeout_seconds * 2.0 ** min(attempt.shrinks - 1, _MOST_DOUBLINGS)
    return attempt.first_step_time + min(held, max(_MOST_HELD_SECONDS, policy.scale_down_timeout_seconds))


def may_grow(spec: TrainingSpec, status: Status) -> bool:
    """Whether the gang that is there is smaller than it may be."""
    attempt = status.open_attempt
    return spec.elastic_policy is not None and attempt is not None and size_of(attempt, spec) < spec.max_nodes


def reason_of(observed: Observed, attempt: Attempt) -> Leaving | None:
    """Why the gang is to be launched anew with another number of nodes, if it is."""
    if observed.spec.elastic_policy is None:
        return None
    return _too_large(observed, attempt) or _without_place(observed, attempt) or _with_room(observed, attempt)


def patience_until(policy: ElasticPolicy, attempt: Attempt, launched_time: float | None) -> float:
    """Until when places for all pods are waited for. Before they were made, which a quota or an admission rule may put
    off, no scheduler, and nobody who adds nodes, knew of them.
    """
    begin = attempt.planned_time if launched_time is None else max(attempt.planned_time, launched_time)
    return begin + policy.scale_down_timeout_seconds


def startup_until(policy: ElasticPolicy | None, nodes: int, attempt: Attempt, launched_time: float | None) -> float:
    """Before which time the gang, of so many nodes, is not late: it may yet go on with fewer."""
    if policy is None or policy.min_nodes >= nodes:
        return attempt.planned_time
    return patience_until(policy, attempt, launched_time)


def next_check_seconds(observed: Observed, attempt: Attempt) -> float | None:
    """When a place is waited for no more, or places that were found are not shared with others."""
    if observed.spec.elastic_policy is None:
        return None
    waits = [_patience_left(observed, attempt)] if _is_waiting_for_places(observed, attempt) else []
    waits += [time + SETTLE_SECONDS - observed.now for time in _placed_times(_usable(observed))]
    if (held := _held_seconds(observed, attempt)) > 0:
        waits.append(held)
    return min(waits, default=None)


# ---------------------------------------------------------------- smaller


def _too_large(observed: Observed, attempt: Attempt) -> Leaving | None:
    """The policy was changed since the attempt was planned."""
    most = observed.spec.max_nodes
    if size_of(attempt, observed.spec) <= most:
        return None
    message = f"{count_text(most, 'node')} at most (maxNodes)"
    return _leave(observed, most, message, save_seconds=observed.spec.checkpoint.graceful_suspend_seconds)


def _without_place(observed: Observed, attempt: Attempt) -> Leaving | None:
    """Some pods have a place, and for the others there is none."""
    if not _is_waiting_for_places(observed, attempt) or _patience_left(observed, attempt) > 0:
        return None
    workers = _workers(observed)
    placed = sum(worker.is_placed for worker in workers)
    left_out = [worker for worker in workers if worker.is_unschedulable]
    if placed < observed.spec.min_nodes or placed + len(left_out) < len(workers):
        return None
    message = (
        f"there is place for {placed} of {count_text(len(workers), 'node')} (scaleDownTimeoutSeconds): "
        f"{left_out[0].message}"
    )
    return _leave(observed, placed, message, save_seconds=0.0)


def _is_waiting_for_places(observed: Observed, attempt: Attempt) -> bool:
    """Whether the gang has not trained yet, for want of places."""
    if attempt.pods_ready_time is not None or attempt.newest_step is not None:
        return False
    return any(worker.is_unschedulable for worker in _workers(observed))


def _patience_left(observed: Observed, attempt: Attempt) -> float:
    policy, gang = observed.spec.elastic_policy, observed.gang
    launched = gang.launched_time if gang is not None else None
    return patience_until(policy, attempt, launched) - observed.now if policy is not None else 0.0


def _workers(observed: Observed) -> Sequence[Worker]:
    return observed.gang.workers if observed.gang is not None else ()


# ---------------------------------------------------------------- larger


def change_of_spares(observed: Observed) -> SetSpares | None:
    """What is to become of the spares; None when nothing.

    While a gang leaves for their places they hold them, until the launch ends them.
    """
    left_for = observed.status.current.leaving if observed.status.current is not None else None
    if left_for is not None and left_for.nodes is not None and not _is_at_rest(observed):
        return None
    wanted = _wanted(observed)
    avoided, available = exclusion.avoided(observed), exclusion.available(observed)
    is_misled = any(
        # One without a place would never go to a node that is well again.
        spare.node in avoided or (spare.node is None and not available.isdisjoint(spare.avoided_nodes))
        for spare in observed.spares
    )
    if len(observed.spares) == wanted and not is_misled:
        return None
    return SetSpares(count=wanted, avoided_nodes=avoided)


def _is_at_rest(observed: Observed) -> bool:
    return observed.status.is_terminal or observed.intent is not Intent.RUN


def _wanted(observed: Observed) -> int:
    """How many spares are to wait for places. None before the gang has committed a step: it is to get somewhere between
    two changes of its size, and its own pods come first.
    """
    attempt, persisted = observed.status.open_attempt, observed.status.checkpoint.latest_persisted_step
    if attempt is None or _is_at_rest(observed) or not may_grow(observed.spec, observed.status):
        return 0
    if _held_seconds(observed, attempt) > 0:
        return 0
    is_training = attempt.first_step_time is not None and attempt.succeeded_time is None
    if not is_training or attempt.suspending_time is not None or (persisted or 0) <= attempt.start_step:
        return 0
    return observed.spec.max_nodes - size_of(attempt, observed.spec)


def _held_seconds(observed: Observed, attempt: Attempt) -> float:
    """For how long it does not try to grow, from now on."""
    policy = observed.spec.elastic_policy
    until = held_until(policy, attempt) if policy is not None else None
    return until - observed.now if until is not None else 0.0


def _with_room(observed: Observed, attempt: Attempt) -> Leaving | None:
    """Spares have found places."""
    wanted, usable = _wanted(observed), _usable(observed)
    if not wanted or not usable:
        return None
    have_settled = min(_placed_times(usable), default=observed.now) + SETTLE_SECONDS <= observed.now
    if len(usable) < wanted and not have_settled:
        return None
    more = min(len(usable), wanted)
    message = f"there is place for {count_text(more, 'more node')}"
    seconds = observed.spec.checkpoint.graceful_suspend_seconds
    return _leave(observed, size_of(attempt, observed.spec) + more, message, save_seconds=seconds)


def _usable(observed: Observed) -> list[Spare]:
    avoided = exclusion.avoided(observed)
    return [spare for spare in observed.spares if spare.node is not None and spare.node not in avoided]


def _placed_times(spares: Sequence[Spare]) -> list[float]:
    return [spare.placed_time for spare in spares if spare.placed_time is not None]


def _leave(observed: Observed, nodes: int, message: str, *, save_seconds: float) -> Leaving:
    return Leaving(
        cause=Cause.RESIZED,
        begin_time=observed.now,
        save_until_time=observed.now + save_seconds,
        nodes=nodes,
        message=message,
    )
