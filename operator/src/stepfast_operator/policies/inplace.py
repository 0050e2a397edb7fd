"""In-place restarts: torchrun starts the ranks anew inside the pods that live. Pure.

torchrun restarts them by itself, `maxInPlaceRestarts` times an attempt; what is seen of it is that ranks join a run
which is named `<run>.<n>`. Until then dead ranks are no failure of the attempt; a pod that fails always is one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from stepfast.nodestatus import RankStatus
from stepfast.step import restarted_run, split_run
from stepfast_operator.failurepolicy import RestartStrategy
from stepfast_operator.observed import DeadRank, Observed
from stepfast_operator.record import MAX_RECOVERIES, Attempt, Cause, Recovery, Status


def may_follow(observed: Observed, run: str) -> bool:
    """Whether torchrun may yet start the run's ranks anew."""
    policy = observed.spec.failure_policy
    if policy.restart_strategy is not RestartStrategy.IN_PLACE:
        return False
    return split_run(observed.newest_run(run))[1] < policy.max_in_place_restarts


def dead_ranks(observed: Observed, run: str) -> list[DeadRank]:
    """The ranks that died since the run's newest in-place restart."""
    return _since_newest_restart(observed, observed.dead_ranks, run)


def untold_ranks(observed: Observed, run: str) -> list[DeadRank]:
    """Those that died since then in pods that may soon tell of what."""
    return _since_newest_restart(observed, observed.untold_ranks, run)


def _since_newest_restart(observed: Observed, ranks: Iterable[DeadRank], run: str) -> list[DeadRank]:
    newest = observed.newest_run(run)
    return [rank for rank in ranks if rank.run == newest]


def waiting_since(observed: Observed, run: str) -> float | None:
    """When the ranks died that torchrun has to start anew; None while it has none to."""
    dead = dead_ranks(observed, run) if may_follow(observed, run) else []
    return max((rank.ended_time for rank in dead), default=None)


def take_in(observed: Observed, status: Status, current: Attempt) -> tuple[Status, Attempt]:
    """The status and its attempt when ranks have been started anew since: what they did before is settled, what they
    do from here on is looked at as in a new attempt, and a recovery is open.
    """
    restarts = split_run(observed.newest_run(current.run))[1]
    if restarts <= current.in_place_restarts:
        return status, current
    first = _first_dead(observed, current, restarts)
    recovery = Recovery(
        attempt=current.attempt,
        in_place_restart=restarts,
        cause=Cause.RANK_FAILED,
        node=_node_of(observed, first.rank) if first is not None else None,
        rank=first.rank if first is not None else None,
        counted=False,
        failure_time=observed.now if first is None or first.ended_time is None else first.ended_time,
        detected_time=observed.now,
        step_before=current.reached_step,
    )
    status = replace(
        status,
        recoveries=(*status.recoveries, recovery)[-MAX_RECOVERIES:],
        interruptions=status.interruptions + restarts - current.in_place_restarts,
        trained_seconds=status.trained_seconds + current.trained_seconds,
        productive_seconds=status.productive_seconds + current.trained_seconds,
        checkpoint=replace(
            status.checkpoint, earlier_saves=status.checkpoint.saves, restored_step=None, restored_tier=None
        ),
    )
    return status, Attempt(
        attempt=current.attempt,
        run=current.run,
        resume_step=current.resume_step,
        planned_time=current.planned_time,
        nodes=current.nodes,
        shrinks=current.shrinks,
        shrunk_from=current.shrunk_from,
        step_before=current.reached_step,
        step_seconds_before=current.step_seconds or current.step_seconds_before,
        in_place_restarts=restarts,
        restarted_time=observed.now,
        suspending_time=current.suspending_time,
        leaving=current.leaving,
        stopping_time=current.stopping_time,
    )


def _first_dead(observed: Observed, current: Attempt, restarts: int) -> RankStatus | None:
    """The rank that died first of those launches that this restart follows, and none before it did."""
    launches = {restarted_run(current.run, number) for number in range(current.in_place_restarts, restarts)}
    ranks = [rank for report in observed.reports if report.run in launches for rank in report.ranks]
    dead = [rank for rank in ranks if not rank.alive and not rank.clean]
    return min(dead, key=lambda rank: rank.ended_time or observed.now, default=None)


def _node_of(observed: Observed, rank: int) -> str | None:
    """Where the rank runs: ranks are numbered in the order of the workers, and each has as many."""
    workers = observed.gang.workers if observed.gang is not None else ()
    size = max((report.world_size for report in observed.reports), default=0)
    return workers[rank * len(workers) // size].node if rank < size else None
