"""The Checkpointer: what training code holds. Ten lines of it save, restore and keep a job's state.

It decides nothing for itself that ranks must agree on: see `stepfast.admission` (what happens with a step) and
`stepfast.torch.gang` (how ranks meet).
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from stepfast.admission import Decision, Interval, RankReport, Request, decide_save
from stepfast.environment import Environment, absolute_storage_uri, read_environment
from stepfast.errors import (
    AgentError,
    ObjectsUndefined,
    StepOutOfOrder,
    StorageError,
    StorageUnavailable,
)
from stepfast.layout import job_folder
from stepfast.messages import Restored, Skipped
from stepfast.pacing import PaceKeeper
from stepfast.step import MAX_STEP
from stepfast.torch.claims import RunKey, claim, give_up
from stepfast.torch.join import join_agent, join_gang
from stepfast.torch.measuring import Measuring
from stepfast.torch.objects import ObjectSet
from stepfast.torch.overlap import Overlap
from stepfast.torch.planner import Planner
from stepfast.torch.resume import Resumer
from stepfast.torch.saver import Save
from stepfast.torch.settled import Ledger, Referring
from stepfast.torch.sharedmemory import open_shared
from stepfast.torch.sources import AgentSource, CommittedStep, DirectSource, Source, committed_steps
from stepfast.torch.stopping import wait_to_be_stopped
from stepfast.torch.writer import Saved, Writer

log = logging.getLogger("stepfast")

_SCRATCH = -1  # before step 0, which can be saved

_SAVED_THROUGH: dict[RunKey, int] = {}  # the newest step that this process saved


def every(*, steps: int | None = None, seconds: float | None = None) -> Interval:
    """An interval between saves: `every(steps=100)` or `every(seconds=30)`. Raises ValueError."""
    if (steps is None) == (seconds is None):
        raise ValueError("give either steps or seconds")
    return Interval(steps=steps, seconds=seconds)


class Checkpointer:
    """Saves and restores a training job's objects; every rank makes one and calls it alike.

    Objects have `state_dict()` and `load_state_dict()`, or are dicts of plain values, which are restored in place.
    What DDP wraps is known to be equal on all ranks; `replicated` names further objects that are (each rank then
    saves only its share of them); all else is each rank's own. Random generators are part of every save. Tensors that
    an object says to be settled (`Settling`) are saved once; later steps refer to the step that holds them.

    interval: `"auto"` (Young/Daly from the measured stall and the failures that were seen), `every(steps=)`,
    `every(seconds=)`; None takes what the launcher said, else auto.
    total_steps: how many steps training is to make; the job's status then shows how far it is.
    weights_only: False allows objects that only travel pickled to be restored, which runs their code.
    overlap: True lets training go on while a GPU's tensors are copied. Parameters must not be written between a save
    and the optimizer's next step past torch's own count of changes (`parameter.data`): nothing would see that.
    """

    def __init__(
        self,
        *,
        interval: Interval | str | None = None,
        total_steps: int | None = None,
        storage_uri: str | None = None,
        name: str = "state",
        replicated: Sequence[str] = (),
        weights_only: bool = True,
        overlap: bool = False,
        environment: Environment | None = None,
        **objects: Any,
    ) -> None:
        self._closed = False
        total = _checked_total(total_steps)
        self._environment = environment if environment is not None else read_environment()
        if storage_uri is not None:
            self._environment = replace(self._environment, storage_uri=absolute_storage_uri(storage_uri))
        self._interval = _interval_of(interval, self._environment)
        self._objects = ObjectSet(objects, replicated)
        self._gang, self._environment = join_gang(self._environment)
        self._run_key = claim(self._environment, self)
        self._link = join_agent(self._environment, self._gang)
        if self._link is not None:
            self._link.total_steps = total
        self._objects.lend(partial(open_shared, environment=self._environment, link=self._link, gang=self._gang))
        device = self._link.device if self._link is not None and overlap else None
        self._writer = Writer(self._link, self._environment, name, Overlap(device, self._objects.optimizers))
        self._source: Source = (
            AgentSource(self._link)
            if self._link is not None
            else DirectSource(self._writer.store, job_folder(self._environment.job), run=self._environment.run)
        )
        self._ledger = Ledger(self._objects.settled, self._environment, name)
        self._referring = Referring(self._writer)
        self._planner = Planner(self._objects, self._environment, weights_only=weights_only, held=self._ledger)
        self._newest: int | None = None  # newest step staged, on its way or saved
        self._refused: int | None = None  # newest step that was to be saved, whatever the interval says, and was not
        self._resumer = Resumer(
            self._source, self._gang, self._environment, self._objects, name=name, weights_only=weights_only,
            # Fixed for what the run began with: who comes after it goes on from what it saved.
            resume_step=self._environment.resume_step if self._run_key not in _SAVED_THROUGH else None,
        )  # fmt: skip
        self._next_step = 0
        # What training goes on from: before its first save, committed steps above it are superseded. None: nothing
        # newer can be there. A training that never restores begins a history of its own.
        self._branch_step: int | None = _SCRATCH
        self._pace = PaceKeeper(
            time.monotonic(), mtbf_seconds=self._environment.mtbf_seconds,
            interruptions=self._environment.interruptions, trained_seconds=self._environment.trained_seconds,
        )  # fmt: skip
        self._announced = False
        self._measuring = Measuring(self._environment, objects)
        atexit.register(self._at_exit)

    # ------------------------------------------------------------ in the loop

    def step(self, step: int, metrics: Mapping[str, Any] | None = None) -> Saved | None:
        """Call after each step: tells that it is done, and saves when the interval says so.

        metrics: numbers (or tensors of one element, read once a second) to show beside the progress; what is neither
        is left out. Raises StepOutOfOrder.
        """
        self._pace.reach(step, time.monotonic())
        shown = self._measuring.metrics(metrics or {})
        if self._link is not None:
            self._link.progress(step, shown)
        saved = None
        if step >= self._next_step:
            saved = self._consult(Request(step=step))
        if not self._announced:
            self._announce()
        self._pace.leave(step, time.monotonic())
        return saved

    def save(self, step: int) -> Saved:
        """Saves this step now. Every rank must call it with the same step. Raises StepOutOfOrder."""
        saved = self._consult(Request(step=step, explicit=True))
        return saved if saved is not None else Saved(self._writer, step, saved=step == self._newest, stall_seconds=0.0)

    def restore(self, step: int | None = None) -> int:
        """Restores a committed step into the objects and returns it; 0 when there is none.

        Without `step`: the one that the launcher fixed, else the latest. If that turns out to be damaged, the error
        is logged with the file's name, and the next older committed step is restored instead. Raises
        CheckpointNotFound and CheckpointDamaged for an explicit step, CheckpointMismatch, CheckpointUnsafe,
        StorageError. CheckpointDamaged without an explicit step: the damage of the oldest step was the last of several,
        or in both tiers; the objects hold parts of it, and saving them is refused (ObjectsUndefined).
        """
        begin = time.perf_counter()
        self._writer.drain()  # what is restored is written over what is copied
        self._ledger.forget()
        resumed = self._resumer.resume(step)
        restored = resumed.step or 0
        self._branch_step = (_SCRATCH if resumed.step is None else restored) if resumed.is_rollback else None
        self._pace.restore(restored, time.monotonic())
        self._next_step = 0  # what was agreed on before may lie beyond the step after this one
        if self._link is not None:
            seconds = time.perf_counter() - begin
            self._link.tell(Restored(step=restored, tier=resumed.tier, time=time.time(), seconds=seconds))
            if resumed.step is not None and not self._announced:
                self._announce()  # all that will be saved is there: what slots leave is known from now on
        return restored

    def steps(self) -> list[CommittedStep]:
        """The committed steps that can be restored, oldest first. Raises StorageError."""
        return committed_steps(self._source)

    def close(self, timeout_seconds: float = 600.0) -> None:
        """Saves the last step if the interval left it out, waits until the newest save is committed, and says goodbye.

        Every rank must call it. Raises StorageUnavailable, also when the last save was refused because newer steps of
        earlier runs could not be marked superseded: on all ranks.
        """
        if self._closed:
            return
        try:
            last = self._pace.last_step
            if last is not None and (self._newest is None or last > self._newest):
                self._consult(Request(step=last, explicit=True, must_persist=True))
            if self._refused is not None and (self._newest is None or self._refused > self._newest):
                raise StorageUnavailable(
                    f"step {self._refused}, the last, is not saved: newer steps of earlier runs could not be marked "
                    "superseded, the log of rank 0 says why. What was committed before is untouched"
                )
            if self._newest is not None:
                self._writer.wait_committed(self._newest, timeout_seconds)
        finally:
            self._end()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is None:
            self.close()
        else:
            self._end()

    # ------------------------------------------------------------ saving

    def _consult(self, request: Request) -> Saved | None:
        began = time.perf_counter()
        if self._resumer.is_half_restored:
            raise ObjectsUndefined(
                "a restore failed when it had filled the objects in part: restore again, or begin with new objects, "
                "in a new process"
            )
        newest = _SAVED_THROUGH.get(self._run_key, request.step)
        if request.step < newest:
            raise StepOutOfOrder(
                f"step {request.step} comes after step {newest}, which this run has saved: what a run has saved "
                "is its history. To go back, restore the older step in a new process, before the first save"
            )
        asked = self._link is not None and self._link.save_requested
        if self._planner.plan is None:
            self._planner.prepare(
                request.step
            )  # so that the first report says how this rank divides what is replicated
        decision = self._gang.consult(self._report(), lambda reports: self._decide(request, reports))
        self._next_step = decision.next_step
        saved = None
        try:
            if decision.save:
                saved = self._save(decision, began)
            elif decision.skipped:
                log.warning("stepfast: step %s is not saved: every slot still waits to be persisted", request.step)
                if self._link is not None:
                    self._link.tell(Skipped(step=request.step))
            elif request.explicit and request.step != self._newest:
                self._refused = request.step
        finally:
            self._gang.publish(self._report(wants_save=asked))
        if decision.final:
            wait_to_be_stopped(self._link, self._writer, request.step)
        return saved

    def _decide(self, request: Request, reports: Sequence[RankReport]) -> Decision:
        asked = self._link is not None and self._link.save_requested
        final = asked or any(report.wants_save for report in reports)
        if request.step == self._newest and not final and not self._writer.has_failed(request.step):
            # Saved already: under the same names, so other bytes would be taken for damage.
            return Decision(step=request.step, save=False, next_step=self._next_step, time=time.monotonic())
        decision = decide_save(
            replace(request, final=final),
            reports,
            self._pace.pace(time.monotonic()),
            self._interval,
            on_busy=self._environment.on_busy,
            persist_interval_seconds=self._environment.persist_interval_seconds,
        )
        if decision.save and self._branch_step is not None and not self._leave_newer_steps(self._branch_step):
            return replace(decision, save=False, final=False, next_step=request.step + 1)
        return replace(decision, refers=self._referring.choose(request.step, reports)) if decision.save else decision

    def _leave_newer_steps(self, branch_step: int) -> bool:
        """Marks committed steps above the one that training went on from superseded; whether that succeeded.

        Rank 0 does it before it posts the decision to save, so before any rank's step could meet one of them: what
        comes after a rollback is another history, and I1 lets no step be of two.
        """
        if branch_step == _SCRATCH and self._link is not None:
            # Most often there is nothing: nobody waits to hear that.
            self._link.supersede_in_background(branch_step, _say_superseded)
            self._branch_step = None
            return True
        try:
            superseded = self._source.supersede_after(branch_step)
        except (StorageError, AgentError) as error:
            log.error("stepfast: nothing is saved until newer steps are marked superseded: %s", error)
            return False
        if superseded:
            since = "its beginning, without restore()" if branch_step == _SCRATCH else f"step {branch_step}"
            log.warning("stepfast: training goes on from %s: steps %s are superseded", since, list(superseded))
        self._branch_step = None
        return True

    def _report(self, *, wants_save: bool = False) -> RankReport:
        agent = self._writer.agent
        return RankReport(
            rank=self._environment.rank,
            step=agent.staged_step if agent is not None else None,
            slots=agent.slots if agent is not None else 0,
            persisting=agent.persisting if agent is not None else (),
            unpersisted=self._writer.unpersisted(),
            waited=self._link.waited_steps if self._link is not None else (),
            replicated=self._planner.plan.replicated_digest if self._planner.plan is not None else "",
            referable=self._ledger.steps,
            wants_save=wants_save or (self._link is not None and self._link.save_requested),
        )

    def _save(self, decision: Decision, began: float) -> Saved:
        plan, header_tail, sources = self._planner.prepare(decision.step, decision.refers)
        save = Save(
            step=decision.step, due=decision.due, drop=decision.drop, plan=plan, header_tail=header_tail,
            sources=sources, began=began,
        )  # fmt: skip
        self._writer.write(save)
        stall = time.perf_counter() - began
        is_first = decision.step > _SAVED_THROUGH.get(self._run_key, _SCRATCH)
        is_sure = is_first and (decision.due or self._link is None)
        self._ledger.record(decision.step, is_sure=is_sure, lost=self._writer.lost_among(self._ledger.steps))
        self._newest = _SAVED_THROUGH[self._run_key] = decision.step
        self._pace.save(decision.step, time.monotonic(), stall_seconds=stall, is_due=decision.due)
        self._measuring.lost(stall)
        return Saved(self._writer, decision.step, saved=True, stall_seconds=stall)

    def _announce(self) -> None:
        """Tells the agent, ahead of the first save, how large it will be."""
        self._announced = True
        if self._link is None or self._newest is not None:
            return
        plan, _, _ = self._planner.prepare(0)
        self._link.expect(plan.size_bytes, lambda slot: slot.prepare(plan))

    # ------------------------------------------------------------ the end

    def _end(self) -> None:
        if self._closed:
            return
        self._closed = True
        give_up(self._run_key, self)
        atexit.unregister(self._at_exit)
        self._measuring.close()
        self._writer.close()

    def _at_exit(self) -> None:
        # Without close() nothing is lost either: what is staged is the agent's by now, and what is copied will be.
        self._end()


def _say_superseded(steps: Sequence[int]) -> None:
    if steps:
        log.warning("stepfast: training began anew, without restore(): steps %s are superseded", list(steps))


def _checked_total(total_steps: int | None) -> int:
    """0: not said. Raises ValueError."""
    if total_steps is not None and (isinstance(total_steps, bool) or not 0 < total_steps <= MAX_STEP):
        raise ValueError(f"total_steps is {total_steps!r}: give how many steps training is to make, or leave it out")
    return total_steps or 0


def _interval_of(interval: Interval | str | None, environment: Environment) -> Interval:
    if interval is None:
        return environment.interval or Interval()
    if isinstance(interval, Interval):
        return interval
    if interval == "auto":
        return Interval()
    raise ValueError(f'interval is {interval!r}: give "auto", every(steps=…) or every(seconds=…)')


__all__ = ["Checkpointer", "CommittedStep", "Saved", "every"]
