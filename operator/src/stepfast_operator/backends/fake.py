"""A backend in memory, for tests: a world with a clock, a gang, an agent and a storage that do what they are
told.

It passes the contract suite of the real ones. Time passes only by `advance`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from stepfast.errors import AgentUnavailable, StorageForbidden, StorageUnavailable
from stepfast.nodestatus import EvictionNotice, JobStatus, RankStatus, SaveStatus
from stepfast.step import JobKey, restarted_run
from stepfast_operator.actions import LaunchGang, StopMode
from stepfast_operator.backends.base import QueueRefused
from stepfast_operator.observed import (
    AgentState,
    Candidate,
    Committed,
    Failure,
    Gang,
    Intent,
    NodeCondition,
    Observed,
    QueueView,
    Room,
    Spare,
    Worker,
    WorkerPhase,
    dead_ranks_of,
)
from stepfast_operator.record import Cause, Status
from stepfast_operator.spec import TrainingSpec

STEP_BYTES = 1000
AS_PLANNED = -1


@dataclass
class FakeGang:
    """One launched gang. `lives` tells whether any of its processes does, whatever its workers' phases."""

    run: str
    launched_time: float
    phases: dict[int, WorkerPhase]
    failures: dict[int, Failure] = field(default_factory=dict)
    lives: bool = True
    ranks: dict[int, RankStatus] = field(default_factory=dict)
    earlier_ranks: list[dict[int, RankStatus]] = field(default_factory=list)  # before each in-place restart
    messages: dict[int, str] = field(default_factory=dict)  # why a node's worker is pending
    running_since: dict[int, float] = field(default_factory=dict)  # of a node whose worker was pending for a while
    avoided_nodes: tuple[str, ...] = ()


class FakeBackend:
    """One job's world. Its attributes may be changed at will between passes."""

    def __init__(self, spec: TrainingSpec, *, now: float = 1000.0, world_size: int = 2) -> None:
        self.job = JobKey(namespace="test", name="job")
        self.uid = "uid"
        self.spec = spec
        self.now = self.began = now
        self.world_size = world_size
        self.intent = Intent.RUN
        self.command: str | None = None
        self.agent = AgentState.GONE
        self.is_storage_down = False
        self.is_storage_forbidden = False
        self.gangs: dict[str, FakeGang] = {}
        self.steps: dict[int, float] = {}  # committed step: when
        self.staged: dict[str, list[int]] = {}  # by run: staged, not yet persisted
        self.staged_not_due: dict[str, list[int]] = {}  # by run: staged; reported once a flush asked for it
        self.parted: dict[str, list[int]] = {}  # by run: persisted, not yet committed
        self.committed: dict[str, int] = {}  # by run: the newest step that it committed
        self.is_commit_held = False  # parts are written, manifests are not
        self.final: dict[str, int] = {}
        self.launches: list[LaunchGang] = []
        self.untold_seconds = 0.0
        self.saved: Status | None = None
        self.is_deleted = False
        self.total_steps: int | None = None
        self.generation: int | None = None
        self.anatomy: str | None = None
        self.room = Room(world_size=world_size, ranks=world_size)
        self.awaited_agents: tuple[str, ...] = ()
        self.nodes: tuple[str, ...] | None = None  # that gangs may run on; None: nobody knows of nodes
        self.node_conditions: dict[str, tuple[NodeCondition, ...]] = {}  # by node: those that rules ask about
        self.notices: dict[str, EvictionNotice] = {}  # by node
        self.spares: list[Spare] = []
        self.unschedulable: dict[int, str] = {}  # by node index, of the newest gang: why there is no place
        self.unplaced: set[int] = set()  # those of it that the scheduler has not looked at
        self.queue = QueueView()
        self.refusal = ""  # of whoever is to take the gang

    # What the world does.

    def advance(self, seconds: float) -> None:
        self.now += seconds

    @property
    def gang(self) -> FakeGang:
        """The gang that was launched last."""
        return self.gangs[self.launches[-1].run]

    def hold_up(self, message: str = "ContainerCreating") -> None:
        """No worker of the gang runs yet."""
        for node in self.gang.phases:
            self.gang.phases[node], self.gang.messages[node] = WorkerPhase.PENDING, message

    def begin_to_run(self, node: int) -> None:
        """A worker that was pending runs from now on."""
        self.gang.phases[node], self.gang.running_since[node] = WorkerPhase.RUNNING, self.now

    def join(self, restored_step: int | None = AS_PLANNED, tier: str = "Persistent") -> None:
        """Every rank says hello, and what it restored; with None it never restores."""
        restored = self.launches[-1].resume_step if restored_step == AS_PLANNED else restored_step
        for rank in range(self.world_size):
            self.gang.ranks[rank] = RankStatus(
                rank=rank,
                pid=100 + rank,
                alive=True,
                clean=False,
                joined_time=self.now,
                restored_step=restored,
                restored_time=self.now if restored is not None else None,
                restored_tier=None if restored is None else tier if restored else "None",
            )

    def make_step(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Every living rank reports that step."""
        for rank, status in self.gang.ranks.items():
            if status.alive:
                self.gang.ranks[rank] = replace(
                    status, global_step=step, step_time=self.now, metrics=metrics, total_steps=self.total_steps
                )

    def stage(self, step: int) -> None:
        run = restarted_run(self.gang.run, len(self.gang.earlier_ranks))
        self.staged.setdefault(run, []).append(step)

    def persist(self, run: str) -> None:
        """What is staged of the run becomes committed, or stays half-way while commits are held."""
        self.parted.setdefault(run, []).extend(self.staged.pop(run, []))
        if not self.is_commit_held:
            steps = self.parted.pop(run)
            self.steps.update(dict.fromkeys(steps, self.now))
            if steps:
                self.committed[run] = max([*steps, self.committed.get(run, 0)])

    def fail(self, rank: int = 1, exit_code: int = 1) -> None:
        """A rank fails, and its launcher says so."""
        gang = self.gang
        gang.phases[0] = WorkerPhase.FAILED
        gang.failures[0] = Failure(
            cause=Cause.RANK_FAILED,
            time=self.now,
            node="node-0",
            rank=rank,
            exit_code=exit_code,
            message="failed",
        )

    def die(self, rank: int = 1) -> None:
        """A rank's process is gone; its launcher lives."""
        self.gang.ranks[rank] = replace(self.gang.ranks[rank], alive=False, ended_time=self.now)

    def rejoin(self, restored_step: int, tier: str = "Memory") -> None:
        """The launchers have started all ranks anew in place."""
        for rank, status in self.gang.ranks.items():
            if status.alive:
                self.gang.ranks[rank] = replace(status, alive=False, ended_time=self.now)
        self.gang.earlier_ranks.append(dict(self.gang.ranks))
        self.join(restored_step, tier)

    def take_away(self, cause: Cause, node: int = 0) -> None:
        """A pod is taken away, and still lives."""
        evicted = (("DisruptionTarget", "True"),) if cause is Cause.POD_EVICTED else ()
        self.gang.failures[node] = Failure(
            cause=cause,
            time=self.now,
            node=f"node-{node}",
            pod=f"{self.gang.run}-{node}",
            message="was taken away",
            pod_conditions=evicted,
        )

    def vanish(self, node: int = 0) -> None:
        """A pod is no more; how it ended nobody saw."""
        self.gang.phases[node] = WorkerPhase.FAILED
        gone = f"the pod of node index {node} is gone"
        self.gang.failures[node] = Failure(cause=Cause.POD_DELETED, time=self.now, message=gone)

    def succeed(self) -> None:
        gang = self.gang
        gang.phases = dict.fromkeys(gang.phases, WorkerPhase.SUCCEEDED)
        gang.lives = False

    def lose_supervisor(self) -> None:
        """`stepfast run` was killed and started again: of a gang that lived it knows no more than that."""
        for gang in self.gangs.values():
            for node, phase in gang.phases.items():
                if phase is WorkerPhase.RUNNING:
                    gang.phases[node] = WorkerPhase.FAILED
                    gang.failures[node] = Failure(cause=Cause.SUPERVISOR_RESTARTED, time=self.now, node=f"node-{node}")
        self.agent, self.began = AgentState.GONE, self.now

    # What the operator sees and does.

    async def observe(self, status: Status) -> Observed:
        current = status.current
        gang = self.gangs.get(current.run) if current is not None else None
        is_told = self.agent is AgentState.READY
        reports = [report for gang in self.gangs.values() for report in self._reports(gang)] if is_told else []
        return Observed(
            now=self.now,
            job=self.job,
            uid=self.uid,
            spec=self.spec,
            status=status,
            intent=self.intent,
            gang=self._gang_of(gang) if gang is not None else None,
            live_runs=frozenset(run for run, gang in self.gangs.items() if gang.lives),
            untold_seconds=self.untold_seconds,
            agent=self.agent,
            reports=reports,
            dead_ranks=dead_ranks_of("node-0", reports),
            began_time=self.began,
            command=self.command,
            storage_uri="memory://fake/test/job",
            generation=self.generation,
            awaited_agents=self.awaited_agents,
            anatomy=self.anatomy,
            room=self.room,
            nodes=self._candidates(),
            spares=tuple(self.spares),
            queue=self.queue,
        )

    def _candidates(self) -> Sequence[Candidate] | None:
        if self.nodes is None:
            return None
        return [
            Candidate(name=name, conditions=self.node_conditions.get(name, ()), is_leaving=name in self.notices)
            for name in self.nodes
        ]

    async def read_steps(self) -> Sequence[Committed]:
        self._check_storage()
        return [
            Committed(step=step, size_bytes=STEP_BYTES, committed_time=when)
            for step, when in sorted(self.steps.items())
        ]

    async def supersede_after(self, step: int) -> None:
        self._check_storage()
        self.steps = {kept: when for kept, when in self.steps.items() if kept <= step}

    async def launch(self, launch: LaunchGang) -> None:
        if launch.run in self.gangs:
            return
        if self.refusal:
            raise QueueRefused(self.refusal)
        for gang in self.gangs.values():
            gang.lives = False
        nodes = range(launch.nodes)
        self.gangs[launch.run] = FakeGang(
            run=launch.run,
            launched_time=self.now,
            phases=dict.fromkeys(nodes, WorkerPhase.RUNNING),
            avoided_nodes=launch.avoided_nodes,
        )
        self.launches.append(launch)
        self.unschedulable, self.unplaced = {}, set()

    async def stop(self, runs: Sequence[str], mode: StopMode) -> None:
        for run in runs:
            gang = self.gangs.get(run)
            if gang is None:
                continue
            gang.lives = False
            for node, phase in gang.phases.items():
                if phase is WorkerPhase.RUNNING:
                    gang.phases[node] = WorkerPhase.FAILED
            for rank, status in gang.ranks.items():
                if status.alive:
                    gang.ranks[rank] = replace(status, alive=False, ended_time=self.now)

    async def set_spares(self, count: int, avoided_nodes: Sequence[str]) -> None:
        kept = [spare for spare in self.spares if spare.may_stay(avoided_nodes)][:count]
        self.spares = [*kept, *(Spare(avoided_nodes=tuple(avoided_nodes)) for _ in range(count - len(kept)))]

    async def start_agent(self) -> None:
        if self.agent is AgentState.GONE:
            self.agent = AgentState.READY

    async def flush(self, run: str) -> None:
        self._check_agent()
        for launch in self._launches(run):
            self.staged.setdefault(launch, []).extend(self.staged_not_due.pop(launch, []))
            if not self.is_storage_down:
                self.persist(launch)

    async def request_save(self, run: str) -> None:
        self._check_agent()
        newest = self._launches(run)[-1]
        reached = [rank.global_step for rank in self.gangs[run].ranks.values() if rank.global_step is not None]
        if newest not in self.final and reached:
            self.final[newest] = max(reached)
            self.staged.setdefault(newest, []).append(max(reached))

    def _launches(self, run: str) -> list[str]:
        """The run, and it after each of its in-place restarts."""
        earlier = self.gangs[run].earlier_ranks if run in self.gangs else []
        return [restarted_run(run, number) for number in range(len(earlier) + 1)]

    async def leave_queue(self, attempt: int) -> None:
        self.queue = QueueView()

    async def delete_job(self) -> None:
        self.is_deleted = True

    async def write_status(self, status: Status) -> None:
        self.saved = status

    def _check_storage(self) -> None:
        if self.is_storage_forbidden:
            raise StorageForbidden("memory://fake refuses\nRequestId: 1")
        if self.is_storage_down:
            raise StorageUnavailable("memory://fake is down")

    def _check_agent(self) -> None:
        if self.agent is not AgentState.READY:
            raise AgentUnavailable("the fake agent is down")

    def _reports(self, gang: FakeGang) -> list[JobStatus]:
        """An agent knows of a run only what its ranks told, or left in memory: nothing of a script without the SDK."""
        ranks = [*gang.earlier_ranks, gang.ranks]
        told = zip(self._launches(gang.run), ranks, strict=True)
        return [self._report(run, known) for run, known in told if known or self._is_held(run)]

    def _is_held(self, run: str) -> bool:
        return any(run in held for held in (self.staged, self.staged_not_due, self.parted, self.committed))

    def _report(self, run: str, ranks: Mapping[int, RankStatus]) -> JobStatus:
        staged, parted, committed = self.staged.get(run, []), self.parted.get(run, []), self.committed.get(run)
        return JobStatus(
            job=self.job,
            run=run,
            world_size=self.world_size,
            ranks=tuple(ranks.values()),
            saves=SaveStatus(),
            latest_memory_step=max([*parted, *staged], default=None),
            latest_persisted_step=committed,
            latest_persisted_time=self.steps.get(committed) if committed is not None else None,
            pending_bytes=STEP_BYTES * len(staged),
            pending_steps=(*parted, *staged),
            final_step=self.final.get(run),
        )

    def _gang_of(self, gang: FakeGang) -> Gang:
        without = self.unplaced | set(self.unschedulable) if gang is self.gang else set()
        workers = [
            Worker(
                index=node,
                node=f"node-{node}",
                phase=WorkerPhase.PENDING if node in without and phase is WorkerPhase.RUNNING else phase,
                is_placed=node not in without,
                is_unschedulable=node in without and node in self.unschedulable,
                failure=gang.failures.get(node),
                pod=f"{gang.run}-{node}",
                message=gang.messages.get(node, self.unschedulable.get(node, "") if node in without else ""),
                running_since=gang.running_since.get(node, gang.launched_time)
                if phase is WorkerPhase.RUNNING
                else None,
                node_conditions=() if node in without else self.node_conditions.get(f"node-{node}", ()),
                notice=None if node in without else self.notices.get(f"node-{node}"),
                avoided_nodes=gang.avoided_nodes,
            )
            for node, phase in sorted(gang.phases.items())
        ]
        return Gang(run=gang.run, launched_time=gang.launched_time, workers=workers)
