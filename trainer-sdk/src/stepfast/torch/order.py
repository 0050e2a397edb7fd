"""In which order samples are seen, and which replica sees which of them. Pure.

The order of an epoch is a permutation drawn from the seed and the epoch alone, and the batches are cut out of it before
anything is known of replicas: however many there are, each step trains on the same samples, so none is lost or seen
twice in an epoch whatever the gang's shape does meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """Batches of `batch_size` of `samples`; the last of an epoch has what is left, or is left out (`drop_last`).

    Raises:
        ValueError: there is not one batch in an epoch.
    """

    samples: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.steps_per_epoch < 1:
            raise ValueError(f"{self.samples} samples make no batch of {self.batch_size}")

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.samples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def epoch(self, epoch: int) -> torch.Tensor:
        """The epoch's samples in their order: int64, `[samples]`."""
        if not self.shuffle:
            return torch.arange(self.samples)
        generator = torch.Generator().manual_seed(mixed(self.seed, epoch))
        return torch.randperm(self.samples, generator=generator)

    def batch(self, epoch_order: torch.Tensor, step: int) -> torch.Tensor:
        """The samples of an epoch's step, from 0: int64."""
        return epoch_order[step * self.batch_size : (step + 1) * self.batch_size]


def shares(samples: int, replicas: int) -> list[range]:
    """A batch's positions for each replica, as equal as they can be; empty for some where there are fewer samples."""
    each, more = divmod(samples, replicas)
    ends = list(accumulate(each + (replica < more) for replica in range(replicas)))
    return list(map(range, [0, *ends], ends))


def mixed(seed: int, epoch: int) -> int:
    """One seed of two numbers: neighbours of one are no neighbours of the other (splitmix64's finaliser)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + epoch + 1) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) % 2**64
    return (mixed ^ (mixed >> 31)) % 2**63
