"""A Checkpointer asked for its training's anatomy: nothing about that may end training, nor slow other ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from stepfast.torch.anatomy import from_json
from stepfast.torch.measuring import Measuring

STEPS = 6  # more than come before the first sample


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def step(trained: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    trained(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Bare(torch.optim.Optimizer):
    """An optimizer that takes no hooks, as some wrappers are."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups = [{"params": list(parameters)}]

    def step(self, closure: Any = None) -> None:
        del closure

    def zero_grad(self, set_to_none: bool = True) -> None:
        del set_to_none

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        del state_dict


def test_a_report_of_training_with_accelerates_optimizer_is_written(bench: Any, tmp_path: Path) -> None:
    file = tmp_path / "anatomy.json"
    accelerator = Accelerator(cpu=True)
    trained = model()
    trained, optimizer = accelerator.prepare(trained, torch.optim.AdamW(trained.parameters()))
    checkpointer = bench.make(bench.environment(anatomy=str(file)), model=trained, optimizer=optimizer)
    for number in range(1, STEPS + 1):
        step(trained, optimizer)
        checkpointer.step(number)
    checkpointer.close()
    report = from_json(file.read_text())
    assert (report.kind, report.time.samples_per_step) == ("measured", 4)


def test_an_optimizer_that_no_meter_can_follow_trains_all_the_same(
    bench: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trained = model()
    optimizer = Bare(trained.parameters())
    checkpointer = bench.make(bench.environment(anatomy="1"), model=trained, optimizer=optimizer)
    for number in range(1, STEPS + 1):
        step(trained, optimizer)
        checkpointer.step(number)
    checkpointer.close()
    assert checkpointer.steps()[-1].step == STEPS
    assert "the anatomy of this training is not measured" in caplog.text


@pytest.mark.parametrize(("rank", "is_sampled"), [(0, True), (1, False)])
def test_one_rank_samples_and_all_have_their_clocks(bench: Any, rank: int, is_sampled: bool) -> None:
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters())
    environment = replace(bench.environment(anatomy="1"), rank=rank, world_size=2)
    measuring = Measuring(environment, {"model": trained, "optimizer": optimizer})
    for _ in range(STEPS):
        step(trained, optimizer)
    told = measuring.metrics({"loss": 1.0})
    measuring.close()
    assert ("anatomy_memory_peak_bytes" in told) is is_sampled
    assert told["anatomy_step_seconds"] > 0
    assert told["loss"] == 1.0
