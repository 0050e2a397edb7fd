"""What there is to be seen of one job in the cluster: its pods and their nodes, and what agents tell of it. Asks for
nothing, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stepfast.nodestatus import EvictionNotice, JobStatus
from stepfast.step import split_run
from stepfast_operator.clusterjob import ClusterJob
from stepfast_operator.clusterview import ClusterView
from stepfast_operator.names import is_run_of
from stepfast_operator.observed import AgentState, Candidate, Gang, Room, Worker
from stepfast_operator.placement import placement_of
from stepfast_operator.podview import PodView
from stepfast_operator.policies import elastic, exclusion, memory, readmission
from stepfast_operator.record import Attempt, Status
from stepfast_operator.room import room_of
from stepfast_operator.workers import workers_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """The annotation `stepfast.dev/launched`: which run's pods were begun to be made, and whether all were."""

    run: str
    launched_time: float
    nodes: int
    is_whole: bool = False


class Sight:
    """Of the TrainingJob as it is now."""

    def __init__(self, view: ClusterView, job: ClusterJob) -> None:
        self._view, self._job = view, job

    def pods(self) -> list[PodView]:
        return self._view.pods_of(self._job.job, self._job.uid)

    def gang(
        self, current: Attempt | None, launched: Launched | None, pods: Sequence[PodView], now: float
    ) -> Gang | None:
        """That of the attempt, once all its pods were made."""
        if current is None or launched is None or launched.run != current.run or not launched.is_whole:
            return None
        return Gang(
            run=current.run, launched_time=launched.launched_time, workers=self._workers(current, launched, pods, now)
        )

    def live_runs(self, status: Status, launched: Launched | None, pods: Sequence[PodView]) -> frozenset[str]:
        """The runs of pods that may still run."""
        attempt = status.open_attempt
        is_made = launched is None or launched.is_whole or attempt is None or launched.run != attempt.run
        half_made = None if is_made or launched is None else launched.run
        # Pods of a gang that is still being made belong to the launch, which goes on: they are no stray ones. An
        # attempt that was ended before its launch was over has nobody else who would end them.
        return frozenset(pod.run for pod in pods if pod.is_alive and pod.run != half_made)

    def told(self) -> list[tuple[str, JobStatus]]:
        """What the agents say of this job's runs, by node; not of another job that had its name before."""
        job, reports = self._job, self._view.reports_of(self._job.job)
        told = [(report.node, status) for report in reports for status in report.jobs]
        return [(node, status) for node, status in told if status.job == job.job and is_run_of(status.run, job.uid)]

    def holders(self, run: str) -> set[str]:
        """The nodes whose agents tell of the run, however often it was restarted in place."""
        return {node for node, status in self.told() if split_run(status.run)[0] == run}

    def living_nodes(self, run: str) -> list[str]:
        """Those that hold something of the run, or run its pods."""
        pods = {pod.node for pod in self.pods() if pod.run == run and pod.node is not None}
        return sorted(node for node in self.holders(run) | pods if self._view.is_ready(node))

    def agent_state(self, living: Sequence[str]) -> AgentState:
        """STARTING while a node that holds the run, and that lives, has no agent that serves.

        What a node says of earlier runs does not count: their time to be flushed is over, and an agent that is gone for
        good never takes its words back.
        """
        return AgentState.READY if all(map(self._view.has_ready_agent, living)) else AgentState.STARTING

    def candidates(self, status: Status, gang: Gang | None) -> Sequence[Candidate] | None:
        """The nodes that the next gang may run on; where nothing depends on them, no walk over thousands of nodes."""
        policy = self._job.spec.failure_policy
        is_running = status.open_attempt is not None and gang is not None
        is_asked = bool(self._view.leaving) or exclusion.is_asked(status, policy)
        if is_running:
            is_asked = (is_asked or self._has_spare_kept_off()) and elastic.may_grow(self._job.spec, status)
            is_asked = is_asked or readmission.is_asked(gang)
        if status.is_terminal or not is_asked:
            return None
        placement, wanted = placement_of(self._job.spec), exclusion.wanted_conditions(policy)
        return [
            Candidate(
                name=node.name,
                conditions=node.conditions_in(wanted),
                is_leaving=node.name in self._view.leaving,
            )
            for node in self._view.nodes.values()
            if node.not_ready_time is None and placement.admits(node)
        ]

    def _has_spare_kept_off(self) -> bool:
        """Whether a spare waits for a place that may not be everywhere."""
        spares = self._view.spares_of(self._job.job, self._job.uid)
        return any(pod.node is None and pod.avoided_nodes for pod in spares)

    def room(self, status: Status, gang: Gang | None) -> Room:
        """Where nothing is compared with it, no walk over thousands of nodes."""
        if self._job.manifest.anatomy is None or not memory.is_due(status, gang):
            return Room()
        size = status.open_attempt.nodes if status.open_attempt is not None else None
        return room_of(self._job.spec, self._view.nodes.values(), self._view.reports.get, size=size)

    def _workers(self, current: Attempt, launched: Launched, pods: Sequence[PodView], now: float) -> Sequence[Worker]:
        ours = [self._dated(pod) for pod in pods if pod.run == current.run]
        workers = workers_of(
            ours,
            launched.nodes,
            self._view.node,
            is_gone=self._view.is_gone,
            now=now,
            is_stopping=current.stopping_time is not None,
            wanted_conditions=exclusion.wanted_conditions(self._job.spec.failure_policy),
        )
        leaving = self._view.leaving  # most often none: each look at a gang of thousands comes through here
        if not leaving:
            return workers
        return [
            replace(worker, notice=self._notice_of(worker.node)) if worker.node in leaving else worker
            for worker in workers
        ]

    def _dated(self, pod: PodView) -> PodView:
        ahead = self._view.clock_ahead_seconds(pod.node)
        return replace(pod, clock_ahead_seconds=ahead) if ahead else pod

    def _notice_of(self, node: str) -> EvictionNotice | None:
        report = self._view.reports.get(node)
        return report.notice if report is not None else None
