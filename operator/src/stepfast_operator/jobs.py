"""Every job's loop: a task of its own that reconciles when something changed, or when its last decision wanted to be
asked again. Whatever goes wrong with one job is its own: it is said, and tried again ever less often.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from stepfast.errors import SpecError, StepfastError
from stepfast.kube import Conflict, NotFound
from stepfast.step import JobKey
from stepfast_operator import clusterjob, labels
from stepfast_operator.backends.kubernetes import Cluster, KubernetesBackend, check_storage, write_status
from stepfast_operator.clusterjob import ClusterJob
from stepfast_operator.document import JSON
from stepfast_operator.eventlog import EventLog
from stepfast_operator.lease import NotLeading
from stepfast_operator.metrics import Metrics
from stepfast_operator.reconcile import Pass, reconcile
from stepfast_operator.record import State, Status
from stepfast_operator.status import refuse
from stepfast_operator.turns import Lane, Turn
from stepfast_operator.writepace import progress_seconds

log = logging.getLogger(__name__)

_LONGEST_WAIT_SECONDS = 30.0
_FIRST_PAUSE_SECONDS = 0.2
_LEAST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_COUNT_SECONDS = 1.0
_UNHURRIED_SECONDS = 5.0  # whoever wants to be looked at again no sooner does not mind a little later


class Jobs:
    """All jobs that there are, by uid."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._loops: dict[str, JobLoop] = {}
        self._uids: dict[JobKey, str] = {}
        self._cluster: Cluster | None = None
        self._events: EventLog | None = None
        self._waiting: dict[str, JSON] = {}  # seen before everything else was read
        self._under_way, self._counted_time = 0, -math.inf

    def start(self, cluster: Cluster, events: EventLog) -> None:
        """From here on jobs are reconciled: all that a decision looks at has been read, and the Lease is ours."""
        self._cluster, self._events = cluster, events
        waiting, self._waiting = self._waiting, {}
        # Those first to which something happened while nobody looked.
        for uid in sorted(waiting, key=cluster.view.is_running):
            self.take(waiting[uid])

    def take(self, document: JSON) -> None:
        """A TrainingJob that is there, as it is now."""
        document = clusterjob.trimmed(document)
        uid = document["metadata"]["uid"]
        if self._cluster is None or self._events is None:
            self._waiting[uid] = document
            return
        loop = self._loops.get(uid)
        if loop is None:
            loop = self._loops[uid] = JobLoop(
                self._cluster, self._events, self._metrics, document, self._progress_seconds
            )
            self._uids[clusterjob.job_key_of(document)] = uid
            loop.task = asyncio.create_task(loop.run(), name=f"job {uid}")
        loop.take(document)

    def forget(self, uid: str) -> None:
        """A TrainingJob that is gone."""
        self._waiting.pop(uid, None)
        loop = self._loops.pop(uid, None)
        if loop is None:
            return
        if self._uids.get(loop.key) == uid:
            del self._uids[loop.key]
        if loop.task is not None:
            loop.task.cancel()

    def wake(self, uid: str) -> None:
        if (loop := self._loops.get(uid)) is not None:
            loop.wake()

    def wake_job(self, job: JobKey) -> None:
        self.wake(self._uids.get(job, ""))

    def wake_job_later(self, job: JobKey) -> None:
        """Nothing but progress is to be seen of it."""
        if (loop := self._loops.get(self._uids.get(job, ""))) is not None:
            loop.wake_later()

    def _progress_seconds(self) -> float:
        """How often a job's progress is looked at, by how many jobs make any, and by how busy the API server is."""
        now = time.monotonic()
        if now - self._counted_time > _COUNT_SECONDS:
            self._under_way, self._counted_time = sum(not loop.is_over for loop in self._loops.values()), now
        answer_seconds = self._cluster.kube.change_seconds if self._cluster is not None else 0.0
        return progress_seconds(self._under_way, answer_seconds)

    def is_under_way(self, job: JobKey) -> bool:
        """Whether there is such a job, and anything is still to be done for it: also while it is being suspended."""
        loop = self._loops.get(self._uids.get(job, ""))
        return loop is not None and not loop.is_over

    def statuses(self) -> dict[JobKey, Status]:
        """How every job is, for the metrics."""
        return {loop.key: loop.status for loop in self._loops.values()}

    async def close(self) -> None:
        """Ends every loop where it stands: the next operator goes on from there."""
        tasks = [loop.task for loop in self._loops.values() if loop.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class JobLoop:
    """One job's task. `status` is what is written, or about to be; nobody else writes it (I8)."""

    def __init__(
        self,
        cluster: Cluster,
        events: EventLog,
        metrics: Metrics,
        document: JSON,
        progress_seconds: Callable[[], float],
    ) -> None:
        self._cluster, self._events, self._metrics = cluster, events, metrics
        self._progress_seconds = progress_seconds
        self._looked_time = -math.inf
        self._later: asyncio.TimerHandle | None = None
        self._is_read = False  # its status
        # More is due than progress: something happened, or the last look wanted another one soon.
        self._is_urgent, self._due_time = True, -math.inf
        self._turn = Turn()
        self.key = clusterjob.job_key_of(document)
        self._replace(document)
        self._backend: KubernetesBackend | None = None
        self._changed = asyncio.Event()
        self._failures = 0
        self.status = Status()
        self.task: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, or is suspended to the end. Not before its status was read."""
        return self.status.is_terminal or self.status.state is State.SUSPENDED

    def take(self, document: JSON) -> None:
        """The job as it is now. What the operator itself has written wakes nobody."""
        if self._is_read and not clusterjob.has_news(self._document, document):
            self._document["metadata"]["resourceVersion"] = document["metadata"]["resourceVersion"]
            return
        self._replace(document)
        self.wake()

    def _replace(self, document: JSON) -> None:
        # The status is read once, and is our own word from then on.
        self._document = {key: value for key, value in document.items() if key != "status"}
        self._written = document.get("status") if not self._is_read else None
        self._wanted: tuple[ClusterJob, SpecError | None] | None = None  # what the document asks for, once it was read

    def wake(self) -> None:
        self._is_urgent = True
        self._turn.hurry()
        self._changed.set()
        if self._backend is not None:
            self._backend.changed.set()

    def wake_later(self) -> None:
        """So that its progress is looked at as often as is due."""
        if self._later is None:
            wait = max(0.0, self._looked_time + self._progress_seconds() - time.monotonic())
            self._later = asyncio.get_running_loop().call_later(wait, self._changed.set)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            await self._run()
        finally:
            self._note_look()

    async def _run(self) -> None:
        while True:
            try:
                async with self._in_turn() as turn:
                    self._note_look()
                    if not self._is_read:
                        self.status = clusterjob.status_of({"status": self._written})
                        self._is_read, self._written = True, None
                    wait = await self._pass(turn)
                self._failures = 0
            except NotFound:
                wait = _LONGEST_WAIT_SECONDS  # it was deleted just now: its end is on its way to us
            except Conflict:
                wait = 0.1  # somebody was faster: what they wrote is on its way to us
            except NotLeading:
                wait = 1.0
            except StepfastError as error:
                wait = self._pause(error)
                # What changes meanwhile may mend it, but a request that is refused is not repeated at every change.
                await asyncio.sleep(min(wait, _LEAST_PAUSE_SECONDS))
            except Exception as error:  # the loop's outermost frame: a job without one is never looked at
                log.exception("%s: a mistake of the operator's", self.key)
                wait = self._pause(error)
                await asyncio.sleep(min(wait, _LEAST_PAUSE_SECONDS))
            await self._until(wait)

    def _note_look(self) -> None:
        """What was to be looked at later is seen now."""
        self._changed.clear()
        self._is_urgent, self._due_time = False, -math.inf  # a look that fails is repeated as soon as may be
        self._looked_time = time.monotonic()
        if self._later is not None:
            self._later.cancel()
            self._later = None

    async def _until(self, seconds: float) -> None:
        """Returns when there is something to look at, in so many seconds at most."""
        await until(self._changed, seconds)
        self._is_urgent = self._is_urgent or self._due_time <= time.monotonic()

    def _lane(self) -> Lane:
        if not self._is_urgent:
            return Lane.PROGRESS
        attempt = self.status.open_attempt
        if attempt is None or self._backend is None or self._backend.has_launched(attempt.run):
            return Lane.URGENT
        if self._failures:
            return Lane.RETRY  # it keeps no other waiting
        return Lane.RELAUNCH if attempt.attempt > 1 else Lane.LAUNCH

    @asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[Turn]:
        begin = time.perf_counter()
        self._turn = self._cluster.turns.ask(self._lane())
        async with self._turn as turn:
            self._metrics.waited(time.perf_counter() - begin)
            yield turn

    async def _pass(self, turn: Turn) -> float:
        """One look; returns how long at most to wait for the next one."""
        job, refused = self._read()
        backend = self._backend = self._backend or self._new_backend(job)
        backend.take(job)
        backend.turn, backend.pace.progress_seconds = turn, self._progress_seconds()
        if refused is not None:
            await self._refuse(refused)
        elif not job.is_deleted:
            await self._hold(job)
        begin = time.perf_counter()
        try:
            seen = await reconcile(backend, self.status)
        except SpecError as error:
            if not error.field.startswith("spec"):
                raise  # not the job's fault
            await self._refuse(error)
            return 0.0
        self._metrics.reconciled(time.perf_counter() - begin - turn.waited_seconds)
        self.status = seen.after
        self._tell(seen)
        if job.is_deleted and self.is_over and not backend.is_alive:
            await self._let_go(job)
        await backend.tell_rings(is_over=self.is_over)
        await backend.write_held_back()
        due = seen.decision.requeue_seconds
        self._due_time = time.monotonic() + due if due is not None and due < _UNHURRIED_SECONDS else math.inf
        waits = (_LONGEST_WAIT_SECONDS, due, backend.held_back_seconds())
        return min(wait for wait in waits if wait is not None)

    def _new_backend(self, job: ClusterJob) -> KubernetesBackend:
        """Progress that was made while there was no operator is written down as it is at any time: not for all jobs at
        once, in whose midst what happened to others meanwhile would have to wait.
        """
        backend = KubernetesBackend(self._cluster, job)
        if self.status != Status():
            backend.pace.note_written(self.status, time.monotonic() - random.uniform(0.0, self._progress_seconds()))
        return backend

    def _read(self) -> tuple[ClusterJob, SpecError | None]:
        """The job as it is now; one whose spec makes no sense without it, and why: what was launched of it is to end,
        and it is to go when somebody deletes it.
        """
        if self._wanted is None:
            try:
                job = clusterjob.parse_job(self._document)
                check_storage(self._cluster, job)
                self._wanted = job, None
            except SpecError as error:
                self._wanted = clusterjob.unreadable_job(self._document), error
        return self._wanted

    async def _refuse(self, error: SpecError) -> None:
        """The API server let a spec pass that makes no sense, or refuses the pods that follow from it."""
        metadata = self._document["metadata"]
        after = refuse(self.status, str(error), self._cluster.clock(), metadata.get("generation"))
        if after != self.status:
            await write_status(self._cluster, clusterjob.path_of(self.key), metadata["uid"], after)
            self._events.tell_refusal(self._document, self.status, after)
            self.status = after

    async def _hold(self, job: ClusterJob) -> None:
        """Keeps the object until its gang has saved and ended, should somebody delete it."""
        if labels.FINALIZER not in job.finalizers:
            await self._set_finalizers(job, [*job.finalizers, labels.FINALIZER])

    async def _let_go(self, job: ClusterJob) -> None:
        if labels.FINALIZER in job.finalizers:
            await self._set_finalizers(job, [name for name in job.finalizers if name != labels.FINALIZER])

    async def _set_finalizers(self, job: ClusterJob, names: Sequence[str]) -> None:
        """In place of those that are there: the version says that nobody has changed them since."""
        self._cluster.lease.check()
        metadata = {"finalizers": list(names), "resourceVersion": self._document["metadata"]["resourceVersion"]}
        document = await self._cluster.kube.patch(job.path, {"metadata": metadata})
        if document["metadata"].get("finalizers") or not job.is_deleted:
            self._replace(clusterjob.trimmed(document))

    def _tell(self, seen: Pass) -> None:
        self._metrics.observe(seen)
        self._events.tell(self._document, seen)

    def _pause(self, error: Exception) -> float:
        self._failures += 1
        self._metrics.failed()
        wait = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(self._failures, 10))
        wait *= random.uniform(0.5, 1.0)
        log.warning("%s is looked at again in %.1f s: %s", self.key, wait, error)
        self._events.tell_error(self._document, error)
        return wait


async def until(changed: asyncio.Event, seconds: float) -> None:
    """Returns when it is set, in so many seconds at most."""
    with suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, seconds)):  # `wait_for` may swallow a cancellation (CPython 86296)
            await changed.wait()
