"""Killed at any effect, in the middle of a change of shape too, a gang goes on to where it would have come."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gangs import be_rank, run_gang, run_gang_that_may_die
from stepfast.torch import Checkpointer, every
from trainings import go_on, make_random, tensors_of

WORLD_SIZE = 4
# What a rank does to others, to its weights and to the storage: it may end at any of these.
EFFECTS = [
    (dist, ("new_group", "all_reduce", "broadcast", "batch_isend_irecv", "all_gather_object", "destroy_process_group")),
    (torch.optim.AdamW, ("step",)),
    (Checkpointer, ("step", "restore")),
    (os, ("fsync", "rename", "link", "pwrite")),
]


class Effects:
    """Counts them, and kills this process ahead of the one of that number."""

    def __init__(self, last: int | None) -> None:
        self.count, self._last = 0, last
        for owner, names in EFFECTS:
            for name in names:
                setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.count == self._last:
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1
            return function(*args, **kwargs)

        return counted


def train(folder: Path, attempt: int, victim: int, last: int | None) -> tuple[int, dict[str, torch.Tensor], int]:
    """From the latest committed step to the end; how many effects that took, what came of it, where it began."""
    rank = dist.get_rank()
    effects = Effects(last if rank == victim else None)
    be_rank(folder, "kills", attempt)
    torch.manual_seed(rank)
    pipeline, scheduler, network, optimizer = make_random()
    checkpointer = Checkpointer(pipeline=pipeline, scheduler=scheduler, interval=every(steps=1))
    start = checkpointer.restore()
    for step in go_on(pipeline, scheduler):
        checkpointer.step(step)
    checkpointer.close()
    return effects.count, tensors_of(network, optimizer), start


@pytest.mark.parametrize("kills", [4, 50])
def test_killed_at_random_effects_it_ends_bit_for_bit_where_it_would_have(kills: int, tmp_path: Path) -> None:
    expected = run_gang(WORLD_SIZE, train, tmp_path / "undisturbed", 1, -1, None)
    moments = random.Random(kills)
    begun = set()
    killed = attempt = 0
    while killed < kills:
        folder = tmp_path / f"disturbed-{killed}"
        while True:
            attempt += 1
            victim = moments.randrange(WORLD_SIZE)
            last = moments.randrange(expected[victim][0]) if killed < kills else None
            outcome = run_gang_that_may_die(WORLD_SIZE, train, folder, attempt, victim, last)
            if outcome is not None:
                break
            killed += 1
        for (_, found, start), (_, wanted, _) in zip(outcome, expected, strict=True):
            assert found.keys() == wanted.keys()
            assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
            begun.add(start)
    assert max(begun) > 0, "it never went on from anywhere"
