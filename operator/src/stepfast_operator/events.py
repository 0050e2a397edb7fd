"""What a pass brought about, as Kubernetes Events: the job's story for `kubectl describe`. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stepfast_operator.actions import LaunchGang
from stepfast_operator.reconcile import Pass
from stepfast_operator.record import State

NORMAL, WARNING = "Normal", "Warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """`reason` is one of the API's closed set; `type` is Normal or Warning."""

    type: str
    reason: str
    message: str


def events_of(seen: Pass) -> tuple[JobEvent, ...]:
    """Each is told once, by the pass that brought it about."""
    return tuple(_events(seen))


def _events(seen: Pass) -> Iterator[JobEvent]:
    before, after = seen.before, seen.after
    for action in seen.decision.actions:
        if isinstance(action, LaunchGang):
            text = f"attempt {action.attempt} starts from step {action.resume_step}"
            yield JobEvent(type=NORMAL, reason="PodsCreated", message=text)
    if after.last_failure is not None and after.last_failure != before.last_failure:
        failure = after.last_failure
        text = f"attempt {failure.attempt} failed: {failure.reason}: {failure.message}"
        yield JobEvent(type=WARNING, reason="Restarting", message=text)
    if after.state != before.state and after.state in (State.COMPLETE, State.FAILED, State.SUSPENDED):
        reason = {State.COMPLETE: "Completed", State.FAILED: "Failed"}.get(after.state, "Suspended")
        yield JobEvent(type=NORMAL, reason=reason, message=seen.decision.why)
