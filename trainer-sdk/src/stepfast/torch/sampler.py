"""Which samples a rank trains on, so that a training goes on exactly, on whatever number of ranks.

A batch is the whole gang's, and each rank takes its share of it. What is saved is how many batches were trained on;
what a DataLoader has drawn beyond that, for its workers, is drawn again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch.utils.data import Sampler

from stepfast.torch.order import SampleOrder, shares

log = logging.getLogger("stepfast")


class GlobalBatchSampler(Sampler[list[int]]):
    """A batch sampler for torch's DataLoader; its batches are the same on any number of ranks, and so is their order.

        loader = DataLoader(data, batch_sampler=sampler, num_workers=4)
        for epoch in range(sampler.epoch, epochs):  # behind checkpointer.restore()
            for inputs, targets in loader:
                loss = mean_loss(model(inputs), targets) * sampler.weight
                ...
                optimizer.step()
                sampler.advance()
                checkpointer.step(...)

    Each iteration goes on behind the batches that were trained on, to the end of that epoch, and yields this rank's
    samples of each batch: their numbers, next to each other in the batch, in shares that differ by one at most. The
    order of an epoch is drawn from seed and epoch alone. A Checkpointer takes it for replicated.

    length: samples of the data set. batch_size: samples of a batch, over all ranks. drop_last: leaves out an epoch's
    samples that make no whole batch, otherwise its last batch has fewer. rank, world_size: which of how many ranks'
    shares; None: torch.distributed's, or torchrun's, or all of each batch.

    Raises ValueError where there is no batch in an epoch, or one that has fewer samples than there are ranks.
    """

    def __init__(
        self, length: int, batch_size: int, *, seed: int = 0, shuffle: bool = True, drop_last: bool = False,
        rank: int | None = None, world_size: int | None = None,
    ) -> None:  # fmt: skip
        self._order = SampleOrder(
            samples=length, batch_size=batch_size, seed=seed, shuffle=shuffle, drop_last=drop_last
        )
        self._rank, self._world_size = _place(rank, world_size)
        smallest = min(self._size(0), self._size(len(self) - 1))
        if smallest < self._world_size:
            what = "a batch" if smallest == batch_size else "the last batch of an epoch"
            raise ValueError(
                f"{what} has {smallest} of {length} samples, which {self._world_size} ranks cannot share: take another "
                "batch_size, or drop_last=True, or fewer ranks"
            )
        self._position = 0
        self._iteration = 0  # the newest one's number; older ones are over
        self._began = self._drawn = 0  # from which batch to which one that has drawn

    @property
    def position(self) -> int:
        """How many batches were trained on, since the first epoch's first."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the batch that is to be trained on next."""
        return self._position // len(self)

    @property
    def weight(self) -> float:
        """The factor for the mean loss over this rank's share of the batch that is trained on next: with it the average
        of the gradients over the ranks, as DDP and FSDP make it, is the gradient of the mean loss over the batch. 1.0
        where the shares are equal.
        """
        size = self._size(self._position % len(self))
        return len(shares(size, self._world_size)[self._rank]) * self._world_size / size

    @property
    def is_replicated(self) -> bool:
        """True: the position is equal on all ranks."""
        return True

    def advance(self) -> None:
        """The next batch was trained on; to be called before the step is saved, with accumulated gradients for each of
        the batches. Raises RuntimeError for a batch that no iteration has yielded.
        """
        if self._position >= self._drawn:
            raise RuntimeError(f"batch {self._position} was not drawn yet: call advance() once for each batch")
        self._position += 1

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self._order.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        """To the end of the epoch. Raises RuntimeError when it was overtaken by another iteration, or by a restore."""
        if self._drawn > self._position == self._began:
            log.warning("stepfast: the same batches are drawn again: call advance() behind each that is trained on")
        self._iteration += 1
        iteration = self._iteration
        self._began = self._drawn = self._position
        epoch, first = divmod(self._position, len(self))
        order = self._order.epoch(epoch)
        for number in range(first, len(self)):
            if iteration != self._iteration:
                raise RuntimeError("the sampler was restored or iterated over anew: begin with iter(loader) after that")
            self._drawn += 1
            batch: list[int] = self._order.batch(order, number).tolist()
            share = shares(len(batch), self._world_size)[self._rank]
            yield batch[share.start : share.stop]

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order of the samples follows from: plain values."""
        return {"position": self._position, **self._order_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there. Raises ValueError when the state is of other samples, or of another order of them."""
        for name, value in self._order_state().items():
            if state.get(name) != value:
                raise ValueError(f"its batches were of {name}={state.get(name)}, and now are of {name}={value}")
        self._position = self._began = self._drawn = state["position"]
        self._iteration += 1

    def _order_state(self) -> dict[str, int | bool]:
        order = self._order
        return {
            "length": order.samples, "batch_size": order.batch_size, "seed": order.seed, "shuffle": order.shuffle,
            "drop_last": order.drop_last,
        }  # fmt: skip

    def _size(self, number: int) -> int:
        """Samples of an epoch's batch, over all ranks."""
        order = self._order
        return min(order.batch_size, order.samples - number * order.batch_size)


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ValueError("give both rank and world_size, or neither")
    if rank is None or world_size is None:
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}: give one from 0 to {world_size - 1}")
    return rank, world_size


__all__ = ["GlobalBatchSampler"]
