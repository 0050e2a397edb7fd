"""A slot's control page: what the slot's own file says about the bytes that follow it. Pure encoding, no I/O.

A slot is one file of the memory tier: a control page of 4096 bytes, then the bytes of a safetensors file (or, when a
file is larger than the rank's share of memory, one window of it). The state stands here, in the file, so that neither
a rank killed in the middle of a copy nor a restarted agent can take a half-written slot for a whole one (I4).

Two writers, each with records of its own, so that nobody ever writes over the other's:
 - the rank writes WRITING before its copy and STAGED after it, each in a place of its own under a checksum: a
   record torn by SIGKILL loses against the whole one before it;
 - the agent writes what became of the sequence number it read: PERSISTED or DROPPED.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from enum import StrEnum

from stepfast.ranks import EVERY_RANK, UNKNOWN, RankSet
from stepfast.references import MAX_REFERRED
from stepfast.step import MAX_STEP, MAX_WORLD_SIZE, is_file_name, is_run, is_tag

CONTROL_BYTES = 4096
_WRITING_PLACE, _STAGED_PLACE = 0, 1536
_AGENT_PLACE = 3072
_RECORD_BYTES = 1500
MAX_SHARERS_BYTES = 128  # more ranks than can be said so are told by a message
_MAX_TIME = 2.0**37  # seconds since the epoch: the year 6325, which calendars still know


class SlotState(StrEnum):
    EMPTY = "empty"
    WRITING = "writing"
    STAGED = "staged"
    PERSISTED = "persisted"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRecord:
    """What a rank says of a slot's bytes. `seq` grows with every use of the slot."""

    seq: int
    state: SlotState  # WRITING or STAGED
    run: str
    step: int
    name: str
    rank: int
    world_size: int
    node: int
    file_bytes: int  # of the whole file
    window_begin: int  # of the bytes in this slot, within the file
    window_bytes: int
    files: int  # how many files this rank has in this step
    saved_time: float
    replicated: str = ""
    due: bool = True  # whether the gang decided to persist this step
    tag: str = ""  # what its user calls the step; empty: nothing but its number
    sharers: str = EVERY_RANK  # which ranks have files in it (`ranks`)
    refers: tuple[int, ...] = ()  # older steps whose files hold what this one leaves out


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPage:
    """The rank's newest whole record (None: never used) and the agent's verdict on it."""

    record: SlotRecord | None
    verdict: SlotState | None  # PERSISTED or DROPPED, of this very record

    @property
    def state(self) -> SlotState:
        if self.record is None:
            return SlotState.EMPTY
        if self.record.state is SlotState.STAGED and self.verdict is not None:
            return self.verdict
        return self.record.state


def rank_record(record: SlotRecord) -> tuple[int, bytes]:
    """Where in the control page the record goes, and its bytes."""
    place = _STAGED_PLACE if record.state is SlotState.STAGED else _WRITING_PLACE
    document = asdict(record)
    if not record.refers:
        del document["refers"]  # most do not: an agent from before it reads them still
    return place, _frame(document)


def agent_record(seq: int, verdict: SlotState) -> tuple[int, bytes]:
    """Where in the control page the agent's verdict goes, and its bytes."""
    return _AGENT_PLACE, _frame({"seq": seq, "state": verdict})


def read_control(page: bytes) -> ControlPage:
    """Reads a control page. What does not parse counts as not written: a tenant's bytes can do no harm here."""
    records = [record for place in (_WRITING_PLACE, _STAGED_PLACE) if (record := _parse_record(_unframe(page, place)))]
    newest = max(records, key=lambda r: (r.seq, r.state is SlotState.STAGED), default=None)
    verdict = None
    mark = _unframe(page, _AGENT_PLACE)
    if newest is not None and mark is not None and mark.get("seq") == newest.seq:
        state = mark.get("state")
        verdict = next((known for known in (SlotState.PERSISTED, SlotState.DROPPED) if known == state), None)
    return ControlPage(record=newest, verdict=verdict)


def _frame(document: dict[str, object]) -> bytes:
    body = json.dumps(document, separators=(",", ":")).encode()
    if len(body) > _RECORD_BYTES:
        raise ValueError(f"a slot record of {len(body)} bytes")
    return len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body


def _unframe(page: bytes, place: int) -> dict[str, object] | None:
    length = int.from_bytes(page[place : place + 4], "little")
    body = page[place + 8 : place + 8 + length]
    if not 0 < length <= _RECORD_BYTES or zlib.crc32(body).to_bytes(4, "little") != page[place + 4 : place + 8]:
        return None
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _parse_record(doc: dict[str, object] | None) -> SlotRecord | None:
    if doc is None:
        return None
    try:
        doc = {**doc, "refers": _steps(doc.get("refers", []))}
        record = SlotRecord(**doc)  # type: ignore[arg-type]  # every field is checked below
        ints = (record.seq, record.step, record.file_bytes, record.window_begin, record.window_bytes)
        if not all(type(n) is int and 0 <= n <= MAX_STEP for n in ints):
            return None
        small = (record.rank, record.world_size, record.node, record.files)
        if not all(type(n) is int and 0 <= n <= MAX_WORLD_SIZE for n in small):
            return None
        if record.state not in (SlotState.WRITING, SlotState.STAGED) or not isinstance(record.due, bool):
            return None
        if not is_run(record.run) or not is_file_name(record.name) or type(record.replicated) is not str:
            return None
        if not _is_tag(record) or not _has_sharers(record) or not _has_references(record):
            return None
        if type(record.saved_time) not in (int, float) or not 0 <= record.saved_time < _MAX_TIME:
            return None
        return SlotRecord(**{**doc, "state": SlotState(record.state)})  # type: ignore[arg-type]  # checked above
    except (TypeError, ValueError):
        return None


def _is_tag(record: SlotRecord) -> bool:
    return type(record.tag) is str and (not record.tag or is_tag(record.tag))


def _steps(value: object) -> tuple[int, ...]:
    """Raises ValueError."""
    if not isinstance(value, list) or not all(type(step) is int for step in value):
        raise ValueError("not a list of steps")
    return tuple(value)


def _has_references(record: SlotRecord) -> bool:
    """Whether they are few, in order, and older than the step."""
    steps = record.refers
    is_in_order = list(steps) == sorted(set(steps)) and all(0 <= step < record.step for step in steps)
    return is_in_order and len(steps) <= MAX_REFERRED


def _has_sharers(record: SlotRecord) -> bool:
    """Whether the ranks that are said to have files in the step can be these, and are not others alone."""
    if type(record.sharers) is not str or len(record.sharers) > MAX_SHARERS_BYTES:
        return False
    if record.sharers in (EVERY_RANK, UNKNOWN):
        return True
    return record.rank in RankSet.parse(record.sharers, record.world_size)
