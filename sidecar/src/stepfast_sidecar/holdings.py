"""What the slots of this node's ranks hold, what is known of their steps, and what is to be done about it: values that
decide nothing. `flow` decides, the job's room carries out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from stepfast.ranks import EVERY_RANK, UNKNOWN, RankSet
from stepfast.slot import SlotRecord


class Held(StrEnum):
    """What a slot is at present. RESERVED: handed to a rank, which writes or will write it."""

    FREE = "free"
    RESERVED = "reserved"
    STAGED = "staged"
    PERSISTING = "persisting"
    PERSISTED = "persisted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One slot of one rank, and what it holds."""

    rank: int
    slot: int
    held: Held = Held.FREE
    seq: int = 0
    record: SlotRecord | None = None
    due: bool = False

    @property
    def step(self) -> int | None:
        return self.record.step if self.record is not None and self.held not in (Held.FREE, Held.RESERVED) else None


@dataclass(slots=True)
class StepState:
    """What is known of one step of the run. `streamed`: by rank and name, the part's entries of files that are stored:
    they went out window by window, and nothing but the storage has them.
    """

    streamed: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)
    files: dict[int, int] = field(default_factory=dict)
    parted: bool = False
    persisting: bool = False
    committed: bool = False
    given_up: bool = False  # by the gang, too late for this node: another may have dropped its share in time
    tag: str = ""
    sharers: RankSet | None = None  # the ranks of the gang that have files in it; None: all
    is_open: bool = False  # nobody knows yet which ranks these are
    refers: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by rank, to which older steps

    def note(self, record: SlotRecord) -> None:
        """Takes in what a slot says of the step."""
        self.files[record.rank], self.tag = record.files, record.tag
        self.refers[record.rank] = record.refers
        if self.sharers is None:
            self.is_open = record.sharers == UNKNOWN
            if record.sharers not in (EVERY_RANK, UNKNOWN):
                self.sharers = RankSet.parse(record.sharers, record.world_size)

    @property
    def referred(self) -> set[int]:
        """The steps that the files of this node's ranks refer to."""
        return {older for steps in self.refers.values() for older in steps}


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """Upload these holdings, one or more files a rank, then write this node's part and commit.

    `streamed`: the entries of files that are stored already; `ranks`: those of this node that have files in the step;
    `sharers`: those of the gang, None: all of them; `refers`: older steps whose files hold what these leave out.
    """

    step: int
    run: str
    holdings: tuple[Holding, ...]
    ranks: tuple[int, ...]
    tag: str = ""
    sharers: RankSet | None = None
    refers: tuple[int, ...] = ()
    streamed: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistWindow:
    """Upload one window of a file that is larger than a slot; the rank waits for the slot."""

    holding: Holding


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed:
    """The rank has a slot that a waiting reservation may now take."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DropStep:
    """The step will not be committed from here: a newer one took its place."""

    step: int
    run: str
    holdings: tuple[Holding, ...] = ()  # that were given up with it


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedTwice:
    """The rank staged a file that it holds already, or that is stored: what came first stands, and this slot is free.

    Other bytes under the name of a file that a part names would be taken for damage.
    """

    holding: Holding


Effect: TypeAlias = Persist | PersistWindow | Freed | DropStep | StagedTwice


def ends_file(record: SlotRecord) -> bool:
    """Whether these bytes are a file's last: its rank has no more to say of it."""
    return record.window_begin + record.window_bytes >= record.file_bytes
