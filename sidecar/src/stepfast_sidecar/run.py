"""What the agent knows of one run: its ranks' connections, its steps' flow, its account. Does nothing by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from stepfast.histories import SaveRow
from stepfast.messages import Hello, Message
from stepfast.nodestatus import JobStatus, RankStatus, SaveStatus
from stepfast.step import JobKey
from stepfast_sidecar.flow import RunFlow
from stepfast_sidecar.intake import Peer


def _open() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(slots=True)
class Session:
    """One rank's connection, or what remains of it."""

    hello: Hello
    peer: Peer
    joined_time: float
    volume_id: str = ""  # of the pod that it is a process of; empty on a machine without pods
    alive: bool = True
    clean: bool = False
    file_bytes: int | None = None  # the largest of its files that it has spoken of; None: of none so far
    ended_time: float | None = None
    global_step: int | None = None
    step_time: float | None = None
    total_steps: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    referable: tuple[int, ...] = ()  # steps that later ones may refer to, as rank 0 says
    waiting: bool = False
    waited_time: float | None = None
    restored_step: int | None = None
    restored_time: float | None = None
    restored_tier: str | None = None
    restore_seconds: float | None = None
    stream_broken: bool = True  # until it begins a file: an agent that was started meanwhile has none of its windows
    stream_open: asyncio.Event = field(default_factory=asyncio.Event)  # the file's first window is stored, or lost

    def speak_of(self, file_bytes: int) -> bool:
        """It says how large one of its files will be; whether that is news: larger than any before."""
        is_news = self.file_bytes is None or file_bytes > self.file_bytes
        self.file_bytes = max(file_bytes, self.file_bytes or 0)
        return is_news

    def begin_stream(self) -> None:
        """A first window is asked for: the windows after it go out once it is stored."""
        self.stream_broken = False
        self.stream_open.clear()

    def break_stream(self) -> None:
        """What is stored of the file is of no use: it has to be begun again."""
        self.stream_broken = True
        self.stream_open.set()

    def status(self) -> RankStatus:
        return RankStatus(
            rank=self.hello.rank, pid=self.hello.pid, alive=self.alive, clean=self.clean, joined_time=self.joined_time,
            global_step=self.global_step, step_time=self.step_time, ended_time=self.ended_time,
            restored_step=self.restored_step, restored_time=self.restored_time, restored_tier=self.restored_tier,
            restore_seconds=self.restore_seconds, metrics=dict(self.metrics) or None, waiting=self.waiting,
            waited_time=self.waited_time, total_steps=self.total_steps,
        )  # fmt: skip


@dataclass(slots=True)
class Run:
    """One run of the job on this node."""

    flow: RunFlow
    world_size: int
    replicated: str = ""  # digest of the replicated state's layout; equal on all ranks
    resume_step: int = 0
    max_to_keep: int = 0
    sessions: dict[int, Session] = field(default_factory=dict)
    stalls: dict[int, float] = field(default_factory=dict)  # by step, of rank 0 or the node's first rank
    saved: dict[int, tuple[float, int]] = field(default_factory=dict)  # by step: time, this node's bytes
    save_count: int = 0
    stall_total: float = 0.0
    stall_last: float = 0.0
    stall_max: float = 0.0
    skipped: int = 0
    dropped: int = 0
    persisted_step: int | None = None
    persisted_time: float | None = None
    persisted_bytes: int | None = None
    persist_failure: str | None = None
    commit_failures: dict[int, str] = field(default_factory=dict)  # by step
    incomplete: set[int] = field(default_factory=set)
    """Steps whose part is written here, and of which the storage lacked another node's when it was last looked."""
    failures: int = 0
    final_step: int | None = None
    mirrored_step: int | None = None  # the newest that another node holds in memory, too
    mirror_error: str | None = None
    origin: int | None = None  # index of the node that it is mirrored of; None: it is this node's own
    may_commit: asyncio.Event = field(default_factory=_open)  # while steps of another history are not in its way

    def leads(self, step: int) -> bool:
        """Whether this node's agent writes the step's manifest first: it has rank 0, or the first that shares in it."""
        sharers = self.flow.sharers_of(step)
        first = 0 if sharers is None else sharers.first
        return first in self.sessions or any(holding.rank == first for holding in self.flow.holdings.values())

    @property
    def node(self) -> int:
        """The index of this node in the gang."""
        told = [session.hello.node for session in self.sessions.values()]
        held = [holding.record.node for holding in self.flow.holdings.values() if holding.record is not None]
        return min([*told, *held], default=0)

    @property
    def nodes(self) -> int:
        """How many nodes the gang has, if all have as many ranks as this one."""
        return -(-self.world_size // max(1, self.flow.local_world_size))

    @property
    def persist_error(self) -> str | None:
        """Why persisting or committing fails at present."""
        if self.persist_failure is None and self.commit_failures:
            return self.commit_failures[max(self.commit_failures)]
        return self.persist_failure

    @property
    def waits_for_others(self) -> bool:
        """Whether all that is pending here has its part written, and lacks another node's."""
        return all(step in self.incomplete for step in self.flow.pending_steps())

    @property
    def is_training(self) -> bool:
        """Whether ranks of it live, and none has died that was not back since."""
        sessions = self.sessions.values()
        return any(session.alive for session in sessions) and all(
            session.alive or session.clean for session in sessions
        )

    @property
    def is_over(self) -> bool:
        return bool(self.sessions) and not any(session.alive for session in self.sessions.values())

    @property
    def is_empty(self) -> bool:
        """Whether nothing of it is held or still to be done: only its account is left."""
        return self.is_over and not self.flow.holdings and not self.flow.pending_steps()

    def push(self, message: Message) -> None:
        """Tells every rank of it on this node."""
        for session in self.sessions.values():
            if session.alive:
                session.peer.send(message)

    def count_save(self, step: int, stall_seconds: float) -> None:
        """A save of the gang, as this node's first rank saw it."""
        self.save_count += 1
        self.stall_last = stall_seconds
        self.stall_total += stall_seconds
        self.stall_max = max(self.stall_max, stall_seconds)
        self.stalls[step] = stall_seconds

    def count_commit(self, step: int, committed_time: float, size_bytes: int) -> None:
        """A step's manifest is there; what was noted for steps before it is of no more use."""
        if self.persisted_step is not None and step < self.persisted_step:
            return
        self.persisted_step, self.persisted_time, self.persisted_bytes = step, committed_time, size_bytes
        pending = {*self.flow.pending_steps(), *self.flow.uncommitted_parts()}
        for noted in (self.saved, self.stalls):
            for old in [s for s in noted if s < step and s not in pending]:
                del noted[old]

    def history_row(self, step: int, outcome: str, duration_seconds: float | None, size_bytes: int) -> SaveRow:
        """The save's row of checkpointHistories.csv."""
        return SaveRow(
            global_step=step, run=self.flow.run, outcome=outcome,
            saved_time=self.saved.get(step, (time.time(), 0))[0], stall_seconds=self.stalls.pop(step, 0.0),
            duration_seconds=duration_seconds, size_bytes=size_bytes, world_size=self.world_size,
        )  # fmt: skip

    def status(self, job: JobKey) -> JobStatus:
        """What the node's status says of it."""
        pending = self.flow.pending_steps()
        return JobStatus(
            job=job,
            run=self.flow.run,
            world_size=self.world_size,
            ranks=tuple(session.status() for _, session in sorted(self.sessions.items())),
            saves=SaveStatus(
                count=self.save_count, stall_seconds_total=self.stall_total, stall_seconds_last=self.stall_last,
                stall_seconds_max=self.stall_max, skipped=self.skipped, dropped=self.dropped,
            ),
            latest_memory_step=self.flow.memory_step(),
            latest_persisted_step=self.persisted_step,
            latest_persisted_time=self.persisted_time,
            latest_persisted_bytes=self.persisted_bytes,
            pending_bytes=self.flow.pending_bytes(),
            pending_steps=tuple(pending),
            incomplete_steps=tuple(step for step in pending if step in self.incomplete),
            persist_error=self.persist_error,
            final_step=self.final_step,
            mirrored_step=self.mirrored_step,
            mirror_error=self.mirror_error,
        )  # fmt: skip


def newest_run(runs: dict[str, Run]) -> str | None:
    """Of a job's runs, in the order in which they came, the one whose ranks train: the last."""
    return next(reversed(runs), None)
