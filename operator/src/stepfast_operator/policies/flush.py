"""What is to be done until nothing of a run is left in memory alone. Pure."""

from __future__ import annotations

from stepfast_operator.actions import (
    Decision,
    FlushRun,
    ForgetFlushAsked,
    NoteFlushAsked,
    NotePartsWritten,
    RequeueAfter,
    StartAgent,
)
from stepfast_operator.observed import AgentState, Observed, pending_steps
from stepfast_operator.record import Attempt

_POLL_SECONDS = 0.25
# An agent that answers is asked what is left even when there is no time to wait for it; one that does not, no longer.
_ASK_SECONDS = 5.0
# By then the agent of rank 0 has committed whatever is whole, or another agent has in its place.
COMMIT_SECONDS = 10.0
# By then, when all ranks are gone, whichever agent found all parts written has: an agent that was started meanwhile may
# not know of its own.
HOPELESS_SECONDS = 4.0
_SILENT = (AgentState.GONE, AgentState.STARTING)


def flush(observed: Observed, attempt: Attempt, since: float) -> Decision | None:
    """What is to be done until nothing of the run is pending any more; None when that is so, or the time is
    up.
    """
    left = waiting_since(observed, since) + observed.spec.failure_policy.flush_timeout_seconds - observed.now
    is_answering = observed.agent not in _SILENT
    if (not is_answering or observed.awaited_agents) and observed.has_all_committed(attempt.run):
        return None  # whoever is silent holds nothing that is worth the wait
    if left <= 0 and not (is_answering and attempt.flush_asked_time is None and left > -_ASK_SECONDS):
        return None
    wait = RequeueAfter(seconds=min(max(left, 0.0), _POLL_SECONDS))
    if not is_answering:
        # Whatever the one before it said of what is left: this one is asked anew.
        forget = () if attempt.flush_asked_time is None else (ForgetFlushAsked(),)
        if observed.agent is AgentState.STARTING:
            return Decision(actions=(*forget, wait), why="an agent, which may hold staged steps, is starting")
        return Decision(actions=(StartAgent(), *forget, wait), why="the agent is gone and may hold staged steps")
    ask = FlushRun(run=attempt.run)
    if attempt.flush_asked_time is None:
        # Only what is reported after the request tells what is left: before it, staged steps need not be due.
        return Decision(actions=(ask, NoteFlushAsked(), RequeueAfter(seconds=0)), why="what is staged is flushed")
    if observed.awaited_agents:
        why = f"the agents of {', '.join(observed.awaited_agents)} have yet to say what is left"
        return Decision(actions=(ask, wait), why=why)
    if observed.is_rest_overtaken(attempt.run) or _is_given_up(observed, attempt):
        return None
    if observed.has_only_commits_left(attempt.run) and attempt.parts_written_time is None:
        return Decision(actions=(NotePartsWritten(), wait), why="what is staged is written and yet to be committed")
    return Decision(actions=(ask, wait), why="what is staged is being persisted")


def _is_given_up(observed: Observed, attempt: Attempt) -> bool:
    """Whether what is not committed never will be: a rank died before it had staged its share, or its node with it."""
    written = attempt.parts_written_time
    if written is None or not observed.has_only_commits_left(attempt.run):
        return False
    enough = HOPELESS_SECONDS if observed.is_rest_hopeless(attempt.run) else COMMIT_SECONDS
    return observed.now - waiting_since(observed, written) >= enough


def is_left(observed: Observed, attempt: Attempt) -> bool:
    """Whether something of the run may be in memory alone when the time to flush it is over."""
    if observed.agent in _SILENT or observed.awaited_agents:
        return not observed.has_all_committed(attempt.run)
    return not (observed.is_rest_overtaken(attempt.run) or _is_given_up(observed, attempt))


def may_hold_more(observed: Observed, attempt: Attempt) -> bool:
    """Whether memory may hold steps that the storage has not. When an agent does not answer, its last report tells only
    if it is such that nothing can have changed since.
    """
    if observed.has_all_committed(attempt.run):
        return False
    is_told = observed.agent not in _SILENT and not observed.awaited_agents and attempt.flush_asked_time is not None
    if observed.has_pending(attempt.run):
        return not (is_told and observed.is_rest_overtaken(attempt.run))
    return not is_told and observed.status.checkpoint.latest_memory_step is not None


def describe_unpersisted(observed: Observed, attempt: Attempt) -> str:
    reports = observed.all_reports_of(attempt.run)
    steps = sorted(pending_steps(reports))
    which = f"step {steps[-1]} is" if steps else "the last steps may be"
    if steps and _is_given_up(observed, attempt):
        return f"training succeeded, but step {steps[-1]} is not whole in the storage: a node did not write its part"
    is_here = observed.generation is None  # on one machine
    later = "the same command persists what is left before all else" if is_here else "the nodes' agents go on trying"
    error = next((report.persist_error for report in reports if report.persist_error), None)
    return (
        f"training succeeded, but {which} in memory only: not persisted within "
        f"{observed.spec.failure_policy.flush_timeout_seconds:g} s (flushTimeoutSeconds)"
        f"{f': {error}' if error else ''}; {later}"
    )


def waiting_since(observed: Observed, time: float) -> float:
    """That time, or when somebody began to look again: hours in which a job was suspended are no time to wait."""
    return max(time, observed.began_time, observed.status.start_time or 0.0)
