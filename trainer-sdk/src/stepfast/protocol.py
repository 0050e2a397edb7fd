"""The protocol between SDK and agent: frames, messages, their limits. No sockets, no pickle.

A frame is a four-byte big-endian length and that many bytes of JSON, `{"type": <message>, …fields}`. Descriptors
travel beside the first byte of a frame (SCM_RIGHTS); the message says how many belong to it. What does not parse, is
over the limit or out of range raises ProtocolError, and whoever reads closes that connection and touches nothing else.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from math import isfinite
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from stepfast.errors import ProtocolError, ProtocolMismatch, SpecError
from stepfast.step import MAX_STEP, MAX_WORLD_SIZE, JobKey, is_file_name, is_run

VERSION = 1
REQUEST_LIMIT = 64 * 1024  # bytes of one frame to the agent
ANSWER_LIMIT = 16 * 1024 * 1024  # bytes of one frame from the agent
MAX_SAVE_BYTES = 2**44
MAX_SECONDS = 1e9  # that anything may have taken; sums of it stay numbers
MAX_METRICS = 64
MAX_METRIC_NAME = 64  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of all messages. `descriptors`: how many file descriptors travel with the frame."""

    descriptors: ClassVar[int] = 0


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
        if self.version != VERSION:
            raise ProtocolMismatch(
                f"the SDK speaks protocol {self.version}, the agent {VERSION}: install matching versions of both"
            )
        try:
            JobKey.parse(self.job)
        except SpecError as error:
            raise ProtocolError(str(error)) from error
        _check(is_run(self.run), f"run {self.run!r}")
        _check(1 <= self.world_size <= MAX_WORLD_SIZE, f"world size {self.world_size}")
        _check(0 <= self.rank < self.world_size, f"rank {self.rank} of {self.world_size}")
        _check(1 <= self.local_world_size <= self.world_size, f"local world size {self.local_world_size}")
        _check(0 <= self.local_rank < self.local_world_size, f"local rank {self.local_rank}")
        _check(0 <= self.node < MAX_WORLD_SIZE, f"node {self.node}")
        _check(0 < self.pid < 2**31, f"pid {self.pid}")
        _check(0 <= self.memory_bytes < 2**60, f"memory_bytes {self.memory_bytes}")
        _check(0 <= self.max_to_keep < 2**31, f"max_to_keep {self.max_to_keep}")
        _check_step(self.resume_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect(Message):
    """How large this rank's next save will be: the agent makes the slots in the background."""

    size_bytes: int

    def __post_init__(self) -> None:
        _check(0 < self.size_bytes <= MAX_SAVE_BYTES, f"size_bytes {self.size_bytes}")


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
        _check(is_file_name(self.name), f"name {self.name!r}")
        _check(0 < self.size_bytes <= MAX_SAVE_BYTES, f"size_bytes {self.size_bytes}")
        _check(0 <= self.window_begin < self.size_bytes, f"window_begin {self.window_begin}")
        _check(len(self.drop) <= 1024, "drop")
        _check(len(self.copying) <= 1024, "copying")


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged(Message):
    """The slot holds what its control page says. The only message of a save after Reserve; constant size."""

    slot: int
    seq: int
    stall_seconds: float

    def __post_init__(self) -> None:
        _check(0 <= self.slot < 4096, f"slot {self.slot}")
        _check(0 <= self.seq <= MAX_STEP, f"seq {self.seq}")
        _check(abs(self.stall_seconds) <= MAX_SECONDS, f"stall_seconds {self.stall_seconds}")


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
class Progress(Message):
    """Heartbeat: this rank finished the step. `total_steps`: how many it is to make in all; 0: it has not said."""

    step: int
    time: float
    metrics: Mapping[str, float]
    total_steps: int = 0

    def __post_init__(self) -> None:
        _check_step(self.step)
        _check_step(self.total_steps)
        _check(len(self.metrics) <= MAX_METRICS and all(len(k) <= MAX_METRIC_NAME for k in self.metrics), "metrics")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(Message):
    """This rank has restored the step (0: it starts fresh), which took so many seconds."""

    step: int
    tier: str
    time: float
    seconds: float

    def __post_init__(self) -> None:
        _check_step(self.step)
        _check(self.tier in ("Memory", "Persistent", "None"), f"tier {self.tier!r}")
        _check(abs(self.seconds) <= MAX_SECONDS, f"seconds {self.seconds}")


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
class Fetch(Message):
    """Asks for an object of the job's folder, read-only; answered by Fetched with a descriptor, or Failure.

    `refresh`: from the persistent tier even if it is held in memory.
    """

    id: int
    path: str
    refresh: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Want(Message):
    """Somebody waits for this step to be committed: it is due, and never dropped."""

    step: int

    def __post_init__(self) -> None:
        _check_step(self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalSaved(Message):
    """The gang saved this step because it was asked to stop, and waits to be stopped."""

    step: int

    def __post_init__(self) -> None:
        _check_step(self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye(Message):
    """The rank ends in order. A connection that ends without it means that the process died."""


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

    descriptors: ClassVar[int] = 1
    id: int
    slot: int
    seq: int
    capacity_bytes: int
    slots: int  # how many the rank has
    persisting: tuple[int, ...]
    unpersisted: tuple[int, ...]  # staged, due, not persisted


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotReady(Message):
    """A slot was made ahead of its first use: map it while training goes on."""

    descriptors: ClassVar[int] = 1
    slot: int
    capacity_bytes: int


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

    descriptors: ClassVar[int] = 1
    id: int
    offset: int
    size_bytes: int
    tier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(Message):
    """The step's manifest is written."""

    step: int
    committed_time: float


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
    Hello, Expect, Reserve, Staged, Skipped, GaveUp, Progress, Restored, Steps, Supersede, Fetch, Want, FinalSaved, Bye,
)  # fmt: skip
FROM_SUPERVISOR = (Watch, RequestSave, FlushRun)
FROM_AGENT = (
    Welcome, Reserved, SlotReady, Failure, CommittedSteps, Fetched, Committed, PersistFailed, Dropped,
    SaveRequested, Status,
)  # fmt: skip
_BY_NAME: Mapping[str, type[Message]] = {cls.__name__: cls for cls in (*FROM_RANK, *FROM_SUPERVISOR, *FROM_AGENT)}


def encode(message: Message) -> bytes:
    """The message's frame."""
    document: dict[str, Any] = {"type": type(message).__name__}
    for field in fields(message):
        value = getattr(message, field.name)
        document[field.name] = dict(value) if isinstance(value, Mapping) else value
    body = json.dumps(document, separators=(",", ":")).encode()
    return len(body).to_bytes(4, "big") + body


def decode(body: bytes) -> Message:
    """The message in a frame's body. Raises ProtocolError."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a frame is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ProtocolError("a frame is not a JSON object")
    cls = _BY_NAME.get(str(document.pop("type", None)))
    if cls is None:
        raise ProtocolError("a frame of an unknown type")
    expected = _FIELD_TYPES[cls]
    # What came to a message later has a default, and an SDK from before it does not send it.
    if not _REQUIRED[cls] <= document.keys() <= expected.keys():
        raise ProtocolError(f"{cls.__name__} with the fields {sorted(document)[:20]}")
    values = {key: _read(f"{cls.__name__}.{key}", value, expected[key]) for key, value in document.items()}
    return cls(**values)


class Decoder:
    """Cuts a stream of bytes into messages. Holds at most one frame's bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Takes bytes in, yields the messages that are now whole. Raises ProtocolError."""
        self._buffer += data
        while len(self._buffer) >= 4:
            length = int.from_bytes(self._buffer[:4], "big")
            if length > self._limit:
                raise ProtocolError(f"a frame of {length} bytes is over the limit of {self._limit}")
            if len(self._buffer) < 4 + length:
                return
            body = bytes(self._buffer[4 : 4 + length])
            del self._buffer[: 4 + length]
            yield decode(body)


def _types_of(cls: type[Message]) -> Mapping[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


_FIELD_TYPES: Mapping[type[Message], Mapping[str, Any]] = {cls: _types_of(cls) for cls in _BY_NAME.values()}
_REQUIRED = {cls: {field.name for field in fields(cls) if field.default is MISSING} for cls in _BY_NAME.values()}


def _read(where: str, value: object, want: Any) -> Any:
    """The value, checked strictly against the field's type."""
    origin = get_origin(want)
    if origin is tuple:
        item = get_args(want)[0]
        _check(isinstance(value, list), f"{where} is not a list")
        return tuple(_read(where, entry, item) for entry in value)  # type: ignore[attr-defined]  # a list by now
    if origin is types.UnionType:
        return None if value is None else _read(where, value, get_args(want)[0])
    if origin is not None:  # Mapping[str, float]
        _check(isinstance(value, dict), f"{where} is not an object")
        return {key: _read(where, entry, float) for key, entry in value.items()}  # type: ignore[attr-defined]  # same
    if want is float:
        _check(isinstance(value, int | float) and not isinstance(value, bool), f"{where} is {value!r:.80}")
        is_huge = isinstance(value, int) and abs(value) >= 2**1000
        number = float("inf") if is_huge else float(value)  # type: ignore[arg-type]  # a number
        _check(isfinite(number) or where.endswith("metrics"), f"{where} is {number}")
        return number
    if want is int:
        _check(type(value) is int and abs(value) < 2**63, f"{where} is {value!r:.80}")
        return value
    _check(type(value) is want, f"{where} is {value!r:.80}")
    return value


def _check(fine: bool, what: str) -> None:
    if not fine:
        raise ProtocolError(f"out of range: {what}")


def _check_step(step: int) -> None:
    _check(0 <= step <= MAX_STEP, f"step {step}")
