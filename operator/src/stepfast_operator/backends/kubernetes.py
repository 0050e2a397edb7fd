"""The Kubernetes backend: a gang is a set of pods, a node a Node, the agents their nodes' own.

Invariant I9 here: no pod of a run is made while a pod of another run of the job may still have a running container. A
pod that was told to end counts as living until the kubelet says that it has ended, or until it was deleted by force
because its node does not answer.

That an attempt was launched is written into an annotation of the TrainingJob before its first pod is made, and that all
its pods were made after the last one: pods that are missing after that, or once a rank of the run is known, were
deleted by somebody, and no run is begun twice (I1).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

from stepfast.errors import SpecError, StepfastError
from stepfast.kube import AlreadyExists, InvalidObject, Kube, KubeError, KubeUnavailable, PatchKind
from stepfast.storage.base import Store
from stepfast.storage.rules import StorageRules
from stepfast_operator import labels, manifests, podgroups
from stepfast_operator.actions import LaunchGang, StopMode
from stepfast_operator.backends.jobstorage import JobStorage
from stepfast_operator.backends.podgroups import PodGroups
from stepfast_operator.backends.requests import Ask, Request, Requests, is_awaited
from stepfast_operator.backends.rings import Rings
from stepfast_operator.backends.sight import Launched, Sight
from stepfast_operator.backends.spares import Spares
from stepfast_operator.clusterjob import ClusterJob
from stepfast_operator.clusterview import ClusterView
from stepfast_operator.document import JSON, decode, encode
from stepfast_operator.lease import Lease
from stepfast_operator.manifests import Owner
from stepfast_operator.observed import (
    IDLE_SECONDS,
    Committed,
    Intent,
    Observed,
    dead_ranks_of,
)
from stepfast_operator.podview import PodView
from stepfast_operator.record import Attempt, CheckpointStatus, Status
from stepfast_operator.rings import ring_of
from stepfast_operator.turns import LONGEST_STORAGE_SECONDS, Turn, Turns, first_of
from stepfast_operator.workers import had_ranks, previous_nodes
from stepfast_operator.writepace import WritePace

_KILL_GRACE_SECONDS = 1  # the least that still waits for the kubelet's word; none at all would only delete the record
_GONE_SECONDS = 5.0
# A pod's own end comes with its exit code a second or two later than the agent's word that a rank is gone.
_DEAD_RANK_PATIENCE_SECONDS = 8.0


class NameTaken(KubeError):
    """An object of the gang's name is there, and is another's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What all jobs share. Without a root each job must name its own storage."""

    kube: Kube
    view: ClusterView
    requests: Requests
    rings: Rings
    lease: Lease
    storage: StorageRules
    open_store: Callable[[str], Store]
    began_time: float
    spare_priority_class: str = ""
    clock: Callable[[], float] = time.time
    turns: Turns = field(default_factory=Turns)


class KubernetesBackend:
    """One job's pods, agents and storage. Used by one task at a time."""

    def __init__(self, cluster: Cluster, job: ClusterJob) -> None:
        self._cluster, self._kube, self._view, self._lease = cluster, cluster.kube, cluster.view, cluster.lease
        self.changed = asyncio.Event()  # set by whoever sees a change of what is observed here
        self.turn = Turn()  # of the look that is under way
        self.take(job)
        self._asked: dict[str, int] = {}  # by node: the generation from which on its report takes in what was asked
        self._asked_to_end: dict[str, int | None] = {}  # pods, by uid, and the grace that they were given
        self._launched_now: Launched | None = None
        self._noted = CheckpointStatus()  # as of the last look
        self._storage: JobStorage | None = None
        self.pace = WritePace()
        self._groups = PodGroups(self._kube, self._lease)
        self._spares = Spares(self._kube, self._view, self._lease, cluster.spare_priority_class)

    def take(self, job: ClusterJob) -> None:
        """The TrainingJob as it is now."""
        self._job = job
        self._owner = Owner(job=job.job, uid=job.uid)
        self._sight = Sight(self._view, job)

    @property
    def is_alive(self) -> bool:
        """Whether any pod of the job may still run, or holds a place in a queue."""
        pods = self._sight.pods()
        held = podgroups.held_groups(pods).values()
        return any(pod.is_alive for pod in pods) or not all(podgroups.is_group_left(members) for members in held)

    def has_launched(self, run: str) -> bool:
        """Whether the launch of that run was begun."""
        launched = self._launched()
        return launched is not None and launched.run == run

    async def observe(self, status: Status) -> Observed:
        now = self._cluster.clock()
        self._noted = status.checkpoint
        pods = self._sight.pods()
        told = [(node, job) for node, job in self._sight.told() if self._view.is_ready(node)]
        current, launched = status.current, self._launched()
        living = self._sight.living_nodes(current.run) if current is not None else []
        gang = self._sight.gang(current, launched, pods, now)
        dead = [rank for node, job in told for rank in dead_ranks_of(node, [job])]
        return Observed(
            now=now,
            job=self._job.job,
            uid=self._job.uid,
            spec=self._job.spec,
            status=status,
            intent=self._intent(),
            gang=gang,
            live_runs=self._sight.live_runs(status, launched, pods),
            agent=self._sight.agent_state(living),
            reports=[job for _, job in told],
            awaited_agents=self._awaited(current, living),
            dead_ranks=[rank for rank in dead if now - rank.ended_time >= _DEAD_RANK_PATIENCE_SECONDS],
            untold_ranks=[rank for rank in dead if now - rank.ended_time < _DEAD_RANK_PATIENCE_SECONDS],
            began_time=self._cluster.began_time,
            command=self._job.manifest.command,
            storage_uri=self._job_storage().job_uri,
            generation=self._job.generation,
            anatomy=self._job.manifest.anatomy,
            room=self._sight.room(status, gang),
            nodes=self._sight.candidates(status, gang),
            spares=self._spares.view(self._owner),
            idle_seconds=max(IDLE_SECONDS, self.pace.progress_seconds),
            untold_seconds=max((self._view.progress_seconds(node) for node, _ in told), default=0.0),
            queue=await self._groups.view(self._owner, self._job.spec.pod_group_policy, status.attempt, pods, now),
        )

    async def read_steps(self) -> Sequence[Committed]:
        if self._job.spec.checkpoint.secret_ref is not None:
            return self._reported_steps()
        async with self._storage_in_use() as storage:
            return await storage.read_steps()

    async def supersede_after(self, step: int) -> None:
        async with self._storage_in_use() as storage:
            self._lease.check()
            await storage.supersede_after(step)

    @asynccontextmanager
    async def _storage_in_use(self) -> AsyncIterator[JobStorage]:
        """For one call, which may take as long as the storage does not answer."""
        storage = self._job_storage()
        with self.turn.limited(LONGEST_STORAGE_SECONDS):
            async with self._cluster.turns.storages[storage.uri]:
                try:
                    yield storage
                finally:
                    await storage.close()

    async def launch(self, launch: LaunchGang) -> None:
        launched = self._launched()
        if launched is not None and launched.run == launch.run and launched.is_whole:
            return
        others = {pod.run for pod in self._sight.pods() if pod.is_alive} - {launch.run}
        await self.stop(sorted(others), StopMode.KILL)
        if any(pod.is_alive and pod.run in others for pod in self._sight.pods()):
            raise KubeUnavailable(f"pods of {', '.join(sorted(others))} have not ended yet: none is made beside them")
        await self._begin(launch, launched)
        self._asked_to_end.clear()
        await self._clear(launch.attempt)

    async def stop(self, runs: Sequence[str], mode: StopMode) -> None:
        """With KILL waits a moment for the kubelets' word; what a lost node holds up is asked for again by the next
        pass, which may have learned that it is lost.
        """
        wanted = frozenset(runs)
        grace = _KILL_GRACE_SECONDS if mode is StopMode.KILL else None
        deadline = time.monotonic() + (_GONE_SECONDS if mode is StopMode.KILL else 0.0)
        while living := [pod for pod in self._sight.pods() if pod.run in wanted and pod.is_alive]:
            self.changed.clear()
            self._lease.check()
            await self._cluster.turns.each(lambda pod: self._end(pod, grace), living)
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self.turn.end()
            begin = time.perf_counter()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):  # `wait_for` may swallow a cancellation
                    await self.changed.wait()
            self.turn.waited_seconds += time.perf_counter() - begin

    async def start_agent(self) -> None:
        """Nothing: the DaemonSet does."""

    async def flush(self, run: str) -> None:
        await self._ask(run, Ask.FLUSH)

    async def request_save(self, run: str) -> None:
        await self._ask(run, Ask.SAVE)

    async def set_spares(self, count: int, avoided_nodes: Sequence[str]) -> None:
        await self._spares.set(self._owner, self._job.spec, count, avoided_nodes)

    async def leave_queue(self, attempt: int) -> None:
        await self._groups.leave(self._owner, self._job.spec.pod_group_policy, attempt, self._sight.pods())

    async def tell_rings(self, *, is_over: bool) -> None:
        """Has the agents of the gang's nodes know each other, once all pods have nodes, if its steps are mirrored.

        What was told of the run before stands until then: what was mirrored of it may have to be persisted.
        """
        launched = self._launched()
        if not self._job.spec.checkpoint.memory.mirrors or launched is None:
            return
        pods = [pod for pod in self._sight.pods() if pod.run == launched.run and pod.is_alive]
        nodes = {pod.index: pod.node for pod in pods if pod.node is not None}
        if not is_over and len(nodes) < launched.nodes:
            return
        found = map(self._view.reports.get, nodes.values())
        addresses = {one.node: one.mirror_address for one in found if one is not None and one.mirror_address}
        entries = {} if is_over else ring_of(self._job.job, launched.run, nodes, addresses)
        others = [report.node for report in self._view.reports_of(self._job.job) if report.node not in entries]
        self._lease.check()
        await self._cluster.rings.tell(self._job.job, entries, others)

    async def delete_job(self) -> None:
        self._lease.check()
        await self._kube.delete(self._job.path, uid=self._job.uid)

    async def write_status(self, status: Status) -> None:
        """Progress alone may be held back: whoever asked for this calls `write_held_back` in `held_back_seconds`."""
        if self.pace.is_due(status, time.monotonic()):
            await self._write(status)

    async def write_held_back(self) -> None:
        """Writes what was held back, if it is due."""
        status = self.pace.held_back(time.monotonic())
        if status is not None:
            await self._write(status)

    def held_back_seconds(self) -> float | None:
        """When what was held back is due; None when nothing is."""
        return self.pace.wait_seconds(time.monotonic())

    async def _write(self, status: Status) -> None:
        begin = time.monotonic()
        await write_status(self._cluster, self._job.path, self._job.uid, status)
        self.pace.note_written(status, begin)

    # ------------------------------------------------------------ observing

    def _intent(self) -> Intent:
        # A job that is deleted gets its last checkpoint, as one that is suspended does.
        return Intent.SUSPEND if self._job.spec.suspend or self._job.is_deleted else Intent.RUN

    def _launched(self) -> Launched | None:
        """What was written last: by us, or by an operator before us."""
        if self._launched_now is not None:
            return self._launched_now
        if self._job.launched is None:
            return None
        try:
            return decode(Launched, json.loads(self._job.launched), labels.LAUNCHED)
        except (ValueError, SpecError):
            return None

    def _awaited(self, current: Attempt | None, living: Sequence[str]) -> tuple[str, ...]:
        """Also those whose reports do not tell of the job yet: they may hold what nobody knows of."""
        asked = [node for node in self._asked if self._view.is_ready(node)]
        others = [node for node in living if node not in asked]
        return tuple(node for node in [*asked, *others] if self._is_awaited(node, current))

    def _is_awaited(self, node: str, current: Attempt | None) -> bool:
        """A node that was not asked from here may have been by an operator before this one."""
        report = self._view.reports.get(node)
        if report is None:
            return False
        if node in self._asked:
            return report.observed_generation < self._asked[node]
        if current is None:
            return False
        is_flush_due = current.flush_asked_time is not None
        return is_awaited(report, self._job.job, current.run, is_flush_due=is_flush_due)

    def _job_storage(self) -> JobStorage:
        uri = self._job.spec.checkpoint.storage_uri or self._cluster.storage.root or ""
        if self._storage is None or self._storage.uri != uri:
            self._storage = JobStorage(self._job.job, uri, self._cluster.open_store)
        return self._storage

    def _reported_steps(self) -> Sequence[Committed]:
        """The newest step that any agent knows of, or that the status does, which outlives agents: the storage itself
        only the job's own credentials open.
        """
        told = [job for _, job in self._sight.told()]
        known = [(job.latest_persisted_step, job.latest_persisted_bytes, job.latest_persisted_time) for job in told]
        known.append((self._noted.latest_persisted_step, self._noted.size_bytes, self._noted.latest_persisted_time))
        step, size, time = max(known, key=lambda one: one[0] or 0)
        if not step:
            return ()
        return (Committed(step=step, size_bytes=size or 0, committed_time=time or self._cluster.clock()),)

    # ------------------------------------------------------------ acting

    async def _note(self, launched: Launched) -> None:
        self._lease.check()
        note = {"metadata": {"uid": self._job.uid, "annotations": {labels.LAUNCHED: json.dumps(encode(launched))}}}
        await self._kube.patch(self._job.path, note)
        self._launched_now = launched

    async def _begin(self, launch: LaunchGang, launched: Launched | None) -> None:
        """Makes the pods of the gang and the Service in which they meet. `launched`: the last note."""
        is_first = launched is None
        try:
            async with asyncio.TaskGroup() as group:
                service = group.create_task(self._make_service())
                if launched is None or launched.run != launch.run:
                    launched = Launched(run=launch.run, launched_time=self._cluster.clock(), nodes=launch.nodes)
                    await self._note(launched)
                if is_first:
                    await service  # another's object of its name is found before any pod is made
                # An operator may be lost between the last pod and the note: what is missing by now was there.
                if not self._has_begun(launch.run):
                    await self._make_pods(launch, launched.nodes)
        except* StepfastError as several:
            raise first_of(several) from None
        # Its pods may have been refused for long, one after another: the gang is there from now on.
        await self._note(replace(launched, is_whole=True, launched_time=self._cluster.clock()))

    async def _make_service(self) -> None:
        """Makes it unless it is there. Raises NameTaken when another's is."""
        self._lease.check()
        service = manifests.service_of(self._owner)
        path = f"/api/v1/namespaces/{self._job.job.namespace}/services"
        try:
            await self._kube.create(path, service)
        except AlreadyExists:
            self._check_ours(await self._kube.get(f"{path}/{self._job.job.name}"))

    def _has_begun(self, run: str) -> bool:
        """Whether any rank of the run is known to have been there: none is until all pods have met."""
        return bool(self._sight.holders(run)) or had_ranks(pod for pod in self._sight.pods() if pod.run == run)

    async def _make_pods(self, launch: LaunchGang, nodes: int) -> None:
        """Makes those that are not there."""
        processes = manifests.processes_per_node(self._job.spec)
        before = previous_nodes(self._sight.pods(), self._sight.told(), launch.attempt, processes)
        # A node that does not answer is preferred by nobody: it would be lost again.
        before = {index: node for index, node in before.items() if self._view.is_ready(node)}
        pods = [self._pod_of(launch, index, before.get(index)) for index in range(nodes)]
        policy = self._job.spec.pod_group_policy
        if policy is not None:
            pods = await self._groups.enter(self._owner, policy, launch.attempt, pods, self._sight.pods())
        await self._cluster.turns.each(lambda pod: self._make_pod(launch, pod), pods)

    def _pod_of(self, launch: LaunchGang, index: int, node: str | None) -> JSON:
        uri = self._job_storage().uri
        return manifests.pod_of(self._owner, self._job.spec, launch, index, storage_uri=uri, preferred_node=node)

    async def _make_pod(self, launch: LaunchGang, pod: JSON) -> None:
        path = f"/api/v1/namespaces/{self._job.job.namespace}/pods"
        self._lease.check()
        try:
            made = await self._kube.create(path, pod)
        except AlreadyExists:
            made = await self._kube.get(f"{path}/{pod['metadata']['name']}")
            self._check_ours(made)
        except InvalidObject as error:
            if launch.attempt > 1 or self._sight.pods():
                raise  # such pods were taken before: what refuses them now may change again
            raise SpecError("spec", f"the API server refuses the pods that follow from it: {error}") from error
        self._view.take_pod(made)

    def _check_ours(self, document: JSON) -> None:
        owners = document["metadata"].get("ownerReferences") or ()
        if not any(owner.get("uid") == self._owner.uid for owner in owners):
            kind, name = document.get("kind", "object"), document["metadata"]["name"]
            raise NameTaken(
                f"{kind} {document['metadata']['namespace']}/{name} is there and does not belong to this TrainingJob: "
                "remove it, or give the job another name"
            )

    async def _end(self, pod: PodView, grace: int | None) -> None:
        """Asks the pod to end; by force when its node has not answered for `podDeletionGraceSeconds`."""
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
        if self._asked_to_end.get(pod.uid, -1) != grace:
            await self._kube.delete(path, grace_seconds=grace, uid=pod.uid)
            self._asked_to_end[pod.uid] = grace
        if pod.node is None or pod.deleted_time is None or not self._view.is_lost(pod):
            return
        patience = self._job.spec.failure_policy.pod_deletion_grace_seconds
        if self._cluster.clock() - pod.deleted_time >= patience:
            await self._kube.delete(path, grace_seconds=0, uid=pod.uid)
            if pod.member is not None and pod.member.is_held:
                await self._groups.bury(pod)
            self._view.drop_pod(pod)

    async def _clear(self, attempt: int) -> None:
        """Removes the pods of attempts before the last one, whose logs nobody is going to look at."""
        old = [pod for pod in self._sight.pods() if pod.attempt < attempt - 1]
        await self._cluster.turns.each(
            lambda pod: self._kube.delete(f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}", uid=pod.uid), old
        )
        if self._job.spec.pod_group_policy is not None:
            await self._groups.clear(self._owner, self._job.spec.pod_group_policy, attempt - 1)

    async def _ask(self, run: str, ask: Ask) -> None:
        """Asks the agents of all living nodes that hold something of the run, or run its pods."""
        self._lease.check()
        request = Request(job=self._job.job, run=run, ask=ask)
        self._asked = await self._cluster.requests.ask(self._sight.living_nodes(run), request)


def check_storage(cluster: Cluster, job: ClusterJob) -> None:
    """Raises SpecError when nobody says where the job is saved, and for a storage that is not opened for it."""
    uri = job.spec.checkpoint.storage_uri or cluster.storage.root
    reason: str | None = "is required: this operator was installed without a storage of its own (storage.uri)"
    if uri:
        reason = cluster.storage.refusal(uri, has_credentials=job.spec.checkpoint.secret_ref is not None)
    if reason is not None:
        raise SpecError("spec.checkpoint.storageUri", reason)


async def write_status(cluster: Cluster, path: str, uid: str, status: Status) -> None:
    """Replaces the status of the job of that uid. Raises NotLeading, NotFound, other KubeErrors."""
    cluster.lease.check()
    patch = [
        {"op": "test", "path": "/metadata/uid", "value": uid},
        {"op": "add", "path": "/status", "value": encode(status)},
    ]
    await cluster.kube.patch(f"{path}/status", patch, PatchKind.JSON)
