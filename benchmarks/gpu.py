"""What a save of GPU tensors costs: `python -m benchmarks.gpu [--gib 20]`.

Measured together, on the device that this process sees first: the bandwidth of pinned memory (the limit), ours from
the call to the last byte in the slot, how long `save()` holds training, and how long steps take while one is copied,
beside steps with none. A step has so many forward and backward passes that it takes twice as long as the copy: a copy
is hidden behind them, or, if they end first, the optimizer waits for it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmarks.processes.agentprocess import running_agent
from benchmarks.results import RESULTS, add_record
from torch import nn

from stepfast.environment import read_environment
from stepfast.step import Tier
from stepfast.torch import Checkpointer, every

GIB = 2**30
_COPY_BYTES = GIB
_REPEATS = 5
_SAVES = 5
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def synchronize(device: torch.device) -> None:
    """Until the device has done what it was told."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def pinned_bytes_per_second(device: torch.device, size_bytes: int = _COPY_BYTES) -> float:
    """How fast this device's memory is copied to pinned memory in one piece: the limit of any save."""
    source = torch.ones(size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
    best = float("inf")
    for _ in range(_REPEATS):
        synchronize(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return size_bytes / best


class Trainee:
    """A model of square layers with Adam: parameters and two moments of about so many bytes in all."""

    def __init__(self, size_bytes: int, dtype: torch.dtype, device: torch.device, width: int = 8192) -> None:
        layers = max(1, size_bytes // (3 * dtype.itemsize * width * width))
        self.device, self.dtype, self.width = device, dtype, width
        torch.manual_seed(1)
        blocks = [nn.Linear(width, width, bias=False, device=device, dtype=dtype) for _ in range(layers)]
        self.model = nn.Sequential(*blocks)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-6, fused=True)
        self.passes = 1

    def train(self) -> None:
        """One step."""
        self.optimizer.zero_grad(set_to_none=True)
        batch = torch.ones(256, self.width, device=self.device, dtype=self.dtype)
        for _ in range(self.passes):
            self.model(batch).float().square().mean().backward()
        self.optimizer.step()

    def step_seconds(self, steps: int) -> float:
        """How long one takes of so many."""
        synchronize(self.device)
        began = time.perf_counter()
        for _ in range(steps):
            self.train()
        synchronize(self.device)
        return (time.perf_counter() - began) / steps

    def fit(self, seconds: float) -> None:
        """Gives a step so many passes that it takes at least that long."""
        self.train()
        self.passes = max(1, round(seconds / self.step_seconds(1) * self.passes))
        while self.step_seconds(1) < seconds:
            self.passes = int(self.passes * 1.5) + 1

    @property
    def size_bytes(self) -> int:
        """What a save of it takes."""
        held = [*self.model.parameters()]
        held += [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


@contextmanager
def checkpointer_of(trainee: Trainee, limit_bytes: int) -> Iterator[Checkpointer]:
    """One on an agent of its own; nothing but its first save goes to the storage."""
    with tempfile.TemporaryDirectory(prefix="stepfast-gpu-") as name:
        folder = Path(name)
        with running_agent(folder, limit_bytes) as agent:
            os.environ |= {
                "STEPFAST_SOCKET": agent.socket, "STEPFAST_JOB": "bench/gpu",
                "STEPFAST_RUN": f"{uuid.uuid4().hex[:8]}-1", "STEPFAST_STORAGE_URI": (folder / "storage").as_uri(),
                "STEPFAST_SETTINGS": '{"persistIntervalSeconds": 100000, "maxToKeep": 1}',
            }  # fmt: skip
            checkpointer = Checkpointer(
                model=trainee.model, optimizer=trainee.optimizer, environment=read_environment(),
                interval=every(steps=10**9), overlap=True,
            )  # fmt: skip
            try:
                yield checkpointer
            finally:
                checkpointer.__exit__(RuntimeError, RuntimeError(), None)  # says goodbye, and waits for nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of one state. `copy_seconds`: from the call to the last byte in the slot; `stall_seconds`: of `save()`."""

    size_bytes: int
    copy_seconds: float
    stall_seconds: float
    step_seconds: float
    saving_step_seconds: float

    @property
    def copy_bytes_per_second(self) -> float:
        """How fast a save is copied with nothing beside it."""
        return self.size_bytes / self.copy_seconds

    @property
    def step_ratio(self) -> float:
        """How much longer a step takes during which one is copied."""
        return self.saving_step_seconds / self.step_seconds


def measure(trainee: Trainee) -> Measured:
    """Trains, saves and waits. The first saves are not counted: slots are mapped and locked then."""
    trainee.train()
    size = trainee.size_bytes
    with checkpointer_of(trainee, 3 * (size + size // 50 + (64 << 20))) as checkpointer:
        step = 0
        copies, stalls = [], []
        for turn in range(3 + _SAVES):
            trainee.train()
            synchronize(trainee.device)
            began = time.perf_counter()
            saved = checkpointer.save(step := step + 1)
            saved.wait(Tier.MEMORY)
            copies.append(time.perf_counter() - began)
            stalls.append(saved.stall_seconds)
            if turn == 0:
                saved.wait()  # it alone is persisted, and not beside what is measured
        trainee.fit(2 * median(copies[3:]))
        alone, saving = [], []
        for _ in range(_SAVES):
            alone.append(trainee.step_seconds(1))
            synchronize(trainee.device)
            began = time.perf_counter()
            saved = checkpointer.save(step := step + 1)
            trainee.train()
            synchronize(trainee.device)
            saving.append(time.perf_counter() - began)
            stalls.append(saved.stall_seconds)
            saved.wait(Tier.MEMORY)
    return Measured(
        size_bytes=size, copy_seconds=median(copies[3:]), stall_seconds=median(stalls[3:]),
        step_seconds=median(alone), saving_step_seconds=median(saving),
    )  # fmt: skip


def describe(dtype: str, measured: Measured, limit: float) -> dict[str, Any]:
    """The record's values."""
    return {
        "dtype": dtype, "torch": torch.__version__, "size_bytes": measured.size_bytes,
        "pinned_bytes_per_second": limit, "copy_bytes_per_second": measured.copy_bytes_per_second,
        "copy_seconds": measured.copy_seconds, "stall_seconds": measured.stall_seconds,
        "step_seconds": measured.step_seconds, "saving_step_seconds": measured.saving_step_seconds,
        "step_ratio": measured.step_ratio,
    }  # fmt: skip


def say(dtype: str, measured: Measured, limit: float) -> str:
    """One line for who watches."""
    rate = measured.copy_bytes_per_second
    return (
        f"{dtype}: {measured.size_bytes / GIB:.2f} GiB, {rate / GIB:.2f} GiB/s of {limit / GIB:.2f} "
        f"({rate / limit:.0%} of pinned memory's), save() {measured.stall_seconds * 1000:.1f} ms, "
        f"a step {measured.step_seconds:.3f} s, while copying x {measured.step_ratio:.3f}"
    )


def main() -> int:
    """Measures both dtypes; 0 also when there is no GPU, which is said."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=20.0, help="parameters and Adam's moments")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("NOTHING IS MEASURED: torch sees no GPU here", file=sys.stderr)
        return 0
    device = torch.device("cuda", 0)
    limit = pinned_bytes_per_second(device)
    for name, dtype in _DTYPES.items():
        measured = measure(Trainee(int(arguments.gib * GIB), dtype, device))
        torch.cuda.empty_cache()
        print(say(name, measured, limit), flush=True)
        device_name = torch.cuda.get_device_name(device)
        add_record("gpu", results=arguments.results, device=device_name, **describe(name, measured, limit))
    return 0


if __name__ == "__main__":
    sys.exit(main())
