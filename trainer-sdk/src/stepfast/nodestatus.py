"""What a node's agent reports of the jobs on its node: the status of a CheckpointNode, in memory, on the wire and in
the cluster. Pure values; the field names in documents are those of the API (`CheckpointNode.status`), and so is the
form of times: RFC 3339, in UTC, to the microsecond.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import isfinite
from typing import Any

from stepfast.step import JobKey


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One rank of a run on this node, as the agent sees it. Times are seconds since the epoch.

    `alive` is False once its connection ended; `clean` says whether it said goodbye before.
    """

    rank: int
    pid: int
    alive: bool
    clean: bool
    joined_time: float
    global_step: int | None = None  # newest step it reported
    step_time: float | None = None  # when it reported that step
    total_steps: int | None = None  # that it is to make
    waiting: bool = False  # for memory: every slot holds a step that the storage has not taken yet
    waited_time: float | None = None  # when it last did so
    ended_time: float | None = None
    restored_step: int | None = None
    restored_time: float | None = None
    restored_tier: str | None = None  # Memory | Persistent | None
    restore_seconds: float | None = None
    metrics: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStatus:
    """Saves of a run so far, from rank 0 of the node: how often, how long training stood still (seconds)."""

    count: int = 0
    stall_seconds_total: float = 0.0
    stall_seconds_last: float = 0.0
    stall_seconds_max: float = 0.0
    skipped: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorStatus:
    """What this node holds of another node of the gang, of that index: its newest whole step, and all bytes of it."""

    node: int
    step: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """One run of one job on this node."""

    job: JobKey
    run: str
    world_size: int
    ranks: Sequence[RankStatus]
    saves: SaveStatus
    latest_memory_step: int | None = None  # newest step that every rank of this node holds staged
    latest_persisted_step: int | None = None  # newest committed step that this agent knows of
    latest_persisted_time: float | None = None
    latest_persisted_bytes: int | None = None
    pending_bytes: int = 0  # staged and due, not yet persisted
    pending_steps: Sequence[int] = ()
    incomplete_steps: Sequence[int] | None = None  # of those, whose other parts were missed; None: it does not say
    persist_error: str | None = None  # why persisting fails at present
    final_step: int | None = None  # the step that was saved on request before stopping
    mirrored_step: int | None = None  # newest step of this node's ranks that another node holds in memory, too
    mirror_error: str | None = None  # why none is, at present
    mirrors: Sequence[MirrorStatus] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionNotice:
    """The cloud is about to take the node away, or has begun to. `kind`: Preempt, Redeploy, Reboot or Terminate;
    `event`: the cloud's name of this one; `not_before_time`: None once it has begun. Times are seconds since the epoch.
    """

    kind: str
    event: str
    seen_time: float
    not_before_time: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """Everything the agent has to say. `written_time`: when it said so, by the node's clock, as all times are.
    `progress_seconds`: after how long at most it tells of a step that is made from then on.
    """

    node: str
    memory_limit_bytes: int
    memory_used_bytes: int
    jobs: Sequence[JobStatus]
    notice: EvictionNotice | None = None
    mirror_address: str | None = None  # where other agents reach this one; None: it takes no mirrors
    written_time: float | None = None
    progress_seconds: float | None = None

    def job(self, job: JobKey, run: str) -> JobStatus | None:
        """The status of that run, if the agent knows it."""
        return next((status for status in self.jobs if status.job == job and status.run == run), None)


_LAST_TIME = 253_402_300_799.0  # the end of year 9999: what RFC 3339 can say


def format_time(seconds: float) -> str:
    """Seconds since the epoch as the API writes a time; what no clock shows, as the nearest that one can."""
    shown = min(max(seconds, 0.0), _LAST_TIME) if isfinite(seconds) else 0.0
    return datetime.fromtimestamp(shown, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def parse_time(text: str) -> float:
    """Reads `format_time`'s text, and any RFC 3339 time. Raises ValueError or TypeError when it is none."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} names no time zone")
    return moment.timestamp()


def to_document(status: NodeStatus) -> dict[str, Any]:
    """The status as JSON-able values, in the API's words."""
    notice = {} if status.notice is None else {"evictionNotice": _pick(status.notice, _NOTICE_FIELDS)}
    return {
        "node": status.node,
        "memory": {"limitBytes": status.memory_limit_bytes, "usedBytes": status.memory_used_bytes},
        "jobs": [_job_document(job) for job in status.jobs],
        **notice,
        **({"mirrorAddress": status.mirror_address} if status.mirror_address is not None else {}),
        **({"writtenTime": format_time(status.written_time)} if status.written_time is not None else {}),
        **({"progressSeconds": status.progress_seconds} if status.progress_seconds is not None else {}),
    }


def from_document(document: Mapping[str, Any]) -> NodeStatus:
    """Reads `to_document`'s values. Raises KeyError, TypeError or ValueError when they are not that."""
    notice, written = document.get("evictionNotice"), document.get("writtenTime")
    return NodeStatus(
        notice=None if notice is None else EvictionNotice(**_read(notice, _NOTICE_FIELDS)),
        node=document["node"],
        memory_limit_bytes=document["memory"]["limitBytes"],
        memory_used_bytes=document["memory"]["usedBytes"],
        jobs=tuple(_job_from(job) for job in document["jobs"]),
        mirror_address=document.get("mirrorAddress"),
        written_time=None if written is None else parse_time(written),
        progress_seconds=document.get("progressSeconds"),
    )


def by_another_clock(status: NodeStatus, ahead_seconds: float) -> NodeStatus:
    """The same, told by a clock that the node's is so far ahead of. What the cloud announced is by the cloud's."""

    def told(time: float | None) -> float | None:
        return None if time is None else time - ahead_seconds

    def of_rank(rank: RankStatus) -> RankStatus:
        return replace(
            rank,
            joined_time=rank.joined_time - ahead_seconds,
            step_time=told(rank.step_time),
            waited_time=told(rank.waited_time),
            ended_time=told(rank.ended_time),
            restored_time=told(rank.restored_time),
        )

    def of_job(job: JobStatus) -> JobStatus:
        ranks = tuple(map(of_rank, job.ranks))
        return replace(job, ranks=ranks, latest_persisted_time=told(job.latest_persisted_time))

    notice = status.notice
    return replace(
        status,
        jobs=tuple(map(of_job, status.jobs)),
        notice=None if notice is None else replace(notice, seen_time=notice.seen_time - ahead_seconds),
        written_time=told(status.written_time),
    )


_RANK_FIELDS = {
    "rank": "rank", "pid": "pid", "alive": "alive", "clean": "clean", "joined_time": "joinedTime",
    "global_step": "globalStep", "step_time": "time", "ended_time": "endedTime", "restored_step": "restoredStep",
    "restored_time": "restoredTime", "restored_tier": "restoredTier", "restore_seconds": "restoreSeconds",
    "metrics": "metrics", "waiting": "waiting", "waited_time": "waitedTime",
    "total_steps": "totalSteps",
}  # fmt: skip
_SAVE_FIELDS = {
    "count": "count", "stall_seconds_total": "stallSecondsTotal", "stall_seconds_last": "stallSecondsLast",
    "stall_seconds_max": "stallSecondsMax", "skipped": "skipped", "dropped": "dropped",
}  # fmt: skip
_JOB_FIELDS = {
    "run": "run", "world_size": "worldSize", "latest_memory_step": "latestMemoryStep",
    "latest_persisted_step": "latestPersistedStep", "latest_persisted_time": "latestPersistedTime",
    "latest_persisted_bytes": "latestPersistedBytes", "pending_bytes": "pendingBytes",
    "persist_error": "persistError", "final_step": "finalStep",
    "mirrored_step": "mirroredStep", "mirror_error": "mirrorError",
}  # fmt: skip
_MIRROR_FIELDS = {"node": "node", "step": "step", "size_bytes": "sizeBytes"}

_NOTICE_FIELDS = {"kind": "kind", "event": "event", "seen_time": "seenTime", "not_before_time": "notBefore"}
_TIMES = frozenset(
    {"seenTime", "notBefore", "joinedTime", "time", "endedTime", "restoredTime", "waitedTime", "latestPersistedTime"}
)


def _pick(value: object, fields: Mapping[str, str]) -> dict[str, Any]:
    found = {key: got for name, key in fields.items() if (got := getattr(value, name)) is not None}
    return {key: format_time(got) if key in _TIMES else got for key, got in found.items()}


def _read(document: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
    return {
        name: parse_time(document[key]) if key in _TIMES else document[key]
        for name, key in fields.items()
        if key in document
    }


def _job_document(job: JobStatus) -> dict[str, Any]:
    return {
        "namespace": job.job.namespace,
        "name": job.job.name,
        **_pick(job, _JOB_FIELDS),
        "pendingSteps": list(job.pending_steps),
        **({"incompleteSteps": list(job.incomplete_steps)} if job.incomplete_steps is not None else {}),
        "ranks": [_pick(rank, _RANK_FIELDS) for rank in job.ranks],
        "saves": _pick(job.saves, _SAVE_FIELDS),
        **({"mirrors": [_pick(mirror, _MIRROR_FIELDS) for mirror in job.mirrors]} if job.mirrors else {}),
    }


def _job_from(document: Mapping[str, Any]) -> JobStatus:
    return JobStatus(
        job=JobKey(namespace=document["namespace"], name=document["name"]),
        pending_steps=tuple(document["pendingSteps"]),
        incomplete_steps=tuple(document["incompleteSteps"]) if "incompleteSteps" in document else None,
        ranks=tuple(RankStatus(**_read(rank, _RANK_FIELDS)) for rank in document["ranks"]),
        saves=SaveStatus(**_read(document["saves"], _SAVE_FIELDS)),
        mirrors=tuple(MirrorStatus(**_read(mirror, _MIRROR_FIELDS)) for mirror in document.get("mirrors", ())),
        **_read(document, _JOB_FIELDS),
    )
