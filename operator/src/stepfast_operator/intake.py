"""Takes what is observed of the current attempt into the status: ranks, steps, saves, the running recovery.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from stepfast.nodestatus import JobStatus, RankStatus, SaveStatus
from stepfast_operator.observed import Gang, Intent, Observed, WorkerPhase
from stepfast_operator.policies import deadline, elastic, inplace, queueing, readiness, restart
from stepfast_operator.record import (
    Attempt,
    CheckpointStatus,
    Metric,
    Nodes,
    Recovery,
    SavesStatus,
    State,
    Status,
    TrainerStatus,
)

_NO_TIER = "None"  # a rank's word for having restored nothing


def take_in(observed: Observed) -> Status:
    """The status with all that the agents and the gang tell; without what a decision records."""
    status = observed.status
    if observed.storage_error is not None or observed.committed is not None:
        status = replace(status, checkpoint=_read(observed, status.checkpoint))
    if status.start_time is None and status.state is not State.SUSPENDED and observed.intent is Intent.RUN:
        status = replace(status, start_time=observed.now)
    current = status.current
    if current is None:
        return replace(status, nodes=Nodes(desired=elastic.size_of_next(observed)))
    reports = observed.reports_of(current.run)
    ranks = [rank for report in reports for rank in report.ranks]
    if current.ended_time is None:
        status, current = queueing.take_in(observed, status, current)
        status, current = inplace.take_in(observed, status, current)
        planned, current = current, _attempt(observed, current, ranks)
        status = _count_really_restored(status, current, planned)
        status = replace(status, state=readiness.state_without_ranks(observed, status, current))
    status = replace(status, current=current)
    status = replace(
        status,
        nodes=_nodes(observed, current, is_up=status.is_gang_up),
        trainer_status=_trainer(status.trainer_status, current, ranks),
        checkpoint=_checkpoint(observed, status.checkpoint, current, reports, ranks),
    )
    if restart.has_progress(status, status.checkpoint.latest_persisted_step):
        status = replace(status, restarts_without_progress=0)
    return replace(status, recoveries=_recoveries(status.recoveries, current, status.checkpoint, observed.gang))


def _read(observed: Observed, before: CheckpointStatus) -> CheckpointStatus:
    """Whether the committed steps could be read, and since when they could not."""
    error = observed.storage_error
    is_new = error is not None and before.storage_error_time is None
    since = observed.now if is_new else before.storage_error_time
    return replace(before, storage_error=error, storage_error_time=since if error is not None else None)


def _attempt(observed: Observed, attempt: Attempt, ranks: Sequence[RankStatus]) -> Attempt:
    """What the ranks have done in this attempt. Nothing of it goes back: an agent that restarts forgets, we
    do not.
    """
    if observed.gang is not None:
        attempt = replace(attempt, launched_time=observed.gang.launched_time)
    joined, world_size = deadline.joined_ranks(observed, attempt.run)
    are_all_here = 0 < world_size <= joined
    if attempt.pods_ready_time is None and are_all_here:
        attempt = replace(attempt, pods_ready_time=max(rank.joined_time for rank in ranks))
    restored = [rank.restored_time for rank in ranks if rank.restored_time is not None]
    if attempt.restored_time is None and are_all_here and len(restored) >= world_size:
        attempt = replace(attempt, restored_time=max(restored))
    if attempt.first_step_time is None:
        attempt = replace(attempt, restored_step=_restored_step(attempt, ranks))
    stepped = [(rank.global_step, rank.step_time) for rank in ranks if rank.global_step is not None]
    new = [(step, time or observed.now) for step, time in stepped if step > attempt.start_step]
    return _advance(attempt, new, observed.now, are_all=are_all_here and len(new) >= world_size) if new else attempt


def _restored_step(attempt: Attempt, ranks: Sequence[RankStatus]) -> int | None:
    """The step that the ranks really restored; 0: none, as also when one trains and never told of a restore.

    An agent that restarted knows nothing of what was restored before: its ranks have joined anew.
    """
    told = [rank.restored_step for rank in ranks if rank.restored_step is not None]
    if told:
        return min(told)
    ready = attempt.pods_ready_time
    trains = any(rank.global_step is not None and ready is not None and rank.joined_time <= ready for rank in ranks)
    return 0 if trains and attempt.restored_step is None else attempt.restored_step


def _advance(attempt: Attempt, new: Sequence[tuple[int, float]], now: float, *, are_all: bool) -> Attempt:
    """Takes in new steps and when they were made; `are_all`: every rank has made one."""
    newest, newest_time = max(new)
    if attempt.first_step_time is None:
        first = min(new)
        attempt = replace(attempt, first_step=first[0], first_step_time=first[1])
    if attempt.newest_step is None or newest > attempt.newest_step:
        attempt = replace(attempt, newest_step=newest, newest_step_time=newest_time)
    slowest = min(step for step, _ in new)
    if are_all and slowest > (attempt.steady_step or 0):
        attempt = replace(attempt, steady_step=slowest, steady_step_time=now, hang_notified_time=None)
    return attempt


def _nodes(observed: Observed, current: Attempt, *, is_up: bool) -> Nodes:
    phases = [worker.phase for worker in observed.gang.workers] if observed.gang is not None else []
    running = phases.count(WorkerPhase.RUNNING)
    return Nodes(
        desired=elastic.size_of(current, observed.spec),
        ready=running if is_up and current.ended_time is None else 0,
        active=running + phases.count(WorkerPhase.PENDING),
        succeeded=phases.count(WorkerPhase.SUCCEEDED),
        failed=phases.count(WorkerPhase.FAILED),
    )


def _trainer(before: TrainerStatus, current: Attempt, ranks: Sequence[RankStatus]) -> TrainerStatus:
    if current.newest_step is None:
        return before if current.restored_step is None else replace(before, global_step=current.restored_step or None)
    first = min(ranks, key=lambda rank: rank.rank, default=None)
    speed = before.steps_per_second
    if current.first_step is not None and current.newest_step > current.first_step:
        seconds = (current.newest_step_time or 0.0) - (current.first_step_time or 0.0)
        speed = round((current.newest_step - current.first_step) / seconds, 4) if seconds > 0 else speed
    total = max((rank.total_steps for rank in ranks if rank.total_steps is not None), default=None)
    percentage, remaining = before.progress_percentage, before.estimated_remaining_seconds
    if total is not None:
        percentage, remaining = _ahead(current.newest_step, total, speed)
    return TrainerStatus(
        global_step=current.newest_step,
        progress_percentage=percentage,
        estimated_remaining_seconds=remaining,
        steps_per_second=speed,
        metrics=_metrics(first) or before.metrics,
        last_updated_time=current.newest_step_time,
    )


def _ahead(step: int, total: int, speed: float | None) -> tuple[int, int | None]:
    """How far training is (percent), and how many seconds it still takes at that speed."""
    left = max(0, total - step)
    seconds = ceil(left / speed) if speed else None
    return min(100, 100 * step // total), 0 if left == 0 else seconds


def _metrics(rank: RankStatus | None) -> tuple[Metric, ...]:
    told = rank.metrics if rank is not None else None
    return tuple(Metric(name=name, value=value) for name, value in (told or {}).items())


def _checkpoint(
    observed: Observed,
    before: CheckpointStatus,
    current: Attempt,
    reports: Sequence[JobStatus],
    ranks: Sequence[RankStatus],
) -> CheckpointStatus:
    checkpoint = _committed(observed, before)
    if not reports:
        return checkpoint
    all_reports = observed.all_reports_of(current.run)
    in_memory = [report.latest_memory_step for report in reports if report.latest_memory_step is not None]
    checkpoint = _persisted(observed, checkpoint, current, reports)
    tiers = {rank.restored_tier or _NO_TIER for rank in ranks} - {_NO_TIER}
    checkpoint = replace(
        checkpoint,
        latest_memory_step=min(in_memory, default=checkpoint.latest_memory_step),
        persist_error=next((report.persist_error for report in all_reports if report.persist_error), None),
        pending_bytes=sum(report.pending_bytes for report in all_reports),
        saves=_saves(checkpoint, [report.saves for report in reports]),
        restored_step=current.restored_step or None,
        # One rank that had to read from the storage makes it the storage's restore.
        restored_tier=max(tiers, default=checkpoint.restored_tier),
    )
    return _lag(checkpoint, current)


def _persisted(
    observed: Observed, checkpoint: CheckpointStatus, current: Attempt, reports: Sequence[JobStatus]
) -> CheckpointStatus:
    """What the agents know to be committed. It only grows, unless the ranks went back themselves: what they commit
    then takes the place of the steps that they could not restore.
    """
    known = [report for report in reports if report.latest_persisted_step is not None]
    if not known:
        return checkpoint
    last = max(known, key=lambda report: report.latest_persisted_step or 0)
    is_older = (last.latest_persisted_step or 0) < (checkpoint.latest_persisted_step or 0)
    is_later = (last.latest_persisted_time or 0.0) > (checkpoint.latest_persisted_time or 0.0)
    if is_older and not (current.went_back and is_later):
        return checkpoint
    return replace(
        checkpoint,
        latest_persisted_step=last.latest_persisted_step,
        latest_persisted_time=last.latest_persisted_time or checkpoint.latest_persisted_time,
        latest_persisted_uri=observed.storage_uri or None,
        size_bytes=last.latest_persisted_bytes or checkpoint.size_bytes,
    )


def _committed(observed: Observed, checkpoint: CheckpointStatus) -> CheckpointStatus:
    """The storage's own word, when it was read in this pass; it goes back after a roll-back."""
    if not observed.committed:
        return checkpoint
    newest = observed.committed[-1]
    return replace(
        checkpoint,
        latest_persisted_step=newest.step,
        latest_persisted_time=newest.committed_time,
        latest_persisted_uri=observed.storage_uri or None,
        size_bytes=newest.size_bytes,
    )


def _lag(checkpoint: CheckpointStatus, current: Attempt) -> CheckpointStatus:
    """How much training is not persisted: steps, and the time that they took, at this attempt's speed."""
    newest = current.newest_step
    if newest is None:
        return checkpoint
    behind = max(0, newest - (checkpoint.latest_persisted_step or 0))
    seconds = round(behind * current.step_seconds, 3) if current.step_seconds > 0 or behind == 0 else None
    return replace(checkpoint, persist_lag_steps=behind, persist_lag_seconds=seconds)


def _saves(checkpoint: CheckpointStatus, reported: Sequence[SaveStatus]) -> SavesStatus:
    """This attempt's saves on top of the earlier ones; an agent that restarted counts from zero, this does
    not.
    """
    now = max(reported, key=lambda saves: saves.count)
    earlier = checkpoint.earlier_saves
    count = earlier.count + now.count
    if count < checkpoint.saves.count:
        return checkpoint.saves
    total = earlier.stall_seconds_total + now.stall_seconds_total
    return SavesStatus(
        count=count,
        stall_seconds_total=round(total, 6),
        stall_seconds_mean=round(total / count, 6) if count else 0.0,
        stall_seconds_max=max(earlier.stall_seconds_max, now.stall_seconds_max),
        stall_seconds_last=now.stall_seconds_last if now.count else earlier.stall_seconds_last,
        skipped=earlier.skipped + now.skipped,
        dropped=earlier.dropped + now.dropped,
    )


def _count_really_restored(status: Status, current: Attempt, planned: Attempt) -> Status:
    """Counts anew what was lost, once it is known that the ranks went on from another step than `planned`.

    After an in-place restart nothing was planned: what the ranks restored is the first that is known.
    """
    is_first_known = current.in_place_restarts > 0 and planned.restored_step is None
    if current.restored_step == planned.restored_step or (
        current.start_step == planned.start_step and not is_first_known
    ):
        return status
    more = current.steps_lost - (0 if is_first_known else planned.steps_lost)
    recoveries = status.recoveries
    if recoveries and recoveries[-1].is_ended_by(current):
        last = replace(recoveries[-1], resumed_from_step=current.start_step, steps_lost=current.steps_lost)
        recoveries = (*recoveries[:-1], last)
    return replace(
        status,
        recoveries=recoveries,
        steps_lost=max(0, status.steps_lost + more),
        productive_seconds=max(0.0, status.productive_seconds - more * current.step_seconds_before),
    )


def _recoveries(
    recoveries: tuple[Recovery, ...], current: Attempt, checkpoint: CheckpointStatus, gang: Gang | None
) -> tuple[Recovery, ...]:
    """Fills in the recovery that the current attempt completes, as its times become known: each by the clock of whoever
    told of it, and none before the one that it follows.
    """
    if not recoveries or not recoveries[-1].is_ended_by(current):
        return recoveries
    last = recoveries[-1]
    if last.duration_seconds is not None and last.restored_time is not None:
        return recoveries  # until then: one node may tell of its first step before another of what it restored
    is_launched = gang is not None and gang.run == current.run and last.in_place_restart is None
    launched = gang.launched_time if gang is not None and is_launched else last.launched_time
    ready = _not_before(launched or last.detected_time, current.pods_ready_time)
    restored = _not_before(ready, current.restored_time)
    resumed = _not_before(restored or ready, current.first_step_time)
    last = replace(
        last,
        launched_time=launched,
        pods_ready_time=ready,
        restored_time=restored,
        restored_tier=checkpoint.restored_tier,
        resumed_time=resumed,
        duration_seconds=round(max(0.0, resumed - last.failure_time), 6) if resumed is not None else None,
    )
    return (*recoveries[:-1], last)


def _not_before(earlier: float | None, time: float | None) -> float | None:
    return time if time is None or earlier is None else max(earlier, time)
