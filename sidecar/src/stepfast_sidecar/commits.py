"""Makes the manifests of one job's steps once every node's part is there, by whichever node (I1, I2), and sees to it
that steps of two histories never meet.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stepfast.histories import SaveRow
from stepfast.messages import Committed, PersistFailed, Unreferable
from stepfast.step import JobKey
from stepfast_sidecar.history import History
from stepfast_sidecar.metrics import Metrics
from stepfast_sidecar.persisterprocess import PersisterLost, PersisterProcess, RequestFailed
from stepfast_sidecar.run import Run, newest_run
from stepfast_sidecar.tasks import Tasks

log = logging.getLogger(__name__)

_POLL_SECONDS = (0.05, 2.0)  # the first and the longest pause while other nodes' parts are waited for
_GRACE_SECONDS = 5.0  # how long agents other than rank 0's leave the manifest to it, while training goes on
_LONGEST_TURN_SECONDS = 600.0
_ANSWER_SECONDS = 2.0  # a storage that takes longer may have got the missing parts meanwhile
_LASTING = "RecordInvalid"  # parts that contradict each other, a manifest that is damaged: other failures may pass
_ASKING_NODES_A_SECOND = 1000  # how many agents of a gang may ask for one manifest in a second


def turn_seconds(node: int) -> float:
    """How long the agent of that node leaves the manifest to others: the higher its number, the longer.

    Agents that come into play at the same moment would each list and read what all the others wrote.
    """
    return min(_LONGEST_TURN_SECONDS, _GRACE_SECONDS * 2.0 ** (max(1, node).bit_length() - 1))


def longest_pause_seconds(nodes: int, *, leads: bool) -> float:
    """Between two looks at the storage. Nobody waits for those who do not write the manifest."""
    return _POLL_SECONDS[1] if leads else max(_POLL_SECONDS[1], nodes / _ASKING_NODES_A_SECOND)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCommit:
    """A step's commit: when it was (Unix seconds), and whether it is the asking run's own."""

    committed_time: float
    is_own: bool


class Commits:
    """The commits of one job on this node."""

    def __init__(
        self,
        job: JobKey,
        runs: dict[str, Run],
        persister: PersisterProcess,
        *,
        patience_seconds: float,
        tasks: Tasks,
        history: History,
        metrics: Metrics,
        give_up: Callable[[Run, int], None],
        changed: Callable[[bool], None],
    ) -> None:
        """`runs`: the newest last. `give_up` is called with a step that nobody completes any more, after
        `patience_seconds`.
        """
        self._job, self._runs, self._persister = job, runs, persister
        self._patience_seconds = patience_seconds
        self._tasks, self._history, self._metrics = tasks, history, metrics
        self._give_up, self._changed = give_up, changed

    def start(self, run: Run, step: int) -> None:
        """Commits a step whose part of this node is written."""
        self._tasks.start(self.commit(run, step), f"commit {step}")

    async def commit(self, run: Run, step: int) -> None:
        """Until the step's manifest is there, by whomever, or nobody will complete it any more."""
        await run.may_commit.wait()
        begin, failures, pause = time.monotonic(), 0, _POLL_SECONDS[0]
        has_looked_since_over = False
        while True:
            waited = time.monotonic() - begin
            is_turn = run.leads(step) or waited > turn_seconds(run.node)
            # The agents of a gang that is over may all end once their parts are there: who wrote the last commits.
            may_write = is_turn or (run.is_over and not has_looked_since_over)
            has_looked_since_over = run.is_over
            is_late = waited > self._patience_seconds
            # Of a step that some ranks alone share in there is no file of every rank to wait for.
            is_eager = run.leads(step) or (is_turn and (is_late or run.flow.sharers_of(step) is not None))
            try:
                answer = await self._ask(run, step, may_write=may_write, is_eager=is_eager)
            except (PersisterLost, RequestFailed) as error:
                if self._persister.is_closed:
                    return
                failures += 1
                run.incomplete.discard(step)
                self._failed(run, step, error)
                if is_late and isinstance(error, RequestFailed) and error.kind == _LASTING:
                    log.error("%s: step %s is given up: what its records say does not change", self._job, step)
                    run.commit_failures.pop(step)
                    self._give_up(run, step)
                    return
                await asyncio.sleep(self._persister.retry_seconds(failures, error))
                continue
            run.commit_failures.pop(step, None)
            if answer.get("missing"):
                self._refused(run, step, answer)
                return
            self._note_incomplete(run, step)
            # Another run's manifest may be one that rank 0, on another node, is about to mark superseded.
            if answer["committed"] and (run.leads(step) or is_late or answer["run"] == run.flow.run):
                self._committed(run, step, answer)
                return
            if not answer["committed"] and is_late and self._is_overtaken(run, step):
                log.error("%s: step %s is given up: another node never wrote its part of it", self._job, step)
                run.incomplete.discard(step)
                self._give_up(run, step)
                return
            await asyncio.sleep(pause)
            pause = min(longest_pause_seconds(run.nodes, leads=run.leads(step)), pause * 2)

    async def find(self, run: Run, step: int, tell: Callable[[str], None]) -> FoundCommit | None:
        """The commit of a step of which this node holds nothing, or None if it was not committed; `tell` hears why it
        is not known yet.

        Raises PersisterLost, RequestFailed when the agent ends.
        """
        answer = await self._persister.insist("commit", tell, step=step, run=run.flow.run, may_write=False)
        if not answer["committed"]:
            return None
        return FoundCommit(committed_time=answer["time"], is_own=answer["run"] == run.flow.run)

    async def supersede_after(self, run: Run, step: int) -> tuple[int, ...]:
        """Rolls the job back to the step that the run goes on from; returns the superseded ones.

        Nothing of the run is committed meanwhile: its steps must not meet those of another history.
        """

        def tell(reason: str) -> None:
            log.warning("%s: steps above %s are not superseded yet: %s", self._job, step, reason)

        run.may_commit.clear()
        try:
            answer = await self._persister.insist("supersede", tell, step=step, run=run.flow.run)
        finally:
            run.may_commit.set()
        if answer["steps"]:
            log.warning("%s: steps %s are superseded: training goes on from step %s", self._job, answer["steps"], step)
        return tuple(answer["steps"])

    async def _ask(self, run: Run, step: int, *, may_write: bool, is_eager: bool) -> Mapping[str, Any]:
        """Whether the step is committed by now. An answer that keeps the agent waiting may be another than the last."""
        late = asyncio.get_running_loop().call_later(_ANSWER_SECONDS, self._forget_incomplete, run, step)
        try:
            return await self._persister.request(
                "commit", step=step, run=run.flow.run, may_write=may_write, is_eager=is_eager
            )
        finally:
            late.cancel()

    def _note_incomplete(self, run: Run, step: int) -> None:
        if step not in run.incomplete:
            run.incomplete.add(step)
            self._changed(False)

    def _forget_incomplete(self, run: Run, step: int) -> None:
        if step in run.incomplete:
            run.incomplete.discard(step)
            self._changed(True)

    def _is_overtaken(self, run: Run, step: int) -> bool:
        """Whether training stands on something newer than a step that not all nodes have persisted. What an earlier run
        committed is no such thing: this one may have gone back behind it.
        """
        return not self._is_newest(run) or (run.persisted_step or 0) > step

    def _is_newest(self, run: Run) -> bool:
        return newest_run(self._runs) == run.flow.run

    def _committed(self, run: Run, step: int, answer: Mapping[str, Any]) -> None:
        run.flow.committed(step)
        run.incomplete.discard(step)
        # By this node's clock, as all that it tells: the manifest may have its time by another node's. The commit was
        # after the save, and may have been long ago: an agent that restarts hears of what it held.
        saved_time, _ = run.saved.get(step, (answer["time"], 0))
        run.count_commit(step, min(max(answer["time"], saved_time), time.time()), answer["size"])
        self._metrics.committed()
        if answer["run"] != run.flow.run:
            run.push(Unreferable(steps=(step,)))  # first: the rank asks what it may refer to at any moment
        run.push(Committed(step=step, committed_time=answer["time"]))
        self._changed(True)
        if run.leads(step):
            self._history.note(self._row(run, step, answer))
            if self._is_newest(run):
                self._tasks.start(self._retain(run, step), "retention")

    def _row(self, run: Run, step: int, answer: Mapping[str, Any]) -> SaveRow:
        """What became of this run's save: of two runs that saved the step, it is the save of one that is kept."""
        saved_time, size_bytes = run.saved.get(step, (answer["time"], 0))
        if answer["run"] != run.flow.run:
            return run.history_row(step, "Dropped", None, size_bytes)
        return run.history_row(step, "Committed", answer["time"] - saved_time, answer["size"])

    async def _retain(self, run: Run, step: int) -> None:
        """After a commit; cannot harm what is committed."""
        try:
            restored = {session.restored_step for session in run.sessions.values()}
            # What is on its way may refer to steps that nothing committed refers to, or that are old.
            on_their_way = {step for other in self._runs.values() for step in other.flow.referred_steps()}
            referable = {step for session in run.sessions.values() for step in session.referable}
            started = {step for step in (run.resume_step, *restored) if step}
            protected = sorted(started | on_their_way | referable)
            await self._persister.request("retain", run=run.flow.run, max_to_keep=run.max_to_keep, protected=protected)
        except (PersisterLost, RequestFailed) as error:
            log.warning("%s: after the commit of step %s: %s", self._job, step, error)

    def _refused(self, run: Run, step: int, answer: Mapping[str, Any]) -> None:
        """A step that refers to one that is gone can never be committed: it must not be waited for, nor any be like it.

        Whoever removed that one did so past retention, which leaves what steps on their way refer to.
        """
        log.error("%s: step %s is given up: %s", self._job, step, answer["reason"])
        run.incomplete.discard(step)
        self._metrics.failed("ReferenceMissing")
        run.push(Unreferable(steps=tuple(answer["missing"])))
        run.push(PersistFailed(step=step, reason=answer["reason"]))
        self._give_up(run, step)

    def _failed(self, run: Run, step: int, error: PersisterLost | RequestFailed) -> None:
        reason = self._persister.why(error)
        if step not in run.commit_failures:
            log.error("%s: step %s was not committed: %s", self._job, step, reason)
        run.commit_failures[step] = f"step {step} is persisted but not committed: {reason}"
        self._metrics.failed(error.kind if isinstance(error, RequestFailed) else "PersisterLost")
        run.push(PersistFailed(step=step, reason=reason))
        self._changed(False)
