"""Markdown, and how numbers read in it. Pure; knows nothing of what is measured."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10

NOT_MEASURED = "not measured"
NONE = "—"
GIB = 2**30
MIB = 2**20


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table; the first column is text, the others are aligned to the right."""
    lines = [_row(header), _row(["---", *["---:"] * (len(header) - 1)])]
    return [*lines, *map(_row, rows)]


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The same, with columns of words."""
    return [_row(header), _row(["---"] * len(header)), *map(_row, rows)]


def number(value: float, digits: int = 3) -> str:
    """With so many significant digits and no exponent: 0.0123, 1.23, 123, 12,345."""
    if value == 0:
        return "0"
    places = max(0, digits - 1 - floor(log10(abs(value))))
    return f"{value:,.{min(places, 6)}f}"


def seconds(value: float) -> str:
    """With its unit."""
    return f"{number(value * 1000)} ms" if abs(value) < 0.1 else f"{number(value)} s"


def ratio(value: float) -> str:
    return f"{value:.2f} ×"


def share(value: float) -> str:
    return f"{100 * value:.1f} %"


def size(value: float) -> str:
    """Bytes with their unit."""
    return f"{number(value / GIB)} GiB" if value >= GIB / 2 else f"{number(value / MIB)} MiB"


def bold(text: str) -> str:
    return f"**{text}**"


def bold_best(values: Sequence[float | None], texts: Sequence[str]) -> list[str]:
    """The texts, that of the least value in bold; values that read alike share it."""
    known = [(value, text) for value, text in zip(values, texts, strict=True) if value is not None]
    if not known:
        return list(texts)
    best = min(known)[1]
    return [
        bold(text) if value is not None and text == best else text for value, text in zip(values, texts, strict=True)
    ]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
