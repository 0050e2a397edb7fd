"""One pass: observe, decide, apply, write the status once. Holds a job's status between passes, and nothing
else.

Effects come before the status is written. A kill in between means that the next pass sees the effect without
its record, and decides it again: every effect may be applied twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from stepfast.errors import AgentUnavailable, StorageError, StorageForbidden
from stepfast_operator.actions import (
    Decision,
    DeleteJob,
    Effect,
    FlushRun,
    LaunchGang,
    LeaveQueue,
    ReadSteps,
    RequestSave,
    RequeueAfter,
    SetSpares,
    StartAgent,
    StopGang,
    SupersedeAfter,
)
from stepfast_operator.backends.base import Backend, LaunchPostponed, QueueRefused
from stepfast_operator.decide import decide
from stepfast_operator.observed import Observed
from stepfast_operator.policies import resume
from stepfast_operator.record import Status
from stepfast_operator.status import next_status

_REFUSED_SECONDS = 10.0  # whoever mends it wakes nobody
_POSTPONED_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What one pass saw, decided and wrote."""

    observed: Observed
    decision: Decision
    before: Status
    after: Status


async def reconcile(backend: Backend, status: Status) -> Pass:
    """One pass for the job that the backend holds. Raises what launching or stopping raises; then nothing is
    written.
    """
    observed = await backend.observe(status)
    decision = decide(observed)
    if any(isinstance(action, ReadSteps) for action in decision.actions):
        observed = await _with_steps(backend, observed)
        decision = decide(observed)
    try:
        await _apply(backend, decision)
    except AgentUnavailable:
        # It died since it was observed. Nothing of this pass is recorded, so the next one, which starts it,
        # asks again.
        decision = Decision(actions=(RequeueAfter(seconds=0.1),), why="the agent went away")
    except LaunchPostponed as error:
        decision = Decision(actions=(RequeueAfter(seconds=_POSTPONED_SECONDS),), why=str(error))
    except QueueRefused as error:
        observed = replace(observed, queue=replace(observed.queue, refusal=str(error)))
        decision = Decision(actions=(RequeueAfter(seconds=_REFUSED_SECONDS),), why="the gang cannot be queued")
    except StorageError as error:
        # Rolling back failed: nothing is planned on top of it, and the next pass tries again.
        observed = _without_storage(observed, error)
        decision = decide(observed)
    after = next_status(observed, decision)
    if after != status:
        await backend.write_status(after)
    return Pass(observed=observed, decision=decision, before=status, after=after)


async def _with_steps(backend: Backend, observed: Observed) -> Observed:
    try:
        observed = replace(observed, committed=tuple(await backend.read_steps()))
    except StorageError as error:
        return _without_storage(observed, error)
    missing = resume.missing(observed)
    return observed if missing is None else replace(observed, committed=None, storage_error=missing)


def _without_storage(observed: Observed, error: StorageError) -> Observed:
    first_line = str(error).strip().partition("\n")[0].rstrip()
    return replace(
        observed,
        committed=None,
        storage_error=f"{type(error).__name__}: {first_line}",
        is_storage_forbidden=isinstance(error, StorageForbidden),
    )


async def _apply(backend: Backend, decision: Decision) -> None:
    for action in decision.actions:
        if isinstance(action, Effect):
            await _apply_one(backend, action)


async def _apply_one(backend: Backend, effect: Effect) -> None:
    match effect:
        case LaunchGang():
            await backend.launch(effect)
        case StopGang():
            await backend.stop(effect.runs, effect.mode)
        case StartAgent():
            await backend.start_agent()
        case FlushRun():
            await backend.flush(effect.run)
        case RequestSave():
            await backend.request_save(effect.run)
        case SupersedeAfter():
            await backend.supersede_after(effect.step)
        case SetSpares():
            await backend.set_spares(effect.count, effect.avoided_nodes)
        case LeaveQueue():
            await backend.leave_queue(effect.attempt)
        case DeleteJob():
            await backend.delete_job()
        case _:
            assert_never(effect)
