"""All that the operator watches beside TrainingJobs, indexed by job; says which job a change concerns. Must not know
what is done about it.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from stepfast.kube import Kube
from stepfast.nodestatus import JobStatus, RankStatus
from stepfast.step import JobKey
from stepfast_operator import labels
from stepfast_operator.cache import IDLE_SECONDS, Reflector
from stepfast_operator.document import JSON
from stepfast_operator.podfields import NODE_FIELDS, POD_FIELDS, REPORT_FIELDS
from stepfast_operator.podview import (
    AgentView,
    NodeReport,
    NodeView,
    PodView,
    agent_of,
    jobs_of,
    node_of,
    pod_of,
    report_of,
)

# When the API server was away, its controllers may say that nodes are silent before their kubelets reach it again. A
# kubelet unsays that only once its own watch of the node has begun anew, which it tries ever less often: within 80 s,
# as was measured after an outage of 30 s.
_AFTER_OUTAGE_SECONDS = 60.0
_DOUBT_SECONDS = 90.0
_BEGIN_DOUBT_SECONDS = 20.0
_UNHEARD_SECONDS = IDLE_SECONDS + 10.0  # a watch that is dead is begun anew by then, and nobody is unheard of
_AGENTS = "app.kubernetes.io/name=stepfast,app.kubernetes.io/component=sidecar"


class _Watched(Protocol):
    """What is alike of every Reflector, whatever it holds."""

    path: str
    synced: asyncio.Event

    async def run(self) -> None: ...
    def age_seconds(self) -> float: ...


class ClusterView:
    """Pods of gangs, nodes, reports, agents. `wake_…` is called with the job (by uid or by name) that may look anew;
    `wake_later` when a report tells of nothing but progress, which may wait.
    """

    def __init__(
        self,
        kube: Kube,
        *,
        namespaces: Sequence[str],
        agent_namespace: str,
        wake_uid: Callable[[str], None],
        wake_job: Callable[[JobKey], None],
        wake_later: Callable[[JobKey], None],
    ) -> None:
        self._wake_uid, self._wake_job, self._wake_later = wake_uid, wake_job, wake_later
        self._pods_by_job: dict[str, dict[tuple[str, str], PodView]] = defaultdict(dict)
        # A node that is lost takes many others along: nothing walks over all jobs then.
        self._pods_by_node: dict[str, dict[tuple[str, str], str]] = defaultdict(dict)  # the jobs' uids
        self._pods_kept_off: dict[str, dict[tuple[str, str], str]] = defaultdict(dict)  # those without a node, likewise
        self._nodes_by_job: dict[JobKey, set[str]] = defaultdict(set)
        self._doubted: dict[str, asyncio.TimerHandle] = {}  # nodes that may not be as silent as they are said to be
        self._removed: dict[str, float] = {}  # nodes that were seen to go, and when
        self.leaving = set[str]()  # nodes that the cloud is about to take away
        self._agents_by_node: dict[str, dict[str, AgentView]] = defaultdict(dict)
        selector = f"{labels.MANAGED_BY}={labels.OPERATOR},{labels.JOB_UID}"
        self.pods: dict[str, Reflector[tuple[str, str], PodView]] = {
            namespace: Reflector(kube, path, _keyed_pod, self._on_pod, fields=POD_FIELDS, selector=selector)
            for namespace, path in _pod_paths(namespaces).items()
        }
        self.nodes: Reflector[str, NodeView] = Reflector(
            kube, "/api/v1/nodes", _keyed_node, self._on_node, fields=NODE_FIELDS
        )
        self.reports: Reflector[str, NodeReport] = Reflector(
            kube, "/apis/stepfast.dev/v1alpha1/checkpointnodes", _keyed_report, self._on_report, fields=REPORT_FIELDS
        )
        self.agents: Reflector[str, AgentView] = Reflector(
            kube, f"/api/v1/namespaces/{agent_namespace}/pods", _keyed_agent, self._on_agent, fields=POD_FIELDS,
            selector=_AGENTS,
        )  # fmt: skip

    @property
    def _reflectors(self) -> list[_Watched]:
        return [*self.pods.values(), self.nodes, self.reports, self.agents]

    async def run(self) -> None:
        """Keeps all of it up until cancelled."""
        async with asyncio.TaskGroup() as group:
            for reflector in self._reflectors:
                group.create_task(reflector.run(), name=f"watch {reflector.path}")

    async def synced(self) -> None:
        """Returns once everything was read."""
        for reflector in self._reflectors:
            await reflector.synced.wait()

    def ages(self) -> dict[str, float]:
        """Seconds since each watch last heard of the API server."""
        return {reflector.path: reflector.age_seconds() for reflector in self._reflectors}

    def pods_of(self, job: JobKey, uid: str) -> list[PodView]:
        """The pods of that job, of all its attempts that are remembered, by name.

        Those of its own namespace: whoever may make pods elsewhere may write this job's uid on them.
        """
        return self._chosen_pods(job, uid, are_spares=False)

    def spares_of(self, job: JobKey, uid: str) -> list[PodView]:
        """The pods that hold places for the job's gang, by number."""
        return self._chosen_pods(job, uid, are_spares=True)

    def is_running(self, uid: str) -> bool:
        """Whether the job of that uid has pods, all of which run and none of which is to end."""
        pods = self._pods_by_job.get(uid, {}).values()
        return bool(pods) and all(pod.phase == "Running" and pod.deleted_time is None for pod in pods)

    def _chosen_pods(self, job: JobKey, uid: str, *, are_spares: bool) -> list[PodView]:
        pods = (
            pod
            for pod in self._pods_by_job.get(uid, {}).values()
            if pod.is_spare == are_spares and pod.namespace == job.namespace
        )
        return sorted(pods, key=lambda pod: (pod.attempt, pod.index))

    def take_pod(self, document: JSON) -> None:
        """A pod as its creation returned it."""
        self._pods_in(document["metadata"]["namespace"]).take(document)

    def drop_pod(self, pod: PodView) -> None:
        """A pod that was deleted by force."""
        self._pods_in(pod.namespace).drop(pod.key, pod.uid)

    def _pods_in(self, namespace: str) -> Reflector[tuple[str, str], PodView]:
        return self.pods[namespace if namespace in self.pods else ""]

    def node(self, name: str) -> NodeView | None:
        """The node as it is, as far as that is beyond doubt: one that was said to be silent just after the API server
        was away counts as ready until its kubelet has had time to speak.
        """
        view = self.nodes.get(name)
        return replace(view, not_ready_time=None) if view is not None and name in self._doubted else view

    def is_gone(self, pod: PodView) -> bool:
        """Whether the pod's node is no more. One that has just come may not have been told of, while its pod was."""
        if pod.node is None or self.nodes.get(pod.node) is not None:
            return False
        placed = pod.placed_time or pod.created_time
        return pod.node in self._removed or time.time() - placed > _UNHEARD_SECONDS

    def is_lost(self, pod: PodView) -> bool:
        """Whether the pod's node is no more, or does not answer."""
        node = self.node(pod.node) if pod.node is not None else None
        return self.is_gone(pod) if node is None else node.not_ready_time is not None

    def is_ready(self, node: str) -> bool:
        return _is_ready(self.node(node))

    def reports_of(self, job: JobKey) -> list[NodeReport]:
        """The reports that tell of the job, by node."""
        found = (self.reports.get(node) for node in sorted(self._nodes_by_job.get(job, ())))
        return [report for report in found if report is not None]

    def clock_ahead_seconds(self, node: str | None) -> float:
        """How far that node's clock is ahead of the API server's, as far as is known."""
        report = self.reports.get(node) if node is not None else None
        return report.clock_ahead_seconds if report is not None else 0.0

    def progress_seconds(self, node: str) -> float:
        """How long that node's agent may keep a step to itself."""
        report = self.reports.get(node)
        return report.progress_seconds if report is not None else 0.0

    def has_ready_agent(self, node: str) -> bool:
        return any(agent.is_ready for agent in self._agents_by_node.get(node, {}).values())

    def _on_pod(self, old: PodView | None, new: PodView | None) -> None:
        if old is not None and (new is None or old.job_uid != new.job_uid):
            pods = self._pods_by_job[old.job_uid]
            pods.pop(old.key, None)
            if not pods:
                del self._pods_by_job[old.job_uid]
            self._wake_uid(old.job_uid)
        if new is not None:
            self._pods_by_job[new.job_uid][new.key] = new
            self._wake_uid(new.job_uid)
        self._place(old, new)

    def _place(self, old: PodView | None, new: PodView | None) -> None:
        if old is not None and old.node is not None and (new is None or new.node != old.node):
            del self._pods_by_node[old.node][old.key]
            if not self._pods_by_node[old.node]:
                del self._pods_by_node[old.node]
        if new is not None and new.node is not None:
            self._pods_by_node[new.node][new.key] = new.job_uid
        self._keep_off(old, new)

    def _keep_off(self, old: PodView | None, new: PodView | None) -> None:
        """A pod that has found no place may be wanted anew once a node is well that it keeps off."""
        if old is not None and old.node is None:
            for name in old.avoided_nodes:
                self._pods_kept_off[name].pop(old.key, None)
                if not self._pods_kept_off[name]:
                    del self._pods_kept_off[name]
        if new is not None and new.node is None:
            for name in new.avoided_nodes:
                self._pods_kept_off[name][new.key] = new.job_uid

    def _on_node(self, old: NodeView | None, new: NodeView | None) -> None:
        name = (new or old).name  # type: ignore[union-attr] # one of them is there
        self._note_removal(name, is_removed=new is None)
        if old is None or new is None or (_is_ready(old), old.is_silent) != (_is_ready(new), new.is_silent):
            self._doubt(name, old, new)
        if _health(old) != _health(new):
            self._wake(name)

    def _note_removal(self, name: str, *, is_removed: bool) -> None:
        """Those that are longer ago need no remembering: every pod that was there was placed before."""
        now = time.monotonic()
        self._removed.pop(name, None)
        self._removed = {node: when for node, when in self._removed.items() if now - when < _UNHEARD_SECONDS}
        if is_removed:
            self._removed[name] = now

    def _doubt(self, name: str, old: NodeView | None, new: NodeView | None) -> None:
        """Begins it, or ends it: the kubelet has spoken."""
        if (doubted := self._doubted.pop(name, None)) is not None:
            doubted.cancel()
        if new is None or not new.is_silent:
            return
        seconds = _DOUBT_SECONDS if self.nodes.failed_seconds() < _AFTER_OUTAGE_SECONDS else 0.0
        if old is None:  # an operator that begins may have been away with the API server
            since_seconds = max(0.0, time.time() - (new.not_ready_time or 0.0))
            seconds = max(seconds, _BEGIN_DOUBT_SECONDS - since_seconds)
        if seconds > 0:
            self._doubted[name] = asyncio.get_running_loop().call_later(seconds, self._believe, name)

    def _believe(self, name: str) -> None:
        """The node is still silent."""
        del self._doubted[name]
        self._wake(name)

    def _wake(self, node: str) -> None:
        self._wake_those_on(node)
        self._wake_reported(node)

    def _wake_those_on(self, node: str) -> None:
        """The jobs with pods there, or with pods that have found no place and keep off it."""
        pods = [*self._pods_by_node.get(node, {}).values(), *self._pods_kept_off.get(node, {}).values()]
        for uid in set(pods):
            self._wake_uid(uid)

    def _wake_reported(self, node: str) -> None:
        """The jobs that the node's agent tells of."""
        report = self.reports.get(node)
        for job in jobs_of(report) if report is not None else ():
            self._wake_job(job)

    def _on_report(self, old: NodeReport | None, new: NodeReport | None) -> None:
        before = jobs_of(old) if old is not None else frozenset()
        after = jobs_of(new) if new is not None else frozenset()
        name = (new or old).node  # type: ignore[union-attr] # one of them is there
        for job in before - after:
            self._nodes_by_job[job].discard(name)
            if not self._nodes_by_job[job]:
                del self._nodes_by_job[job]
        for job in after:
            self._nodes_by_job[job].add(name)
        self._take_notice(name, old, new)
        acted = old is None or new is None or old.observed_generation != new.observed_generation
        for job in before | after:
            if acted or _news(old, job) != _news(new, job):
                self._wake_job(job)
            elif _told(old, job) != _told(new, job):
                self._wake_later(job)

    def _take_notice(self, name: str, old: NodeReport | None, new: NodeReport | None) -> None:
        """That the node is about to be taken away, or is not any more: also for pods without a rank yet."""
        notice = new.notice if new is not None else None
        if notice is not None:
            self.leaving.add(name)
        else:
            self.leaving.discard(name)
        if notice != (old.notice if old is not None else None):
            self._wake_those_on(name)

    def _on_agent(self, old: AgentView | None, new: AgentView | None) -> None:
        for view, is_there in ((old, False), (new, True)):
            if view is None or view.node is None:
                continue
            agents = self._agents_by_node[view.node]
            if is_there:
                agents[view.pod] = view
            else:
                agents.pop(view.pod, None)
        for node in {view.node for view in (old, new) if view is not None and view.node is not None}:
            self._wake_reported(node)


def _is_ready(node: NodeView | None) -> bool:
    return node is not None and node.not_ready_time is None


def _health(node: NodeView | None) -> object:
    """What of a node may end a gang."""
    if node is None or node.not_ready_time is not None:
        return None
    return [(condition.type, condition.status) for condition in node.conditions]


def _told(report: NodeReport | None, job: JobKey) -> list[JobStatus]:
    return [] if report is None else [status for status in report.jobs if status.job == job]


def _news(report: NodeReport | None, job: JobKey) -> list[object]:
    """Of what the report tells of the job, all that somebody may wait for: without the steps that ranks make and hold
    one after another.
    """
    return [
        (
            status.run, status.world_size, status.latest_persisted_step, status.pending_bytes, status.pending_steps,
            status.incomplete_steps, status.persist_error, status.final_step,
            [_rank_news(rank) for rank in status.ranks],
        )
        for status in _told(report, job)
    ]  # fmt: skip


def _rank_news(rank: RankStatus) -> tuple[object, ...]:
    has_step = rank.global_step is not None
    return rank.rank, rank.joined_time, rank.alive, rank.clean, rank.restored_step, rank.restored_time, has_step


def _pod_paths(namespaces: Sequence[str]) -> dict[str, str]:
    """One watch for each namespace, or one, under the empty name, for all of them."""
    if not namespaces:
        return {"": "/api/v1/pods"}
    return {namespace: f"/api/v1/namespaces/{namespace}/pods" for namespace in namespaces}


def _keyed_pod(document: JSON) -> tuple[tuple[str, str], PodView] | None:
    pod = pod_of(document)
    return None if pod is None else (pod.key, pod)


def _keyed_node(document: JSON) -> tuple[str, NodeView]:
    node = node_of(document)
    return node.name, node


def _keyed_report(document: JSON) -> tuple[str, NodeReport]:
    report = report_of(document)
    return report.node, report


def _keyed_agent(document: JSON) -> tuple[str, AgentView]:
    agent = agent_of(document)
    return agent.pod, agent
