"""Everything the agent knows of one job: its runs, its slots, its persister. Carries out what `flow` decides."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, assert_never

from stepfast.errors import ProtocolError
from stepfast.layout import job_folder, parse_data_path
from stepfast.messages import Committed, Dropped, Hello, Launching, PersistFailed, Unreferable
from stepfast.nodestatus import JobStatus
from stepfast.ranks import EVERY_RANK
from stepfast.slot import SlotRecord, SlotState
from stepfast.step import JobKey
from stepfast_sidecar.adoption import adopt_slots
from stepfast_sidecar.commits import Commits
from stepfast_sidecar.config import Config
from stepfast_sidecar.fetched import FetchedFiles
from stepfast_sidecar.flow import RunFlow
from stepfast_sidecar.flushes import Flushes
from stepfast_sidecar.history import History
from stepfast_sidecar.holdings import DropStep, Effect, Freed, Holding, Persist, PersistWindow, StagedTwice
from stepfast_sidecar.jobmirrors import JobMirrors, MirrorRoom
from stepfast_sidecar.jobslots import JobSlots
from stepfast_sidecar.lent import JobLent
from stepfast_sidecar.memory import MemoryTier, SlotFile
from stepfast_sidecar.metrics import FlushCause, Metrics
from stepfast_sidecar.persisterprocess import PersisterLost, PersisterProcess, RequestFailed
from stepfast_sidecar.run import Run, Session
from stepfast_sidecar.tasks import Tasks
from stepfast_sidecar.tenants import persister_environment

log = logging.getLogger(__name__)

_RUNS_REMEMBERED = 8
_PERSISTER_SHARE = 0.2  # of the time that a job keeps its memory: who comes back after that waits for a new one


class Room:
    """One job on this node."""

    def __init__(
        self,
        job: JobKey,
        storage_uri: str,
        credentials: Mapping[str, str],
        *,
        config: Config,
        memory: MemoryTier,
        mirror_room: MirrorRoom,
        metrics: Metrics,
        changed: Callable[[bool], None],
    ) -> None:
        self.job = job
        self.storage_uri, self.credentials = storage_uri, credentials
        self.runs: dict[str, Run] = {}  # the newest last
        self.slots = JobSlots(job, memory, self.runs)
        self.lent = JobLent(job, memory)
        self.mirrors = JobMirrors(job, memory, mirror_room)
        self.fetched = FetchedFiles(job, memory)
        self._config, self._memory, self._metrics = config, memory, metrics
        self._changed = changed  # called with True when the change must be published at once
        self._tasks = Tasks(str(job))
        self._flushes = Flushes(metrics, self._tasks, config.flush_timeout_seconds)
        arguments = ["--folder", job_folder(job), "--storage-deadline", str(config.storage_deadline_seconds)]
        if config.spool_folder is not None:
            arguments += ["--spool-folder", str(config.spool_folder)]
        self.persister = PersisterProcess(
            storage_uri,
            arguments,
            on_lost=self._persister_lost,
            environment=persister_environment(os.environ, credentials),
            retry_limit_seconds=config.retry_limit_seconds,
        )
        self.freed = asyncio.Condition()
        self._opened_time = time.time()
        self._foreseen_time = 0.0  # when ranks were last said to be about to start
        self._history = History(job, self.persister, self._tasks)
        self._commits = Commits(
            job,
            self.runs,
            self.persister,
            patience_seconds=config.commit_patience_seconds,
            tasks=self._tasks,
            history=self._history,
            metrics=metrics,
            give_up=self._give_up,
            changed=changed,
        )

    def use_credentials(self, credentials: Mapping[str, str]) -> None:
        """What the job's pods bring along to open their storage with, from now on."""
        if credentials == self.credentials:
            return
        log.info("%s: other credentials from now on", self.job)
        self.credentials = credentials
        self.persister.use_environment(persister_environment(os.environ, credentials))

    # ------------------------------------------------------------ runs and ranks

    @property
    def _all_runs(self) -> list[Run]:
        """With those of other nodes, of which something is mirrored here."""
        return [*self.runs.values(), *self.mirrors.runs]

    def _files(self, run: Run) -> JobSlots | JobMirrors:
        return self.slots if run.origin is None else self.mirrors

    def held_file(self, path: str) -> SlotFile | None:
        """The slot, of this node's ranks or another's, that holds exactly that persisted file, if one does."""
        wanted = parse_data_path(path)
        return None if wanted is None else self.slots.held_file(wanted) or self.mirrors.held_file(wanted)

    def session_of(self, hello: Hello) -> Session | None:
        """The rank as it was known before this hello. Raises ProtocolError when the run is of another size."""
        run = self.runs.get(hello.run)
        if run is not None and run.world_size != hello.world_size:
            raise ProtocolError(f"{hello.run} has {run.world_size} ranks, not {hello.world_size}")
        return run.sessions.get(hello.rank) if run is not None else None

    def run_of(self, hello: Hello) -> Run:
        """The run that a rank says hello from, new or known."""
        run = self.runs.get(hello.run)
        if run is None:
            self._tasks.start(self.persister.prepare(), "persister")  # what the ranks ask first is what is committed
            self._forget_old_runs()
            self.lent.begin(hello.run)
            run = self.runs[hello.run] = Run(
                flow=RunFlow(hello.run, hello.local_world_size), world_size=hello.world_size
            )
        run.resume_step, run.max_to_keep = hello.resume_step, hello.max_to_keep
        run.flow.local_world_size = hello.local_world_size
        # A step is whole when all ranks of the node staged it: what a restarted agent cannot see in the slots.
        sizes = {name: known.flow.local_world_size for name, known in list(self.runs.items())[-_RUNS_REMEMBERED:]}
        self._memory.remember(
            self.job,
            {"storageUri": self.storage_uri, "localWorldSizes": sizes, "credentials": dict(self.credentials)},
        )
        return run

    def _forget_old_runs(self) -> None:
        """A job that restarts for ever must not grow here: of attempts long over only the storage's account stays."""
        for name in [name for name, run in list(self.runs.items())[:-_RUNS_REMEMBERED] if run.is_empty]:
            del self.runs[name]

    def adopt(self, files: Mapping[int, list[SlotFile]], local_world_sizes: Mapping[str, object]) -> None:
        """Takes over what an earlier agent left: what was staged is persisted, what was persisted may be restored."""
        self.mirrors.adopt()
        adopt_slots(self.slots, self.runs, files, local_world_sizes)
        for run in self.runs.values():
            for step in run.flow.uncommitted_parts():
                self._commits.start(run, step)

    async def foresee(self, launching: Launching, fetch: Callable[[str], Awaitable[object | None]]) -> None:
        """Ranks are about to start: what they will restore and memory does not hold is fetched meanwhile, with `fetch`
        from other nodes' memory, else from the storage.
        """
        self._foreseen_time = time.time()
        step, first, ranks = launching.resume_step, launching.first_rank, launching.ranks
        with contextlib.suppress(PersisterLost, RequestFailed):  # the ranks will hear of it, should it last
            found = await self.persister.request("restorable", step=step, first_rank=first, ranks=ranks)
            for path in found["paths"]:
                if self.held_file(path) is None and await fetch(path) is None:
                    await self.persister.request("foresee", path=path)

    def flush(self, run: Run, cause: FlushCause | None = None) -> None:
        """Everything that the run holds goes to the storage; with a `cause` it is measured how long that takes."""
        self.carry_out(run, run.flow.flush())
        if cause is not None:
            self._flushes.begin(run.flow, cause)

    async def want(self, run: Run, session: Session, step: int) -> None:
        """Somebody waits for the step's commit: it is due, or he is told at once what became of it."""
        if run.flow.is_known(step) and not run.flow.is_committed(step):
            self.carry_out(run, run.flow.want(step))
            return

        def tell(reason: str) -> None:
            session.peer.send(PersistFailed(step=step, reason=reason))

        try:
            found = await self._commits.find(run, step, tell)
        except (PersisterLost, RequestFailed):
            return  # the agent ends
        if found is not None:
            if not found.is_own:
                session.peer.send(Unreferable(steps=(step,)))
            session.peer.send(Committed(step=step, committed_time=found.committed_time))
        else:
            session.peer.send(Dropped(step=step))  # its slot holds a newer one by now

    async def supersede_after(self, run: Run, step: int) -> tuple[int, ...]:
        """Rolls the job back to the step that the run goes on from; returns the superseded ones."""
        return await self._commits.supersede_after(run, step)

    def rank_ended(self, run: Run, session: Session) -> None:
        """A rank's connection is over. Without goodbye its process died: what it staged is flushed."""
        session.alive = False
        session.ended_time = time.time()
        if run.is_over:
            self.lent.end(run.flow.run)
        if not session.clean:
            log.warning("rank %s of %s died (pid %s)", session.hello.rank, session.hello.run, session.hello.pid)
            self.flush(run, FlushCause.RANK_DIED)
        elif run.is_over:
            self.flush(run, FlushCause.RUN_OVER)
        self._changed(True)

    # ------------------------------------------------------------ effects

    def carry_out(self, run: Run, effects: list[Effect]) -> None:
        """Does what the flow decided."""
        for effect in effects:
            match effect:
                case Persist():
                    self._tasks.start(self._persist(run, effect), f"persist {effect.step}")
                case PersistWindow():
                    self._tasks.start(self._persist_window(run, effect.holding), "persist window")
                case Freed():
                    self.wake()
                case DropStep():
                    self._dropped(run, effect)
                case StagedTwice():
                    self._files(run).note(effect.holding, SlotState.DROPPED)
                case _:
                    assert_never(effect)
        self._changed(False)

    async def _persist(self, run: Run, effect: Persist) -> None:
        records = [holding.record for holding in effect.holdings if holding.record is not None]
        if not records:
            node = min(session.hello.node for session in run.sessions.values())
            replicated, saved_time = run.replicated, run.saved.get(effect.step, (time.time(), 0))[0]
        else:
            node, replicated = min(record.node for record in records), records[0].replicated
            saved_time = max(record.saved_time for record in records)
        begin = time.monotonic()
        try:
            answer = await self.persister.request(
                "persist",
                step=effect.step,
                run=run.flow.run,
                node=node,
                world_size=run.world_size,
                replicated=replicated,
                saved_time=saved_time,
                ranks=effect.ranks,
                sharers=str(effect.sharers) if effect.sharers is not None else EVERY_RANK,
                tag=effect.tag,
                refers=effect.refers,
                slots=[self._slot_ref(run, holding) for holding in effect.holdings],
                streamed=effect.streamed,
                spared=self._on_their_way(run),
            )
        except PersisterLost:
            return  # the flow heard of it already, and a retry is under way
        except RequestFailed as error:
            self._failed(run, effect.step, error)
            return
        self._metrics.persisted(answer["size"], time.monotonic() - begin)
        run.saved[effect.step] = (saved_time, answer["size"])
        for holding in effect.holdings:
            self._files(run).note(holding, SlotState.PERSISTED)
        run.failures, run.persist_failure = 0, None
        self.carry_out(run, run.flow.persisted(effect.step))
        await self._commits.commit(run, effect.step)

    async def _persist_window(self, run: Run, holding: Holding) -> None:
        record, session = holding.record, run.sessions.get(holding.rank)
        if record is None or session is None:
            return
        if record.window_begin > 0:
            await session.stream_open.wait()
        while run.flow.holdings.get((holding.rank, holding.slot)) == holding:  # else it went with the persister
            try:
                answer = await self.persister.request(
                    "window",
                    step=record.step,
                    run=record.run,
                    world_size=record.world_size,
                    slot=self._slot_ref(run, holding),
                    spared=self._on_their_way(run),
                )
            except PersisterLost:
                return
            except RequestFailed as error:
                run.failures += 1
                run.persist_failure = f"step {record.step} is not persisted: {self.persister.why(error)}"
                self._metrics.failed(error.kind)
                self._changed(False)
                if error.kind in ("SlotDamaged", "UploadLost"):
                    log.error("%s: step %s has to be stored anew: %s", self.job, record.step, error)
                    session.break_stream()
                    self.carry_out(run, run.flow.window_lost(holding.rank, holding.slot, record))
                    return
                await asyncio.sleep(self.persister.retry_seconds(run.failures, error))
                continue
            self._window_persisted(run, holding, record, answer["file"])
            session.stream_open.set()
            return

    def _window_persisted(self, run: Run, holding: Holding, record: SlotRecord, file: dict[str, Any] | None) -> None:
        run.failures, run.persist_failure = 0, None
        run.saved[record.step] = (record.saved_time, 0)
        self.carry_out(run, run.flow.window_persisted(holding.rank, holding.slot, file=file))

    def _failed(self, run: Run, step: int, error: RequestFailed) -> None:
        reason = self.persister.why(error)
        run.persist_failure = f"step {step} is not persisted: {reason}"
        run.failures += 1
        self._metrics.failed(error.kind)
        log.error("%s: step %s was not persisted: %s", self.job, step, reason)
        run.push(PersistFailed(step=step, reason=reason))
        if error.kind == "SlotDamaged":
            self._give_up(run, step)
            return
        self.carry_out(run, run.flow.persist_failed(step))
        self._tasks.start(self._retry(run, error), "retry")

    async def _retry(self, run: Run, error: PersisterLost | RequestFailed) -> None:
        await asyncio.sleep(self.persister.retry_seconds(run.failures, error))
        self.carry_out(run, run.flow.retry())

    def _persister_lost(self, error: PersisterLost) -> None:
        self._metrics.failed("PersisterLost")
        for run in self._all_runs:
            for session in run.sessions.values():
                session.break_stream()
            if run.flow.is_persisting:
                run.failures += 1
                run.persist_failure = "the persister died; it is started again"
            self.carry_out(run, run.flow.persister_lost())
            self._tasks.start(self._retry(run, error), "retry")

    def give_up_incomplete(self, run: Run) -> None:
        """Steps of a dead run that some rank of this node never staged whole, and never will."""
        if any(session.alive for session in run.sessions.values()):
            return
        for step in run.flow.incomplete_steps():
            log.warning("step %s of %s is given up: a rank of this node died before it staged it", step, run.flow.run)
            self._give_up(run, step)

    def _give_up(self, run: Run, step: int) -> None:
        self.carry_out(run, run.flow.give_up(step))

    def _dropped(self, run: Run, effect: DropStep) -> None:
        step = effect.step
        for holding in effect.holdings:
            self._files(run).note(holding, SlotState.DROPPED)
        run.dropped += 1
        self._metrics.dropped()
        run.push(Dropped(step=step))
        if run.leads(step):
            self._history.note(run.history_row(step, "Dropped", None, run.saved.get(step, (0.0, 0))[1]))

    def wake(self) -> None:
        """Lets waiting reservations look again."""
        self._tasks.start(self._wake(), "wake")

    async def _wake(self) -> None:
        async with self.freed:
            self.freed.notify_all()

    def _on_their_way(self, run: Run) -> list[str]:
        """The other runs of which something has yet to be persisted or committed."""
        return [other.flow.run for other in self._all_runs if other is not run and other.flow.pending_steps()]

    def _slot_ref(self, run: Run, holding: Holding) -> dict[str, Any]:
        record = holding.record
        if record is None:
            raise ValueError("a slot without a record cannot be persisted")
        return {
            "path": str(self._files(run).file(holding).path), "seq": holding.seq, "rank": holding.rank,
            "name": record.name, "file_bytes": record.file_bytes, "window_begin": record.window_begin,
            "window_bytes": record.window_bytes,
        }  # fmt: skip

    # ------------------------------------------------------------ telling

    def status(self) -> list[JobStatus]:
        """The newest two runs, and whichever has something left to persist or to commit, the newest last. Of those that
        are only mirrored here, too.
        """
        others = {run.flow.run: run.world_size for run in self.mirrors.runs if run.flow.run not in self.runs}
        mirrored = [Run(flow=RunFlow(name, 0), world_size=size) for name, size in others.items()]
        told = [self.mirrors.with_mirrors(run.status(self.job)) for run in (*mirrored, *self.runs.values())]
        return [*(status for status in told[:-2] if status.pending_steps), *told[-2:]]

    @property
    def memory_bytes(self) -> int:
        """What the job takes of the memory tier: slots, and what its ranks borrowed beside them."""
        return self.slots.size_bytes + self.lent.size_bytes + self.mirrors.size_bytes + self.fetched.size_bytes

    @property
    def is_living(self) -> bool:
        """Whether some rank of the job is connected."""
        return any(session.alive for run in self.runs.values() for session in run.sessions.values())

    @property
    def metrics(self) -> Mapping[str, float]:
        """What the first rank that lives here tells beside its steps. Read by other threads, too."""
        told = [session for run in list(self.runs.values()) for session in list(run.sessions.values())]
        living = [session for session in told if session.alive]
        return min(living, key=lambda session: session.hello.rank).metrics if living else {}

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to persist, to commit or to note."""
        return self._history.is_idle and not any(run.flow.pending_steps() for run in self._all_runs)

    @property
    def waits_for_others(self) -> bool:
        """Whether nothing is left to be done here: the steps not committed lack another node's part.

        Nobody has to stay for those: who writes a step's last part commits it.
        """
        return self._history.is_idle and all(run.waits_for_others for run in self._all_runs)

    @property
    def left_time(self) -> float:
        """When its last rank here ended (Unix seconds), if none lives; adopted from an earlier agent: when that was."""
        ends = [session.ended_time or 0.0 for run in self.runs.values() for session in run.sessions.values()]
        return max(ends, default=self._opened_time)

    @property
    def lag_seconds(self) -> float:
        """The age of the oldest step that waits to be persisted or committed; 0 when there is none."""
        saved = [run.saved[step][0] for run in self._all_runs for step in run.flow.pending_steps() if step in run.saved]
        return max(0.0, time.time() - min(saved)) if saved else 0.0

    def rest(self) -> None:
        """Ends the persister once nobody has needed it for a while: forty megabytes for each job that was here. Not
        while it keeps what ranks are to restore that have yet to come.
        """
        unused_seconds = self._config.idle_seconds * _PERSISTER_SHARE
        needed_until = max(self.left_time + unused_seconds, self._foreseen_time + self._config.idle_seconds)
        if self.persister.pid is None or not self.is_idle or self.is_living or time.time() < needed_until:
            return
        self._tasks.start(self.persister.rest(unused_seconds), "rest")

    def leave(self) -> None:
        """Frees at once what is held of the job; nothing is tried again after that. What is left is to be closed."""
        self._tasks.end()  # what they would persist is gone
        self.slots.release_all()
        self.lent.take_back()
        self.mirrors.release_all()
        self.fetched.release_all()

    async def close(self) -> None:
        """Ends the persister and everything under way."""
        await self.persister.close()
        await self._tasks.cancel()
