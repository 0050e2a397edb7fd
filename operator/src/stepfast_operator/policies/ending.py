"""How a gang that lives is ended in order: a last save, which is waited for while there is time; then it is asked to
end; then it is killed. Pure.
"""

from __future__ import annotations

from collections.abc import Callable

from stepfast_operator.actions import BeginStop, Decision, RequestSave, RequeueAfter, StartAgent, StopGang, StopMode
from stepfast_operator.observed import AgentState, Observed
from stepfast_operator.policies import deadline
from stepfast_operator.record import Attempt

STOP_GRACE_SECONDS = 10.0
_SOON_SECONDS = 0.1


def end_in_order(
    observed: Observed, attempt: Attempt, ended: Callable[[str], Decision], *, save_until: float
) -> Decision:
    """What is next. `ended` gives the decision that ends the attempt, with why."""
    if attempt.stopping_time is not None:
        left = attempt.stopping_time + STOP_GRACE_SECONDS - observed.now
        if left <= 0:
            return ended("the gang did not end when asked")
        return Decision(actions=(RequeueAfter(seconds=left),), why="the gang is ending")
    left = save_until - observed.now
    if left > 0 and not _is_final_saved(observed, attempt):
        again = RequeueAfter(seconds=min(left, 1.0))
        if observed.agent is AgentState.GONE:
            return Decision(actions=(StartAgent(), again), why="the agent is gone while the last save is awaited")
        return Decision(actions=(RequestSave(run=attempt.run), again), why="waiting for the last save to be committed")
    stop = StopGang(runs=(attempt.run,), mode=StopMode.TERMINATE)
    return Decision(actions=(stop, BeginStop(), RequeueAfter(seconds=_SOON_SECONDS)), why="the gang may end")


def _is_final_saved(observed: Observed, attempt: Attempt) -> bool:
    """Whether the save that was asked for is committed, or there is nobody to save."""
    if observed.agent in (AgentState.GONE, AgentState.STARTING):
        return False
    if _is_nobody_to_save(observed, attempt):
        return True
    reports = observed.reports_of(attempt.run)
    finals = [report.final_step for report in reports if report.final_step is not None]
    persisted = max((report.latest_persisted_step or 0 for report in reports), default=0)
    return bool(finals) and persisted >= max(finals)


def _is_nobody_to_save(observed: Observed, attempt: Attempt) -> bool:
    """Whether all ranks have ended, or never were all here and made no step.

    That no report tells of a living rank does not say so: an agent that was restarted knows none until they come back.
    """
    if any(rank.alive for report in observed.reports_of(attempt.run) for rank in report.ranks):
        return False
    if attempt.pods_ready_time is None and attempt.newest_step is None:
        return True
    known, world_size = deadline.joined_ranks(observed, attempt.run)
    return 0 < world_size <= known
