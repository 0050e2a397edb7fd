"""What SDK, launcher, supervisor and agent say to each other, and what each value may be: out of range raises
ProtocolError. How it travels is `protocol`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stepfast.errors import ProtocolError, ProtocolMismatch, SpecError
from stepfast.lentfile import MAX_LENT_BYTES
from stepfast.ranks import RankSet
from stepfast.step import MAX_STEP, MAX_WORLD_SIZE, JobKey, is_file_name, is_run

VERSION = 1
MAX_SAVE_BYTES = 2**44
MAX_SECONDS = 1e9  # that anything may have taken; sums of it stay numbers
MAX_METRICS = 64
MAX_REFERABLE = 1024  # steps: those that a gang may refer to are few
MAX_METRIC_NAME = 64  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of all messages."""

    @property
    def descriptors(self) -> int:
        """How many file descriptors travel with the frame."""
        return 0


# ---------------------------------------------------------------- from a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """The first frame of a rank. All ranks of a run on a node say the same but for rank, local rank and pid."""

    version: int
    job: str
    run: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: int
    pid: int
    storage_uri: str
    memory_bytes: int  # the job's own limit on this node; 0: the agent's
    max_to_keep: int
    resume_step: int

    def __post_init__(self) -> None:
        _check_version(self.version)
        _check_job(self.job)
        check(is_run(self.run), f"run {self.run!r}")
        check(1 <= self.world_size <= MAX_WORLD_SIZE, f"world size {self.world_size}")
        check(0 <= self.rank < self.world_size, f"rank {self.rank} of {self.world_size}")
        check(1 <= self.local_world_size <= self.world_size, f"local world size {self.local_world_size}")
        check(0 <= self.local_rank < self.local_world_size, f"local rank {self.local_rank}")
        check(0 <= self.node < MAX_WORLD_SIZE, f"node {self.node}")
        check(0 < self.pid < 2**31, f"pid {self.pid}")
        check(0 <= self.memory_bytes < 2**60, f"memory_bytes {self.memory_bytes}")
        check(0 <= self.max_to_keep < 2**31, f"max_to_keep {self.max_to_keep}")
        _check_step(self.resume_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect(Message):
    """How large this rank's next save will be: the agent makes the slots in the background."""

    size_bytes: int

    def __post_init__(self) -> None:
        check(0 < self.size_bytes <= MAX_SAVE_BYTES, f"size_bytes {self.size_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve(Message):
    """Asks for a slot for one window of a file; answered by Reserved or Failure, when there is one.

    `drop`: steps that the gang decided to give up (I7). `copying`: slots reserved before, whose copies are under way:
    what else is reserved and not staged was given up.
    """

    id: int
    step: int
    name: str
    size_bytes: int
    window_begin: int
    drop: tuple[int, ...]
    copying: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_step(self.step)
        check(is_file_name(self.name), f"name {self.name!r}")
        check(0 < self.size_bytes <= MAX_SAVE_BYTES, f"size_bytes {self.size_bytes}")
        check(0 <= self.window_begin < self.size_bytes, f"window_begin {self.window_begin}")
        check(len(self.drop) <= 1024, "drop")
        check(len(self.copying) <= 1024, "copying")


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged(Message):
    """The slot holds what its control page says. The only message of a save after Reserve; constant size."""

    slot: int
    seq: int
    stall_seconds: float

    def __post_init__(self) -> None:
        check(0 <= self.slot < 4096, f"slot {self.slot}")
        check(0 <= self.seq <= MAX_STEP, f"seq {self.seq}")
        check(abs(self.stall_seconds) <= MAX_SECONDS, f"stall_seconds {self.stall_seconds}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped(Message):
    """The gang decided not to save this step (`onBusy: Skip`)."""

    step: int

    def __post_init__(self) -> None:
        _check_step(self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class GaveUp(Message):
    """This rank has reserved a slot for the step and will not stage it: the step is nobody's any more."""

    step: int

    def __post_init__(self) -> None:
        _check_step(self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharers(Message):
    """Which ranks of the gang have files in the step (`ranks`), this one among them: said of a step whose slots did not
    say so.
    """

    step: int
    ranks: str

    def __post_init__(self) -> None:
        _check_step(self.step)
        try:
            RankSet.parse(self.ranks, MAX_WORLD_SIZE)
        except ValueError as error:
            raise ProtocolError(f"out of range: ranks: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Message):
    """Heartbeat: this rank finished the step. `total_steps`: how many it is to make in all; 0: it has not said."""

    step: int
    time: float
    metrics: Mapping[str, float]
    total_steps: int = 0

    def __post_init__(self) -> None:
        _check_step(self.step)
        _check_step(self.total_steps)
        check(len(self.metrics) <= MAX_METRICS and all(len(k) <= MAX_METRIC_NAME for k in self.metrics), "metrics")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(Message):
    """This rank has restored the step (0: it starts fresh), which took so many seconds."""

    step: int
    tier: str
    time: float
    seconds: float

    def __post_init__(self) -> None:
        _check_step(self.step)
        check(self.tier in ("Memory", "Persistent", "None"), f"tier {self.tier!r}")
        check(abs(self.seconds) <= MAX_SECONDS, f"seconds {self.seconds}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps(Message):
    """Asks for the job's committed steps; answered by CommittedSteps or Failure."""

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Supersede(Message):
    """Rolls the job back: other runs' committed steps above this one (-1: all of them) are marked superseded.

    Answered by CommittedSteps, with those that were superseded, or Failure.
    """

    id: int
    step: int

    def __post_init__(self) -> None:
        _check_step(max(0, self.step))


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside(Message):
    """Marks this committed step alone superseded, because it is damaged.

    Answered by CommittedSteps, with it if it was committed, or Failure.
    """

    id: int
    step: int

    def __post_init__(self) -> None:
        _check_step(self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove(Message):
    """Removes a committed step that is of no more use; answered by CommittedSteps, with it, or Failure."""

    id: int
    step: int

    def __post_init__(self) -> None:
        _check_step(self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch(Message):
    """Asks for an object of the job's folder, read-only; answered by Fetched with a descriptor, or Failure.

    `refresh`: from the persistent tier even if it is held in memory.
    """

    id: int
    path: str
    refresh: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrow(Message):
    """Asks for memory beside the slots that the run's ranks on this node share under this name; answered by Lent, or
    Failure.

    An agent from before this message closes the connection, as for every frame that it does not know.
    """

    id: int
    name: str
    size_bytes: int

    def __post_init__(self) -> None:
        check(is_file_name(self.name), f"name {self.name!r}")
        check(0 < self.size_bytes <= MAX_LENT_BYTES, f"size_bytes {self.size_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Want(Message):
    """Somebody waits for this step to be committed: it is due, and never dropped."""

    step: int

    def __post_init__(self) -> None:
        _check_step(self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Referable(Message):
    """The steps that the gang's saves refer to, or may soon: retention is to leave them. Said by rank 0, before a step
    is staged after which they would go; each time all of them.
    """

    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        check(len(self.steps) <= MAX_REFERABLE, f"{len(self.steps)} referable steps")
        for step in self.steps:
            _check_step(step)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalSaved(Message):
    """The gang saved this step because it was asked to stop, and waits to be stopped."""

    step: int

    def __post_init__(self) -> None:
        _check_step(self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye(Message):
    """The rank ends in order. A connection that ends without it means that the process died."""


# ---------------------------------------------------------------- from a node's launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Launching(Message):
    """A launcher's only frame: the ranks `[first_rank, first_rank + ranks)` are about to start, and will restore a step
    as soon as they have imported torch. `resume_step`: None: the newest that is committed; 0: none.
    """

    version: int
    job: str
    run: str
    storage_uri: str
    first_rank: int
    ranks: int
    resume_step: int | None

    def __post_init__(self) -> None:
        _check_version(self.version)
        _check_job(self.job)
        check(is_run(self.run), f"run {self.run!r}")
        check(1 <= self.ranks <= MAX_WORLD_SIZE, f"ranks {self.ranks}")
        check(0 <= self.first_rank < MAX_WORLD_SIZE, f"first rank {self.first_rank}")
        _check_step(self.resume_step or 0)


# ---------------------------------------------------------------- from whoever supervises the node


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch(Message):
    """Asks for the node's status now and after each change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSave(Message):
    """Asks the gang to save at its next agreed step and to wait there to be stopped."""

    job: str
    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushRun(Message):
    """Asks to persist everything that is staged of the run."""

    job: str
    run: str


# ---------------------------------------------------------------- from the agent


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Message):
    version: int
    share_bytes: int  # of the memory tier, for this rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved(Message):
    """A slot, its file (one descriptor), and how many bytes of the file it takes at once."""

    id: int
    slot: int
    seq: int
    capacity_bytes: int
    slots: int  # how many the rank has
    persisting: tuple[int, ...]
    unpersisted: tuple[int, ...]  # staged, due, not persisted

    @property
    def descriptors(self) -> int:
        return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotReady(Message):
    """A slot was made ahead of its first use: map it while training goes on."""

    slot: int
    capacity_bytes: int

    @property
    def descriptors(self) -> int:
        return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(Message):
    """The answer to a request that could not be served. `kind` names an error of `stepfast.errors`."""

    id: int
    kind: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedSteps(Message):
    id: int
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched(Message):
    """The object's bytes stand in the descriptor's file from `offset` on."""

    id: int
    offset: int
    size_bytes: int
    tier: str

    @property
    def descriptors(self) -> int:
        return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent(Message):
    """So many bytes of data are lent under that name, as `stepfast.lentfile` says, in the descriptor's file: the same
    for every rank that asks. 0: nothing is, and no descriptor comes.
    """

    id: int
    granted_bytes: int

    def __post_init__(self) -> None:
        check(0 <= self.granted_bytes <= MAX_LENT_BYTES, f"granted_bytes {self.granted_bytes}")

    @property
    def descriptors(self) -> int:
        return 1 if self.granted_bytes else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(Message):
    """The step's manifest is written."""

    step: int
    committed_time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreferable(Message):
    """Nothing is to refer to these steps: they are gone, or what is committed of them is another run's."""

    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistFailed(Message):
    """Persisting this step fails for now; the agent goes on trying."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped(Message):
    """The step will not be committed: a newer one took its place."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequested(Message):
    """Save at the next agreed step, then wait to be stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status(Message):
    """`nodestatus.to_document` of the node, as JSON text."""

    document: str


FROM_RANK = (
    Hello, Expect, Reserve, Staged, Sharers, Skipped, GaveUp, Progress, Restored, Steps, Supersede, SetAside, Remove,
    Fetch, Borrow, Want, Referable, FinalSaved, Bye,
)  # fmt: skip
FROM_LAUNCHER = (Launching,)
FROM_SUPERVISOR = (Watch, RequestSave, FlushRun)
FROM_AGENT = (
    Welcome, Reserved, SlotReady, Failure, CommittedSteps, Fetched, Lent, Committed, Unreferable, PersistFailed,
    Dropped, SaveRequested, Status,
)  # fmt: skip


def check(fine: bool, what: str) -> None:
    """Raises ProtocolError, saying what is out of range, unless it is fine."""
    if not fine:
        raise ProtocolError(f"out of range: {what}")


def _check_version(version: int) -> None:
    if version != VERSION:
        raise ProtocolMismatch(
            f"the SDK speaks protocol {version}, the agent {VERSION}: install matching versions of both"
        )


def _check_job(job: str) -> None:
    try:
        JobKey.parse(job)
    except SpecError as error:
        raise ProtocolError(str(error)) from error


def _check_step(step: int) -> None:
    check(0 <= step <= MAX_STEP, f"step {step}")
