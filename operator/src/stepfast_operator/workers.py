"""How the pods of a gang stand, in the words of a decision: workers and their failures. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace

from stepfast.nodestatus import JobStatus
from stepfast.step import attempt_of
from stepfast_operator.document import JSON
from stepfast_operator.observed import Failure, Worker, WorkerPhase
from stepfast_operator.podview import NodeView, PodView, Termination
from stepfast_operator.record import Cause

_DISRUPTIONS = ("DisruptionTarget", "TerminationTarget")  # Kubernetes' word for it, and Kueue's
_OOM = "OOMKilled"
# The runtime's word, and the kubelet's, for a container that was gone when they began anew: its node was restarted.
_GONE_WITH_ITS_NODE = frozenset({"Unknown", "ContainerStatusUnknown"})
_PHASES = {
    "Pending": WorkerPhase.PENDING,
    "Running": WorkerPhase.RUNNING,
    "Unknown": WorkerPhase.RUNNING,
    "Succeeded": WorkerPhase.SUCCEEDED,
    "Failed": WorkerPhase.FAILED,
}
# Reasons of a pod that the kubelet ended for the node's sake.
_TAKEN_AWAY = frozenset({"Evicted", "Preempting", "Terminated", "NodeShutdown"})
_MESSAGE_CHARACTERS = 1000
_EXIT_CODES = range(256)
_CLOCK_SKEW_SECONDS = 300.0  # between a node and us, where its agent does not tell


def workers_of(
    pods: Iterable[PodView],
    nodes: int,
    node_of: Callable[[str], NodeView | None],
    *,
    is_gone: Callable[[PodView], bool],
    now: float,
    is_stopping: bool,
    wanted_conditions: Container[tuple[str, str]] = frozenset(),
) -> list[Worker]:
    """The workers of the gang whose pods these are. `is_stopping`: it was asked to end, so that pods which go
    have not failed. `is_gone`: whether a pod's node is no more. `wanted_conditions`: those of nodes, as (type,
    status), that are told.
    """
    by_index, found = {pod.index: pod for pod in pods}, []
    for index in range(nodes):
        pod = by_index.get(index)
        if pod is None:
            found.append(_missing(index, now, is_stopping))
            continue
        node = node_of(pod.node) if pod.node is not None else None
        worker = _worker(pod, node, is_gone(pod), now, is_stopping)
        ill = node.conditions_in(wanted_conditions) if node is not None else ()
        found.append(replace(worker, node_conditions=ill) if ill else worker)
    return found


def _missing(index: int, now: float, is_stopping: bool) -> Worker:
    gone = Failure(cause=Cause.POD_DELETED, time=now, message=f"the pod of node index {index} is gone")
    failure = None if is_stopping else gone
    return Worker(index=index, node=f"(node index {index})", phase=WorkerPhase.FAILED, failure=failure, is_placed=False)


def _worker(pod: PodView, node: NodeView | None, is_gone: bool, now: float, is_stopping: bool) -> Worker:
    phase = _PHASES.get(pod.phase, WorkerPhase.RUNNING)
    failure = _ended(pod, now) if phase is not WorkerPhase.SUCCEEDED else None
    if failure is None and not pod.has_ended and not is_stopping:
        failure = _lost(pod, node, is_gone, now) or _deleted(pod, now)
    if not (pod.has_ended or pod.is_alive):
        phase = WorkerPhase.FAILED
    return Worker(
        index=pod.index,
        node=pod.node or pod.name,
        pod=pod.name,
        phase=phase,
        failure=failure,
        message=_pending(pod) if phase is WorkerPhase.PENDING else "",
        running_since=pod.running_since,
        is_placed=pod.node is not None,
        is_unschedulable=pod.is_unschedulable,
        avoided_nodes=pod.avoided_nodes,
    )


def _ended(pod: PodView, now: float) -> Failure | None:
    """The container's end, as its launcher tells it, or as the kubelet does."""
    ended = pod.termination
    is_failed = ended is not None and ended.exit_code != 0
    if not is_failed and pod.phase != "Failed":
        return None
    if _taken_away(pod) is not None or pod.reason in _TAKEN_AWAY:
        # Its peers fail before its grace is over.
        times = (pod.deleted_time, ended.finished_time if ended is not None else None)
        return _disrupted(pod, min((time for time in times if time is not None), default=now))
    if ended is None or not is_failed:
        said = f"{pod.reason or 'the pod failed'}: {pod.message}".rstrip(": ")
        return _failure(pod, Cause.WORKER_FAILED, now, message=pod.other_failure or said)
    return _told(pod, ended, now)


def _told(pod: PodView, ended: Termination, now: float) -> Failure:
    """What the launcher wrote of the first rank that failed, with what it cannot know: that the kernel was out of
    memory.
    """
    said = _said(ended)
    rank, code = said.get("rank"), said.get("exitCode")
    is_rank = code != 0 and isinstance(rank, int)
    if not is_rank and ended.reason in _GONE_WITH_ITS_NODE and pod.deleted_time is None:
        message = f"node {pod.node} was restarted: nobody saw how its containers ended"
        return _failure(pod, Cause.NODE_LOST, ended.finished_time or now, reason=ended.reason, message=message)
    cause = Cause.RANK_FAILED if is_rank else Cause.WORKER_FAILED
    if ended.reason == _OOM:
        cause = Cause.OOM_KILLED
    return _failure(
        pod,
        cause,
        _time_of(said, pod, now) or ended.finished_time or now,
        rank=rank if is_rank else None,
        exit_code=code if is_rank else ended.exit_code,
        reason=ended.reason or None,
        message=_words_of(said, ended) or f"its launcher ended with exit code {ended.exit_code}",
    )


def _words_of(said: Mapping[str, JSON], ended: Termination) -> str:
    return str(said.get("message") or "") if said else ended.message.strip()


def _time_of(said: Mapping[str, JSON], pod: PodView, now: float) -> float | None:
    """The launcher's time, finer than the kubelet's. The file is the tenant's: a time that cannot be is none."""
    time = said.get("time")
    if isinstance(time, bool) or not isinstance(time, int | float):
        return None
    time -= pod.clock_ahead_seconds
    return min(float(time), now) if pod.created_time <= time <= now + _CLOCK_SKEW_SECONDS else None


def _lost(pod: PodView, node: NodeView | None, is_gone: bool, now: float) -> Failure | None:
    """A pod on a node that does not answer, or that is no more."""
    if is_gone:
        return _failure(pod, Cause.NODE_LOST, now, message=f"node {pod.node} is gone")
    since = node.not_ready_time if node is not None else None
    if node is None or since is None:
        return None
    if since < pod.created_time:
        return None  # it was placed there all the same: if it does not run in time, that is another failure
    return _failure(pod, Cause.NODE_LOST, since, message=f"node {pod.node} is not ready ({node.ready_message})")


def _deleted(pod: PodView, now: float) -> Failure | None:
    if _taken_away(pod) is not None:
        return _disrupted(pod, pod.deleted_time or now)
    if pod.deleted_time is None:
        return None
    return _failure(pod, Cause.POD_DELETED, pod.deleted_time, message="somebody deleted the pod")


def _disrupted(pod: PodView, when: float) -> Failure:
    condition = _taken_away(pod)
    reason = condition[2] if condition is not None else pod.reason
    message = condition[3] if condition is not None else pod.message or "the kubelet ended the pod"
    return _failure(pod, Cause.POD_EVICTED, when, reason=reason, message=message)


def _taken_away(pod: PodView) -> tuple[str, str, str, str] | None:
    """The condition that says by whom and why."""
    found = (pod.condition(kind) for kind in _DISRUPTIONS)
    return next((condition for condition in found if condition is not None and condition[1] == "True"), None)


def _failure(
    pod: PodView,
    cause: Cause,
    when: float,
    *,
    rank: int | None = None,
    exit_code: int | None = None,
    reason: str | None = None,
    message: str,
) -> Failure:
    return Failure(
        cause=cause,
        time=when,
        node=pod.node,
        pod=pod.name,
        rank=rank,
        exit_code=exit_code,
        reason=reason or pod.reason or None,
        pod_conditions=tuple((kind, status) for kind, status, _, _ in pod.conditions),
        message=message[-_MESSAGE_CHARACTERS:],
    )


def _said(ended: Termination) -> Mapping[str, JSON]:
    """What the launcher wrote into the termination log; empty for a container whose log has it not, even if that
    ends with JSON of its own.
    """
    try:
        said = json.loads(ended.message)
    except (ValueError, RecursionError):
        return {}
    code = said.get("exitCode") if isinstance(said, dict) else None
    return said if isinstance(code, int) and code in _EXIT_CODES else {}


def _pending(pod: PodView) -> str:
    """Why the pod does not run yet."""
    scheduled = pod.condition("PodScheduled")
    if scheduled is not None and scheduled[1] == "False":
        return f"{pod.name}: {scheduled[2]}: {scheduled[3]}"
    return f"{pod.name}: {pod.waiting}" if pod.waiting else pod.name


def had_ranks(pods: Iterable[PodView]) -> bool:
    """Whether the end of any of these shows that ranks ran in it: it ended well, or names the one that failed."""
    ends = [pod.termination for pod in pods if pod.termination is not None]
    return any(end.exit_code == 0 or isinstance(_said(end).get("rank"), int) for end in ends)


def previous_nodes(
    pods: Iterable[PodView], reports: Iterable[tuple[str, JobStatus]], attempt: int, ranks_per_node: int
) -> dict[int, str]:
    """Where the attempts before that one ran, by node index: in the first place as the agents say (node, what it tells
    of a run), in whose memory the ranks' steps are. A pod may be gone by now, and one that came later may never have
    had a rank.
    """
    told = [
        # Ranks are numbered in the order of the pods, and each pod has as many.
        (attempt_of(job.run), rank.rank // ranks_per_node, node)
        for node, job in reports
        for rank in job.ranks
    ]
    ran = [(pod.attempt, pod.index, pod.node) for pod in pods if pod.node is not None]
    return _newest_before(attempt, ran) | _newest_before(attempt, told)


def _newest_before(attempt: int, places: Iterable[tuple[int, int, str]]) -> dict[int, str]:
    """Of (attempt, node index, node) those of the newest attempt before that one."""
    earlier = [place for place in places if place[0] < attempt]
    newest = max((of for of, _, _ in earlier), default=0)
    return {index: node for of, index, node in earlier if of == newest}
