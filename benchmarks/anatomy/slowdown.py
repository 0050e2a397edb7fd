"""How much a Meter slows a training down: `python -m benchmarks.anatomy.slowdown`.

The same training goes on by turns without a Meter and with one, in one process. What a sampled step costs is spread
over the steps that come before the next one by default. Times are this process's on the CPU, where all of the training
is and the Meter as well: who else uses the machine does not count. The clock on the wall is told beside them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import nn

from stepfast.torch.anatomy import Meter
from stepfast.torch.anatomy.spacing import FIRST_STEP, steps_between

GOAL = 1.01
_WIDTH, _LENGTH, _BATCH_SIZE = 256, 64, 8


@dataclass(slots=True)
class Times:
    """Seconds of steps by one clock: without a Meter, with one between its samples, and those that it sampled."""

    plain: list[float] = field(default_factory=list)
    metered: list[float] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)

    @property
    def between(self) -> int:
        """Steps from one sample to the next."""
        return steps_between(max(0.0, median(self.sampled) - median(self.metered)), median(self.metered))

    @property
    def clock_ratio(self) -> float:
        """What a Meter does to a step that it does not sample."""
        return median(self.metered) / median(self.plain)

    @property
    def sample_ratio(self) -> float:
        """What samples do, spread over the steps between them."""
        return 1 + (median(self.sampled) / median(self.metered) - 1) / self.between

    def __str__(self) -> str:
        return (
            f"{median(self.plain):10.5f} {median(self.metered):10.5f} {median(self.sampled):10.5f} {self.between:8d} "
            f"{self.clock_ratio:8.4f} {self.sample_ratio:8.4f} {self.clock_ratio * self.sample_ratio:8.4f}"
        )


@dataclass(slots=True)
class Clocks:
    """Both clocks' times."""

    cpu: Times = field(default_factory=Times)
    wall: Times = field(default_factory=Times)


def measure(*, layers: int, rounds: int, steps: int) -> Clocks:
    """Each round trains `steps` steps without a Meter and as many with a new one, whose first sample falls into them;
    every other round the other way about."""
    block = nn.TransformerEncoderLayer(_WIDTH, nhead=4, dim_feedforward=4 * _WIDTH, batch_first=True)
    model = nn.TransformerEncoder(block, layers, enable_nested_tensor=False).train()
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        loss = model(torch.randn(_BATCH_SIZE, _LENGTH, _WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(FIRST_STEP):
        train()  # what stays is allocated
    clocks = Clocks()
    for number in range(rounds):
        for has_meter in (False, True) if number % 2 else (True, False):
            _turn(train, steps, clocks, Meter(model, optimizer) if has_meter else None)
    return clocks


def _turn(train: Callable[[], None], steps: int, clocks: Clocks, meter: Meter | None) -> None:
    for _ in range(steps):
        before = meter.report() if meter is not None else None
        wall, cpu = time.perf_counter(), time.process_time()
        train()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        for times, took in ((clocks.cpu, cpu), (clocks.wall, wall)):
            if meter is None:
                times.plain.append(took)
            else:
                (times.metered if meter.report() is before else times.sampled).append(took)
    if meter is not None:
        meter.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=30, help="of each turn")
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for each other would be counted as work
    clocks = measure(layers=options.layers, rounds=options.rounds, steps=options.steps)
    print(
        f"a transformer of {options.layers} layers, {len(clocks.cpu.plain)} steps each way, torch {torch.__version__}"
    )
    print("seconds of a step:   plain      meter     sample  between    clock  samples    ratio")
    print(f"on the CPU      {clocks.cpu}")
    print(f"on the wall     {clocks.wall}")
    print(f"goal: ratio below {GOAL}")


if __name__ == "__main__":
    main()
