"""Which layouts a run is about, and what they are in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """By their names, from small to large."""

    large: Sequence[str]
    small: Sequence[str]


def title_of(layout: str) -> str:
    """What a layout is, in words."""
    kind, _, amount = layout.partition(":")
    if kind == "gpt":
        return f"{amount} GiB"
    return f"{int(amount):,} small tensors" if kind == "small" else layout
