"""The largest batch that fits a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stepfast.errors import AnatomyError
from stepfast.torch.anatomy.report import Report

_LINES = 16  # predictions until the line is given up
_MOST = 1 << 20  # samples: nobody trains with more on one device


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """`batch_size` fits and one more does not; 0: not even one sample does. `reports`: all that were made, by size."""

    batch_size: int
    reports: dict[int, Report]

    @property
    def report(self) -> Report:
        """Of the largest batch that fits, else of the smallest that there is."""
        return self.reports[self.batch_size or 1]


def largest_batch(
    report_of: Callable[[int], Report], on_try: Callable[[int, bool], object] = lambda batch_size, fits: None
) -> LargestBatch:
    """Searches with few predictions: memory is close to a straight line in the batch size, so the line is asked first.

    `report_of(batch_size)` predicts for a device with a known limit. `on_try` hears of each size, and whether it fits.
    Raises AnatomyError where there is no limit.
    """
    reports: dict[int, Report] = {}

    def fits(batch_size: int) -> bool:
        reports[batch_size] = report_of(batch_size)
        answer = reports[batch_size].memory.fits
        if answer is None:
            raise AnatomyError(f"{reports[batch_size].device} has no known memory: say how much it has")
        on_try(batch_size, answer)
        return answer

    if not fits(1):
        return LargestBatch(batch_size=0, reports=reports)
    low, high, guess, reach = 1, _MOST + 1, 2, 1
    while high - low > 1:
        if fits(guess):
            low = guess
        else:
            high = guess
        guess = _on_the_line(reports)
        if len(reports) > _LINES:
            guess = (low + high) // 2  # memory is no line here, but what is between them gets less
        elif not low < guess < high:
            # The line ends where an answer is known: one more is asked beside it, then two, then four.
            guess = low + reach if guess <= low else high - reach
            reach *= 2
        guess = min(max(guess, low + 1), high - 1)
    return LargestBatch(batch_size=low, reports=reports)


def _on_the_line(reports: dict[int, Report]) -> int:
    """Where the line through the two batches whose memory is nearest to the limit reaches it."""

    def beyond(batch_size: int) -> int:
        memory = reports[batch_size].memory
        assert memory.limit_bytes is not None
        return memory.occupied_bytes - memory.limit_bytes

    first, second = sorted(sorted(reports, key=lambda batch_size: abs(beyond(batch_size)))[:2])
    slope = (beyond(second) - beyond(first)) / (second - first)
    return int(second - beyond(second) / slope) if slope > 0 else second * 2
