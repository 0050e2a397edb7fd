"""A configuration while it is rewritten, and the log of what was done to it. Knows nothing of DeepSpeed.

Nothing is changed but through `Draft`, and each of its changes names its reason: so nothing can be dropped silently.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

from stepfast.errors import SpecError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Block: TypeAlias = dict[str, Json]
Path: TypeAlias = tuple[str, ...]

# Deeper than any release reads; a limit of our own, so that no input meets the interpreter's.
_DEPTH = 50
# JSON's escapes can write it, and nothing can read it: it has no bytes in any encoding.
_NO_TEXT = "no value of text: it has half of a pair of surrogates"


class Absent(Enum):
    """Where no value stands; None is a value of JSON."""

    ABSENT = "absent"


ABSENT = Absent.ABSENT
Value: TypeAlias = Json | Literal[Absent.ABSENT]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """One change: `was` stood at `path`; `now` stands at `to`, which is another path for what was moved.

    Paths are dotted. `was` is ABSENT for what was added; `now` is for what was removed, and `to` is then `path`.
    """

    path: str
    was: Value
    to: str
    now: Value
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What only a person can decide: the value at `path` cannot stay, and taking it out would change the training."""

    path: str
    value: Value
    why: str


class Undecided(SpecError):
    """The configuration needs decisions, one for each of `problems`; nothing was rewritten."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        self.problems = problems
        super().__init__(problems[0].path, "; ".join([problems[0].why, *(f"{p.path}: {p.why}" for p in problems[1:])]))


@dataclass(slots=True)
class Draft:
    """The configuration under work."""

    root: Block
    rewrites: list[Rewrite] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def get(self, path: Path) -> Value:
        """ABSENT also where something on the way is no block."""
        value: Value = self.root
        for name in path:
            if not isinstance(value, dict) or name not in value:
                return ABSENT
            value = value[name]
        return value

    def block(self, path: Path) -> Block | None:
        """The block at this path; None where there is none."""
        value = self.get(path)
        return value if isinstance(value, dict) else None

    def has(self, path: Path) -> bool:
        return self.get(path) is not ABSENT

    def put(self, path: Path, value: Json, why: str) -> None:
        """Sets a value, and says so. Blocks on the way are made; `path` must not lead through another value."""
        was = self.get(path)
        self._set(path, value)
        self._log(path, was, path, value, why)

    def drop(self, path: Path, why: str) -> None:
        self._log(path, self._take(path), path, ABSENT, why)

    def move(self, path: Path, to: Path, why: str, *, now: Value = ABSENT) -> None:
        """Moves a value, as `now` where it has to look otherwise. What stands at `to` already is what counts."""
        value = self.get(path) if now is ABSENT else now
        assert value is not ABSENT, path
        if self.get(to) is None:
            self.drop(to, f"null says nothing beside {dotted(path)}")
        there = self.get(to)
        if there is not ABSENT:
            says = "says the same" if there == value else f"counts, which is there too and says {there!r}"
            self.drop(path, f"{why}; {dotted(to)} {says}")
            return
        if not self._is_open(to):
            self.refuse(path, f"{why}, and belongs to {dotted(to[:-1])}, which is no block")
            return
        was = self._take(path)
        self._set(to, value)
        self._log(path, was, to, value, why)

    def tidy(self, path: Path, value: Json) -> None:
        """Writes an equal value differently, which is no rewrite: 5e8 and 500000000 are one number of JSON."""
        assert self.get(path) == value, path
        self._set(path, value)

    def refuse(self, path: Path, why: str) -> None:
        """Leaves a value to the caller. The first reason for it counts: later steps meet it again."""
        if dotted(path) in {problem.path for problem in self.problems}:
            return
        self.problems.append(Problem(path=dotted(path), value=self.get(path), why=why))

    def note(self, path: Path, what: str) -> None:
        """Says something of a value that stays as it is."""
        self.notes.append(f"{dotted(path)}: {what}")

    def _log(self, path: Path, was: Value, to: Path, now: Value, why: str) -> None:
        # Copies: later steps go on with the blocks themselves.
        was, now = deepcopy(was), deepcopy(now)
        self.rewrites.append(Rewrite(path=dotted(path), was=was, to=dotted(to), now=now, why=why))

    def _set(self, path: Path, value: Json) -> None:
        block = self.root
        for name in path[:-1]:
            inner = block.setdefault(name, {})
            assert isinstance(inner, dict), path
            block = inner
        block[path[-1]] = value

    def _take(self, path: Path) -> Json:
        block = self.block(path[:-1])
        assert block is not None, path
        return block.pop(path[-1])

    def _is_open(self, path: Path) -> bool:
        return all(isinstance(self.get(path[:end]), dict | Absent) for end in range(1, len(path)))


def dotted(path: Path) -> str:
    """As people write it; of the whole configuration: `the configuration`."""
    return ".".join(path) or "the configuration"


def plain(configuration: Mapping[str, object]) -> Draft:
    """A draft of a copy. What JSON has no word for is a problem of the draft."""
    draft = Draft(root={})
    draft.root = {key: _plain(value, (key,), draft) for key, value in configuration.items() if _is_name(key, (), draft)}
    return draft


def places(value: Value, path: Path = ()) -> Iterator[tuple[Path, Json]]:
    """Every value in the blocks of `value`, with its path."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (*path, name), inner
            yield from places(inner, (*path, name))


def _plain(value: object, path: Path, draft: Draft) -> Json:
    if len(path) > _DEPTH:
        draft.problems.append(Problem(path=dotted(path[:3]), value=ABSENT, why=f"is nested more than {_DEPTH} deep"))
        return None
    if isinstance(value, Mapping):
        return {key: _plain(inner, (*path, key), draft) for key, inner in value.items() if _is_name(key, path, draft)}
    if isinstance(value, list | tuple):
        return [_plain(inner, (*path, str(index)), draft) for index, inner in enumerate(value)]
    if isinstance(value, str) and not _is_text(value):
        draft.problems.append(Problem(path=dotted(path), value=ABSENT, why=f"{value!a} is {_NO_TEXT}"))
        return None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    draft.problems.append(Problem(path=dotted(path), value=ABSENT, why=f"{value!r} is no value of JSON"))
    return None


def _is_name(key: object, path: Path, draft: Draft) -> bool:
    if isinstance(key, str) and _is_text(key):
        return True
    why = f"{key!a} is no name of a key" + (f": {_NO_TEXT}" if isinstance(key, str) else "")
    draft.problems.append(Problem(path=dotted(path), value=ABSENT, why=why))
    return False


def _is_text(value: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in value)
