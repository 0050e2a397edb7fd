"""Sizes, counts and lists as manifests write them, checked. Pure."""

from __future__ import annotations

import re
from decimal import Decimal

from stepfast.errors import SpecError
from stepfast.slotplan import LEAST_SHARE_BYTES
from stepfast_operator.document import JSON

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([KMGTPE]i|[kMGTPE]|m|)")
_FACTORS = {"": 1, "k": 10**3, **{unit: 10 ** (3 * power) for power, unit in enumerate("MGTPE", 2)}}
_FACTORS |= {f"{unit}i": 2 ** (10 * power) for power, unit in enumerate("KMGTPE", 1)}


def parse_quantity(value: JSON, path: str) -> int:
    """A Kubernetes quantity (`64Gi`, `500M`, `200000000`) in bytes. Raises SpecError."""
    match = _QUANTITY.fullmatch(str(value).strip()) if not isinstance(value, bool) else None
    if match is None or match.group(2) == "m":
        raise SpecError(path, f"{value!r} is no size: write bytes, or as in 64Gi or 500M")
    return int(float(match.group(1)) * _FACTORS[match.group(2)])


def parse_amount(value: JSON, path: str) -> str:
    """A quantity of any resource (`8`, `500m`, `64Gi`), as it is written. Raises SpecError."""
    text = str(value).strip()
    if isinstance(value, bool) or _QUANTITY.fullmatch(text) is None:
        raise SpecError(path, f"{value!r} is no quantity: write a number, or as in 500m or 64Gi")
    return text


def parse_decimal(amount: JSON) -> Decimal:
    """A quantity that was checked before, in whole units: `500m` is a half."""
    match = _QUANTITY.fullmatch(str(amount).strip())
    assert match is not None, f"{amount!r} was checked before"
    number, unit = match.groups()
    return Decimal(number) / 1000 if unit == "m" else Decimal(number) * _FACTORS[unit]


def amount_text(amount: Decimal) -> str:
    """As the API writes a quantity: whole, or in thousandths, rounded up."""
    if amount == amount.to_integral_value():
        return str(int(amount))
    return f"{-int(-amount * 1000 // 1)}m"


def check_memory(size_bytes: int, ranks: int, path: str) -> None:
    """Raises SpecError when so much memory is too little for that many ranks: each needs room for one chunk."""
    least = ranks * LEAST_SHARE_BYTES
    if size_bytes < least:
        share = "a rank needs" if ranks == 1 else f"{ranks} ranks need"
        raise SpecError(path, f"{size_bytes} bytes are too little: {share} at least {least} ({-(-least // 2**20)}Mi)")


def parse_processes(value: JSON, path: str) -> int | None:
    """`auto` (None: one process per GPU, one without) or how many. Raises SpecError."""
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(path, f"{value!r} is neither auto nor a whole number of at least 1")
    return value


def parse_strings(value: JSON, path: str) -> tuple[str, ...]:
    """A list of strings; numbers are taken as they are written. Raises SpecError."""
    if not isinstance(value, list | tuple) or not all(isinstance(item, str | int | float) for item in value):
        raise SpecError(path, f"expected a list of strings, not {value!r}")
    return tuple(str(item) for item in value)
