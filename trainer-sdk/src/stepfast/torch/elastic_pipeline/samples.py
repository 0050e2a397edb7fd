"""A rank's share of each batch, loaded ahead of its step.

What a sample looks like may be random (augmentation): then the generators are set by seed, epoch and sample before it
is fetched, so that it looks the same in whichever process, on whichever rank and after however many restarts.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from stepfast.torch.elastic_pipeline.values import mapped, samples_in
from stepfast.torch.order import mixed, shares
from stepfast.torch.rng import get_rng_state, rng_state_kept

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Of a batch, what is one replica's: the samples' numbers; inputs and targets where they were asked for."""

    numbers: Sequence[int]
    inputs: Any = None
    targets: Any = None


class Samples:
    """The samples of a data set, each an (input, target) pair, in batches.

    collate: from a list of samples to a batch (input, target); None: torch's. workers: processes that load ahead.
    """

    def __init__(
        self, data: Dataset[Any], *, seed: int, collate: Collate | None = None, workers: int = 0, pin: bool = False
    ) -> None:
        self.data = data
        self.size = len(data)  # type: ignore[arg-type] # torch's Dataset has no length of its own
        self._collate, self._workers, self._pin = collate, workers, pin
        self._seed = seed
        self._is_random: bool | None = None

    def like(self, data: Dataset[Any]) -> Samples:
        """Of another data set, loaded in the same way."""
        return Samples(data, seed=self._seed, collate=self._collate, workers=self._workers, pin=self._pin)

    @property
    def is_random(self) -> bool:
        """Whether fetching a sample draws random numbers, as its first one shows."""
        if self._is_random is None:
            with rng_state_kept():
                self.data[0]  # what it imports or sets up when it is first asked is no part of the question
                before = fingerprint()
                self.data[0]
                self._is_random = before != fingerprint()
        return self._is_random

    def inputs(self, numbers: Sequence[int]) -> Any:
        """Of these samples, as one batch; only where they are not random."""
        collate = self._collate if self._collate is not None else default_collate
        return collate([self.data[number] for number in numbers])[0]

    def shares(
        self, epoch: int, batches: Sequence[Sequence[int]], *, replica: int | None, replicas: int, inputs: bool,
        targets: bool,
    ) -> Iterator[Share]:  # fmt: skip
        """A replica's share of each batch of sample numbers, in that epoch; None: nothing is that rank's."""
        own = []
        for batch in batches:
            positions = shares(len(batch), replicas)[replica] if replica is not None else range(0)
            own.append([batch[position] for position in positions])
        loaded = self._loaded(epoch, [numbers for numbers in own if numbers]) if inputs or targets else None
        for numbers in own:
            if loaded is None or not numbers:
                yield Share(numbers=numbers)
                continue
            batch_inputs, batch_targets = next(loaded)
            if samples_in(batch_inputs) != len(numbers):
                raise ValueError(f"{len(numbers)} samples were collated to {samples_in(batch_inputs)}")
            yield Share(
                numbers=numbers,
                inputs=batch_inputs if inputs else None,
                targets=batch_targets if targets else None,
            )

    def _loaded(self, epoch: int, batches: Sequence[Sequence[int]]) -> Iterator[tuple[Any, Any]]:
        """The inputs and targets of each batch of sample numbers, in that epoch."""
        keys = [[(epoch, index) for index in batch] for batch in batches]
        loader: DataLoader[Any] = DataLoader(
            _Keyed(self.data, self._seed if self.is_random else None),
            batch_sampler=keys,
            collate_fn=self._collate,
            num_workers=self._workers,
            pin_memory=self._pin,
            generator=torch.Generator().manual_seed(mixed(self._seed, epoch)),  # else it draws from the process' own
        )
        for batch in loader:
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise TypeError(f"a batch must be a pair (input, target), not a {type(batch).__name__}")
            yield batch[0], batch[1]


class _Keyed(Dataset[Any]):
    """Samples by (epoch, number). seed: None: they are not random."""

    def __init__(self, data: Dataset[Any], seed: int | None) -> None:
        self._data, self._seed = data, seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        if self._seed is None:
            return self._data[index]
        with rng_state_kept():
            _seed(mixed(mixed(self._seed, epoch), index))
            return self._data[index]


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy.random" in sys.modules:
        import numpy as np

        np.random.seed(seed % 2**32)


def fingerprint() -> str:
    """Of the states of the process' random generators."""
    return repr(mapped(get_rng_state(), lambda tensor: tensor.tolist()))
