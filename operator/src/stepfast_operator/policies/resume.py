"""Which step an attempt starts from: one number for the whole gang, fixed before it is launched. Pure.

A step that is asked for (`resumePolicy: Step`) is rolled back to once by each request; attempts after that go on
from the latest. A command is a request each time it is given. A manifest, which is read again whenever the job goes on,
is one for the job's whole life, until it names another step: else each interruption would undo what was trained since.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from stepfast_operator.observed import Observed
from stepfast_operator.policies import restart
from stepfast_operator.record import ResumeRequest
from stepfast_operator.spec import ResumePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """`supersede_after`: roll the storage back to this step first. `unavailable`: why there is nothing to
    start from.
    """

    step: int  # 0: from scratch
    progress_step: int | None
    request: ResumeRequest | None = None
    supersede_after: int | None = None
    unavailable: str | None = None


def resume_of(observed: Observed) -> Resume:
    """Needs `observed.committed`."""
    steps = [committed.step for committed in observed.committed or ()]
    newest = steps[-1] if steps else None
    is_first = observed.status.attempt == 0
    policy = observed.spec.checkpoint.resume_policy
    match policy:
        case ResumePolicy.LATEST:
            return Resume(step=newest or 0, progress_step=_highest(observed, newest))
        case ResumePolicy.NEVER:
            # Committed steps of an earlier attempt must not look like this one's progress, nor be resumed
            # from later.
            baseline = None if is_first else _highest(observed, newest)
            return Resume(step=0, progress_step=baseline, supersede_after=-1 if steps else None)
        case ResumePolicy.STEP:
            request = _request(observed)
            if not is_asked(observed):
                return Resume(step=newest or 0, progress_step=_highest(observed, newest), request=request)
            return replace(_roll_back(request.step, steps), request=request)
        case _:
            assert_never(policy)


def missing(observed: Observed) -> str | None:
    """Why what is found in the storage cannot be all: the job has committed steps and is to go on from them, and there
    is none. Who wants to begin anew has to say so. Needs `observed.committed`.
    """
    known = observed.status.checkpoint.latest_persisted_step
    is_latest = observed.spec.checkpoint.resume_policy is not ResumePolicy.NEVER and not is_asked(observed)
    if observed.committed or not known or not is_latest:
        return None
    where = observed.storage_uri or "the storage"
    return f"step {known} was committed, and {where} has no step that can be restored: other storage, or emptied?"


def is_asked(observed: Observed) -> bool:
    """Whether a step is asked for that no attempt has started from yet for this request."""
    is_step = observed.spec.checkpoint.resume_policy is ResumePolicy.STEP
    return is_step and observed.status.resume_request != _request(observed)


def _request(observed: Observed) -> ResumeRequest:
    return ResumeRequest(step=observed.spec.checkpoint.resume_from_step or 0, command=observed.command)


def _roll_back(step: int, steps: list[int]) -> Resume:
    if step not in steps and step != 0:
        known = ", ".join(map(str, steps)) or "none"
        return Resume(
            step=0,
            progress_step=None,
            unavailable=f"step {step} (resumeFromStep) is not committed; these are: {known}",
        )
    later = step if any(other > step for other in steps) else None
    return Resume(step=step, progress_step=step or None, supersede_after=later)


def _highest(observed: Observed, newest: int | None) -> int | None:
    known = observed.status.progress_step
    if known is None or newest is None:
        return newest if known is None else known
    return newest if restart.has_replaced(observed.status, newest) else max(known, newest)
