"""Into how many micro-batches a batch is divided: which numbers a schedule takes, and which is the fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial

from stepfast.torch.elastic_pipeline.groups import Messages
from stepfast.torch.elastic_pipeline.shape import Shape
from stepfast.torch.elastic_pipeline.timing import best_seconds

_MOST_PER_DEVICE = 6  # PipeTransformer, section 4.1
_CLEARLY_SLOWER = 1.25
_SLOWER_AT_MOST = 2  # one alone may be a hiccup


class Schedule(StrEnum):
    """In which order a pipeline works off its micro-batches."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"


class MicroBatches:
    """The choice for each length of the pipeline: as given, or found once by trying.

    batch_size: samples of a step, over all replicas. per_device: the choice, for each device; None: it is tried.
    """

    def __init__(self, batch_size: int, schedule: Schedule, per_device: int | None) -> None:
        if per_device is not None and per_device < 1:
            raise ValueError(f"micro_batches is at least 1, not {per_device}")
        self._batch_size, self._schedule, self._per_device = batch_size, schedule, per_device
        self.found: Mapping[int, int] = {}
        """By length."""

    def known(self, shape: Shape) -> int | None:
        """None: it is not tried yet."""
        return self._per_device * shape.length if self._per_device is not None else self.found.get(shape.length)

    def choose(
        self, shape: Shape, samples: int, attempt: Callable[[int], None], messages: Messages, *, trains: bool
    ) -> int:
        """For a batch of so many samples of this replica; every rank calls it alike.

        attempt: the passes of a step with as many micro-batches, which leave no trace. trains: not a rank that rests.
        """
        wanted = self.known(shape)
        if wanted is None:
            share = max(1, self._batch_size // shape.replicas)
            candidates = micro_batch_counts(
                share, shape.length, _MOST_PER_DEVICE * shape.length, devices=shape.length, schedule=self._schedule
            )
            if len(candidates) > 1 and messages.sum([float(trains and samples < share)])[0]:
                wanted = candidates[0]  # the last batch of an epoch says little of the others
            else:
                wanted = fastest(candidates, lambda count: attempt(self._nearest(shape, samples, count)), messages)
                self.found = {**self.found, shape.length: wanted}
        return self._nearest(shape, samples, wanted)

    def _nearest(self, shape: Shape, samples: int, wanted: int) -> int:
        if not samples:
            return 0
        return micro_batch_counts(samples, wanted, wanted, devices=shape.length, schedule=self._schedule)[0]


def fastest(candidates: Sequence[int], attempt: Callable[[int], None], messages: Messages) -> int:
    """The candidate whose slowest rank is the fastest; every rank calls it alike, and gets the same.

    candidates: rising.
    """
    if len(candidates) == 1:
        return candidates[0]
    best, least = candidates[0], float("inf")
    slower = 0  # one after the other
    for candidate in candidates:
        attempt(candidate)  # a first time, which connects ranks and allocates
        seconds = messages.largest([best_seconds(partial(attempt, candidate))])[0]
        slower = slower + 1 if seconds > _CLEARLY_SLOWER * least else 0
        if slower == _SLOWER_AT_MOST:
            break  # the pipeline has filled: more of them only cost more
        if seconds < least:
            best, least = candidate, seconds
    return best


def micro_batch_counts(samples: int, least: int, most: int, *, devices: int, schedule: Schedule) -> list[int]:
    """Into how many equal micro-batches a schedule can take a batch: all between these two, else the most below."""
    found = [n for n in range(1, min(most, samples) + 1) if samples % n == 0]
    if schedule is Schedule.INTERLEAVED:  # in rounds of at least as many as there are devices, all alike
        found = [n for n in found if n % max(1, n // devices) == 0]
    return [n for n in found if n >= least] or found[-1:]
