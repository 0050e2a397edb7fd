"""How much a Meter slows a training down: `python -m benchmarks.anatomy.slowdown`.

The same training goes on by turns without a Meter and with one, in one process, so that whatever else the machine does
falls on both. What a sampled step costs is spread over the steps that come before the next one by default.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch
from benchmarks.anatomy.models import SUBJECTS, Subject

from stepfast.torch.anatomy import Meter
from stepfast.torch.anatomy.spacing import FIRST_STEP, steps_between

GOAL = 1.01


@dataclass(slots=True)
class Times:
    """Seconds of steps: without a Meter, with one between its samples, and those that it sampled."""

    plain: list[float] = field(default_factory=list)
    metered: list[float] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)

    @property
    def between(self) -> int:
        """Steps from one sample to the next."""
        return steps_between(max(0.0, median(self.sampled) - median(self.metered)), median(self.metered))

    @property
    def clock_ratio(self) -> float:
        """What the clock alone does to a step."""
        return median(self.metered) / median(self.plain)

    @property
    def ratio(self) -> float:
        """Training with a Meter by training without one, from one sample to the next."""
        with_meter = median(self.sampled) + self.between * median(self.metered)
        return with_meter / ((self.between + 1) * median(self.plain))


def measure(subject: Subject, *, batch_size: int, rounds: int, steps: int) -> Times:
    """Each round trains `steps` steps without a Meter and as many with a new one, whose first sample falls into them;
    every other round the other way about."""
    source = subject.source()
    assert source.batch is not None
    make_batch = source.batch
    model = source.model().train()
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        loss = model(**make_batch(batch_size)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(FIRST_STEP):
        train()  # what stays is allocated
    times = Times()
    for number in range(rounds):
        for has_meter in (False, True) if number % 2 else (True, False):
            if has_meter:
                _metered(train, steps, times, Meter(model, optimizer))
            else:
                times.plain += [_seconds(train) for _ in range(steps)]
    return times


def _metered(train: Callable[[], None], steps: int, times: Times, meter: Meter) -> None:
    for _ in range(steps):
        before = meter.report()
        took = _seconds(train)
        (times.metered if meter.report() is before else times.sampled).append(took)
    meter.close()


def _seconds(train: Callable[[], None]) -> float:
    started = time.perf_counter()
    train()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[subject.name for subject in SUBJECTS], default="T5-small")

    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20, help="of each turn")
    options = parser.parse_args()
    subject = next(each for each in SUBJECTS if each.name == options.model)
    times = measure(subject, batch_size=options.batch_size, rounds=options.rounds, steps=options.steps)
    print(f"{subject.name}, batch {options.batch_size}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"a step without a Meter       {median(times.plain):10.4f} s (median of {len(times.plain)})")
    print(f"with one, between samples    {median(times.metered):10.4f} s (median of {len(times.metered)})")
    print(f"a sampled step               {median(times.sampled):10.4f} s (median of {len(times.sampled)})")
    print(f"steps between two samples    {times.between:10d}")
    print(f"clock alone                  {times.clock_ratio:10.4f}")
    print(f"ratio, samples and all       {times.ratio:10.4f} (goal: below {GOAL})")


if __name__ == "__main__":
    main()
