"""Generators of random numbers: left as they were, and the states that are taken of them."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from stepfast.torch.anatomy.replacing import replaced


@contextmanager
def untouched_generators() -> Iterator[None]:
    """What is seeded or drawn within, by torch on the CPU, by Python or by NumPy, changes nothing that comes after."""
    numpy = sys.modules.get("numpy")
    drawn = None if numpy is None else numpy.random.get_state()
    python, cpu = random.getstate(), torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(drawn)


@contextmanager
def states_seen(see: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Within, each state that is taken of the CPU's generator is shown: recomputed layers keep one of these each, and
    no mode sees them made.
    """
    original = torch.get_rng_state

    def get_rng_state() -> torch.Tensor:
        state = original()
        see(state)
        return state

    with replaced(torch, "get_rng_state", get_rng_state), replaced(torch.random, "get_rng_state", get_rng_state):
        yield
