"""What values a key takes. Two measures: what a value says (`read`), and whether the release takes it as it stands.

The release's own models (pydantic) convert: 5e8 and "500" are whole numbers to them, "yes" is a flag. Keys that no
model reads reach DeepSpeed's code as they are, so there only the exact type will do.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from stepfast.integrations.deepspeedconfig.draft import ABSENT, Json, Value

_TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
_FALSE = frozenset({"0", "off", "f", "false", "n", "no"})
_WHOLE = re.compile(r"\s*[+-]?\d+(_\d+)*(\.0*)?\s*", re.ASCII)
# Of a float that pydantic takes for a whole number.
_LARGEST = 2.0**63
# Characters of a number in quotes: longer ones mean nothing here, and take time to read.
_LONGEST = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The values of one key. This one takes anything."""

    is_nullable: bool = False

    @property
    def wanted(self) -> str:
        """As in "wants …"."""
        return "anything"

    def read(self, value: Json) -> Value:
        """What the value says, in the exact type; ABSENT when it says nothing that this key can hold."""
        return value

    def is_taken(self, value: Json, *, converts: bool) -> bool:
        """Whether the release takes it as it stands. Asked only of what can be read."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag(Kind):
    @property
    def wanted(self) -> str:
        return "true or false"

    def read(self, value: Json) -> Value:
        if isinstance(value, str):
            word = value.lower()
            return True if word in _TRUE else False if word in _FALSE else ABSENT
        return bool(value) if isinstance(value, int | float) and value in {0, 1} else ABSENT

    def is_taken(self, value: Json, *, converts: bool) -> bool:
        return converts or isinstance(value, int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole(Kind):
    least: int | None = None
    most: int | None = None
    is_quotable: bool = True  # a model takes it in quotes, too

    @property
    def wanted(self) -> str:
        if self.most is not None:
            return f"a whole number from {self.least} to {self.most}"
        return "a whole number" if self.least is None else f"a whole number of at least {self.least}"

    def read(self, value: Json) -> Value:
        number = _number(value)
        if number is None or (isinstance(number, float) and not number.is_integer()):
            return ABSENT
        whole = int(number)
        is_within = (self.least is None or whole >= self.least) and (self.most is None or whole <= self.most)
        return whole if is_within else ABSENT

    def is_taken(self, value: Json, *, converts: bool) -> bool:
        if isinstance(value, str):
            return converts and self.is_quotable and _WHOLE.fullmatch(value) is not None
        return isinstance(value, int) or (converts and isinstance(value, float) and abs(value) < _LARGEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Real(Kind):
    least: float = -math.inf
    most: float = math.inf
    is_open: bool = False  # the bounds themselves are out

    @property
    def wanted(self) -> str:
        if math.isinf(self.least):
            return "a number"
        if math.isinf(self.most):
            return f"a number of at least {self.least:g}"
        if self.is_open:
            return f"a number above {self.least:g} and below {self.most:g}"
        return f"a number from {self.least:g} to {self.most:g}"

    def read(self, value: Json) -> Value:
        number = _number(value)
        if number is None or not self.least <= number <= self.most:
            return ABSENT
        return ABSENT if self.is_open and number in {self.least, self.most} else number

    def is_taken(self, value: Json, *, converts: bool) -> bool:
        return converts or not isinstance(value, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate(Kind):
    """A number, or a list of them: one for each group of parameters."""

    @property
    def wanted(self) -> str:
        return "a number, or a list of numbers"

    def read(self, value: Json) -> Value:
        if not isinstance(value, list):
            number = _number(value)
            return ABSENT if number is None else number
        numbers: list[Json] = []
        for item in value:
            number = _number(item)
            if number is None:
                return ABSENT
            numbers.append(number)
        return numbers

    def is_taken(self, value: Json, *, converts: bool) -> bool:
        return not any(isinstance(item, str) for item in (value if isinstance(value, list) else [value]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Word(Kind):
    """Text: any, or one of `options`, in any case where the release minds none; `aliases` are other words for them."""

    options: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    is_any_case: bool = False

    @property
    def wanted(self) -> str:
        return f"one of {', '.join(self.options)}" if self.options else "text"

    def read(self, value: Json) -> Value:
        if not self.options:
            return value if isinstance(value, str) else str(value) if _is_number(value) else ABSENT
        if not isinstance(value, str) or value in self.options:
            return value if isinstance(value, str) else ABSENT
        by_lower = {option.lower(): option for option in self.options} | dict(self.aliases)
        return by_lower.get(value.lower(), ABSENT)

    def is_taken(self, value: Json, *, converts: bool) -> bool:
        if not isinstance(value, str):
            return False
        options = {option.lower() for option in self.options} if self.is_any_case else self.options
        return not options or (value.lower() if self.is_any_case else value) in options


@dataclass(frozen=True, slots=True, kw_only=True)
class Words(Kind):
    """A list of texts, of `options` where there are any; one text alone stands for a list of it."""

    options: tuple[str, ...] = ()
    is_lone: bool = False  # the release itself takes one text alone

    @property
    def wanted(self) -> str:
        return f"a list of {', '.join(self.options)}" if self.options else "a list of texts"

    def read(self, value: Json) -> Value:
        items: Json = [value] if isinstance(value, str) else value
        if not isinstance(items, list):
            return ABSENT
        return items if all(isinstance(item, str) and item in (self.options or (item,)) for item in items) else ABSENT

    def is_taken(self, value: Json, *, converts: bool) -> bool:
        return self.is_lone or not isinstance(value, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Many(Kind):
    """A list of anything."""

    @property
    def wanted(self) -> str:
        return "a list"

    def read(self, value: Json) -> Value:
        return value if isinstance(value, list) else ABSENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped(Kind):
    """A block whose keys are the caller's own, or are not looked at here."""

    @property
    def wanted(self) -> str:
        return "a block"

    def read(self, value: Json) -> Value:
        return value if isinstance(value, dict) else ABSENT


def _number(value: Json) -> int | float | None:
    """The finite number that this says, also in quotes; None when it says none. A flag is no number."""
    if isinstance(value, str):
        if len(value) > _LONGEST:
            return None
        try:
            number = float(value)
            return int(value) if _WHOLE.fullmatch(value) and "." not in value else _number(number)
        except ValueError:
            return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if isinstance(value, int) or math.isfinite(value) else None


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
