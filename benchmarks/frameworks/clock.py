"""The same model, data and stop-watch for every framework."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from torch import nn

WIDTH = 1024
ROWS = 4
WARMING = 2  # iterations that are slower than all others


@dataclass(frozen=True, slots=True)
class Task:
    """What a row of the table is asked for. `way`: `default`, `async` or `stepfast`."""

    way: str
    saves: int
    every: int  # iterations from one save to the next
    layers: int
    out: Path

    @staticmethod
    def read() -> Task:
        """From the process's environment."""
        values = json.loads(os.environ["BENCH_TASK"])
        return Task(values["way"], values["saves"], values["every"], values["layers"], Path(values["out"]))

    @property
    def iterations(self) -> int:
        """All of them."""
        return self.first_save + self.every * self.saves

    @property
    def first_save(self) -> int:
        """The iteration behind which the first save is: those before it tell how long one takes without any."""
        return 2 * self.every


@dataclass(slots=True)
class Clock:
    """Iterations, and which of them saved. What a save delays the next iteration by counts as well.

    An optimizer may wait for the save before it (DeepSpeed's does): so two iterations are looked at together. They are
    held against those before the first save, while nothing is written in the background, or against those between the
    saves, if these are quicker.
    """

    task: Task
    _began: list[float] = field(default_factory=list)
    _saved: list[int] = field(default_factory=list)

    def tick(self) -> None:
        """An iteration begins, and the one before it ends."""
        self._began.append(time.perf_counter())

    @property
    def is_due(self) -> bool:
        """Whether this iteration is to save; asked once, at its end."""
        iteration = len(self._began)
        is_due = iteration >= self.task.first_save and iteration % self.task.every == 0
        if is_due and len(self._saved) < self.task.saves:
            self._saved.append(iteration - 1)
            return True
        return False

    def tell(self) -> None:
        """Writes what each save cost, and how far iterations without one lie apart (the median absolute deviation of
        two), in seconds.
        """
        self.tick()
        lasted = [end - begin for begin, end in zip(self._began, self._began[1:], strict=False)]
        touched = {index for saved in self._saved for index in (saved, saved + 1)}
        before = lasted[WARMING : self.task.first_save - 1]
        between = [lasted[index] for index in range(self.task.first_save, len(lasted)) if index not in touched]
        plain = min(median(before), median(between))
        spread = 2 * median(abs(seconds - plain) for seconds in before)
        stalls = [sum(lasted[saved : saved + 2]) - 2 * plain for saved in self._saved]
        self.task.out.write_text(json.dumps({"stalls": stalls, "spread": spread}))


def make_model(layers: int) -> nn.Sequential:
    """4.2 million parameters a layer, (batch, 1024) → (batch, 1024) float32."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(layers)]
    return nn.Sequential(*blocks)


def make_batch() -> torch.Tensor:
    """(4, 1024) float32."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Of telling its input again."""
    loss: torch.Tensor = (model(batch) - batch).square().mean()
    return loss
