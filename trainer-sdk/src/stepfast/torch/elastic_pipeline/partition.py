"""AutoPipe's arithmetic: which layers a stage holds, and how short a pipeline may become. Pure.

A layer costs its parameters' bytes, a stand-in for what training it takes of a device; a frozen one, which needs no
gradients, no moments and no activations for a backward pass, the share `FROZEN_COST` of them. Frozen layers are a
prefix of the model and run ahead of the pipeline on its first device, so all of them count for the first stage.
After PipeTransformer (ICML 2021), algorithm 1, which balances greedily; here the dearest stage is as cheap as can be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FROZEN_COST = 1 / 6


@dataclass(frozen=True, slots=True)
class Partition:
    """The active layers of each stage, in order, none without one; and what the dearest stage costs, in bytes."""

    stages: tuple[range, ...]
    largest_cost: float


def balance(sizes: Sequence[int], stages: int, *, frozen: int = 0, frozen_cost: float = FROZEN_COST) -> Partition:
    """Divides the active layers such that the dearest stage is as cheap as it can be.

    Args:
        sizes: bytes of each layer's parameters, frozen ones included.
        stages: how many there shall be.
        frozen: how many layers, from the first, are frozen.

    Raises:
        ValueError: there are fewer active layers than stages.
    """
    if not 1 <= stages <= len(sizes) - frozen:
        raise ValueError(f"{len(sizes) - frozen} active layers cannot fill {stages} stages")
    costs = list(map(float, sizes[frozen:]))
    costs[0] += frozen_cost * sum(sizes[:frozen])
    found = _fill(costs, stages, math.inf)
    assert found is not None  # without a limit everything fits
    impossible = 0.0  # no division stays under this
    while impossible < found.largest_cost:
        # Halving comes near; below the dearest stage found, the next best division is another one, of a finite number.
        limit = max((impossible + found.largest_cost) / 2, math.nextafter(impossible, math.inf))
        better = _fill(costs, stages, min(limit, math.nextafter(found.largest_cost, 0.0)))
        if better is None:
            impossible = limit
        else:
            found = better
    return Partition(tuple(range(s.start + frozen, s.stop + frozen) for s in found.stages), found.largest_cost)


def shortest_length(
    sizes: Sequence[int], length: int, *, frozen: int, limit: float, frozen_cost: float = FROZEN_COST
) -> int:
    """How many stages a pipeline of `length` may be packed into, such that replicas fill the devices that it leaves.

    Halved (where the length is odd: divided by its smallest prime) as often as the dearest stage stays within `limit`,
    which is what the dearest cost when nothing was frozen; and where there are fewer active layers than stages.
    """
    active = len(sizes) - frozen
    while length > 1:
        shorter = length // next(factor for factor in range(2, length + 1) if length % factor == 0)
        if length <= active:
            packed = balance(sizes, shorter, frozen=frozen, frozen_cost=frozen_cost)
            if packed.largest_cost > limit:
                break
        length = shorter
    return length


def _fill(costs: Sequence[float], stages: int, limit: float) -> Partition | None:
    """Stages filled one after the other up to `limit`, or None where that takes more of them than there are."""
    ends: list[int] = []
    begin, cost, largest = 0, 0.0, 0.0
    for index, layer in enumerate(costs):
        if layer > limit:
            return None
        left = stages - len(ends) - 1
        if index > begin and (cost + layer > limit or len(costs) - index == left):
            if not left:
                return None
            ends.append(index)
            begin, cost = index, 0.0
        cost += layer
        largest = max(largest, cost)
    begins = [0, *ends]
    return Partition(tuple(map(range, begins, [*ends, len(costs)])), largest)
