"""Generators of random numbers, left as they were."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
