"""The words that everything else is written in: job, run, rank, step, tier. Owns no behaviour beyond checking them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum

from stepfast.errors import SpecError

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
MAX_TAG_BYTES = 256  # as JSON: it stands in a slot's control page
_RANK_OF = re.compile(r"-[0-9]{5,}-of-[0-9]{5,}(-|$)")  # what follows the name in a file's path

MAX_STEP = 2**62
MAX_WORLD_SIZE = 1_000_000


class Tier(StrEnum):
    """Where a step is held. `MEMORY`: in the node's memory tier. `PERSISTENT`: committed in the storage."""

    MEMORY = "Memory"
    PERSISTENT = "Persistent"


class OnBusy(StrEnum):
    """What a save does when every slot still holds a step that must be persisted first."""

    WAIT = "Wait"
    SKIP = "Skip"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class JobKey:
    """A job's name within its namespace; both are DNS-style names, so they are safe in paths."""

    namespace: str
    name: str

    def __post_init__(self) -> None:
        for field, value in (("namespace", self.namespace), ("name", self.name)):
            if not _NAME.fullmatch(value) or ".." in value:
                raise SpecError(f"metadata.{field}", f"{value!r} is not a lower-case DNS name")

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @staticmethod
    def parse(text: str) -> JobKey:
        """Reads `namespace/name`. Raises SpecError."""
        namespace, slash, name = text.partition("/")
        if not slash:
            raise SpecError("job", f"{text!r} is not namespace/name")
        return JobKey(namespace=namespace, name=name)


def run_id(uid: str, attempt: int) -> str:
    """`<job uid>-<attempt>`: unique for ever."""
    return f"{uid}-{attempt}"


def attempt_of(run: str) -> int:
    """The attempt that a run belongs to (an in-place restart within it is written `.N` behind the attempt)."""
    tail = run.rpartition("-")[2].partition(".")[0]
    return int(tail) if tail.isdigit() else 0


def restarted_run(run: str, restarts: int) -> str:
    """The run's name after so many in-place restarts: ranks of two launches are never mixed, not within one attempt
    either.
    """
    return f"{run}.{restarts}" if restarts else run


def split_run(run: str) -> tuple[str, int]:
    """The run as it was launched, and how many in-place restarts have followed: the inverse of `restarted_run`."""
    head, dot, tail = run.rpartition(".")
    return (head, int(tail)) if dot and tail.isdigit() and attempt_of(head) else (run, 0)


def is_run(text: str) -> bool:
    """Whether the text may stand as a run in paths."""
    return _RUN.fullmatch(text) is not None and ".." not in text


def is_tag(text: str) -> bool:
    """Whether the text may be a step's tag, what its user calls it: any printable text, not too long."""
    return text.isprintable() and text.strip() == text and 0 < len(json.dumps(text)) - 2 <= MAX_TAG_BYTES


def is_file_name(text: str) -> bool:
    """Whether the text may be the name of a rank's file in a step, as `state` or `model`."""
    return _FILE_NAME.fullmatch(text) is not None and ".." not in text and not _RANK_OF.search(text)
