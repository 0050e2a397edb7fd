"""Which ranks have files in a step. Pure.

Most steps are every rank's. Of a step with a tag it may be rank 0 alone that saves, or the ranks of one group; and
while such a step is open nobody knows it yet. A set of ranks is told as text, and is never written out rank by rank: a
gang may have a million.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

EVERY_RANK = ""
UNKNOWN = "?"
MAX_SPANS = 1024

_SPAN = re.compile(r"([0-9]{1,7})(?:-([0-9]{1,7})(?::([0-9]{1,7}))?)?")


@dataclass(frozen=True, slots=True)
class RankSet:
    """Some ranks of a gang, at least one, as ranges in ascending order. As text: `0,4-7,16-64:16`."""

    spans: tuple[range, ...]

    @staticmethod
    def of(ranks: Iterable[int]) -> RankSet:
        """These ranks. Raises ValueError for none at all."""
        left = sorted(set(ranks))
        if not left:
            raise ValueError("no ranks")
        spans = []
        while left:
            stride = left[1] - left[0] if len(left) > 1 else 1
            span = range(left[0], left[-1] + 1, stride)
            length = next(
                (i for i, (one, other) in enumerate(zip(left, span, strict=False)) if one != other), len(span)
            )
            length = min(length, len(left))
            if length == 2 and stride > 1:
                length = 1  # the second may begin a longer span
            spans.append(range(left[0], left[length - 1] + 1, stride))
            left = left[length:]
        return RankSet(tuple(spans))

    @staticmethod
    def parse(text: str, world_size: int) -> RankSet:
        """The set that was written so. Raises ValueError for what is none of a gang of that size."""
        parts = text.split(",")
        if len(parts) > MAX_SPANS:
            raise ValueError(f"{len(parts)} spans of ranks")
        spans, reached = [], -1
        for part in parts:
            match = _SPAN.fullmatch(part)
            if match is None:
                raise ValueError(f"{text!r:.80} names no ranks")
            first, last, stride = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
            if not reached < first <= last < world_size or stride < 1:
                raise ValueError(f"{part} is not within {world_size} ranks, or not behind {reached}")
            spans.append(range(first, last + 1, stride))
            reached = last
        return RankSet(tuple(spans))

    def __contains__(self, rank: int) -> bool:
        return any(rank in span for span in self.spans)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.spans)

    def __str__(self) -> str:
        return ",".join(map(_text_of, self.spans))

    @property
    def first(self) -> int:
        """The lowest of them."""
        return self.spans[0][0]


def _text_of(span: range) -> str:
    if len(span) == 1:
        return f"{span[0]}"
    return f"{span[0]}-{span[-1]}" + (f":{span.step}" if span.step > 1 else "")
