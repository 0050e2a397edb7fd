"""Hang detection: no new step for too long. All that it looks at belongs to one attempt. Pure."""

from __future__ import annotations

from stepfast_operator.observed import AgentState, Observed
from stepfast_operator.policies import inplace
from stepfast_operator.record import Attempt


def last_progress_time(observed: Observed, attempt: Attempt) -> float | None:
    """When the slowest living rank last reached a new step, or the gang started; None while no rank uses the
    SDK.

    A rank that waits for memory stands still because of the storage, which no restart would mend: that counts as
    progress. Ranks that said goodbye are done and are not waited for; a script that never uses the SDK is never called
    hung, nor is any while an agent is away: nobody tells then. Ranks that died and are to be started anew in place have
    as long for that.
    """
    if observed.agent in (AgentState.GONE, AgentState.STARTING):
        return None
    restarting = inplace.waiting_since(observed, attempt.run)
    if restarting is not None and observed.gang is not None:
        return max(observed.gang.launched_time, restarting)
    ranks = [rank for report in observed.reports_of(attempt.run) for rank in report.ranks if rank.alive]
    if not ranks or observed.gang is None:
        return None
    if any(rank.waiting for rank in ranks):
        return observed.now
    started = observed.gang.launched_time
    slowest = min(-1 if rank.global_step is None else rank.global_step for rank in ranks)
    behind = [rank for rank in ranks if (-1 if rank.global_step is None else rank.global_step) == slowest]
    # A rank without a step has just joined: the gang's first, or an agent that was restarted and knows no
    # steps yet.
    times = [rank.joined_time if rank.step_time is None else rank.step_time for rank in behind]
    waits = [rank.waited_time for rank in ranks if rank.waited_time is not None]
    # What was seen here counts whatever a node's clock says: one that was set makes steps of a moment ago look old.
    seen = [started] if attempt.steady_step_time is None else [started, attempt.steady_step_time]
    return max([*seen, *times, *waits])


def hang_left_seconds(observed: Observed, attempt: Attempt) -> float | None:
    """Seconds until the gang counts as hung (negative: it does); None when that cannot be said.

    A step that nobody has told of yet may have been made in time.
    """
    last = last_progress_time(observed, attempt)
    if last is None:
        return None
    patience = observed.spec.progress_policy.progress_deadline_seconds + observed.untold_seconds
    return last + patience - observed.now
