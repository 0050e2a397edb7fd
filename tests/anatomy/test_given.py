"""What predictions and measurements are given: it stays as it was, and what cannot be used is named."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stepfast.errors import AnatomyError
from stepfast.torch.anatomy import Report, measure, predict

WIDTH = 16
BOTH = pytest.mark.parametrize("anatomy", [predict, measure], ids=["predict", "measure"])
Anatomy = Callable[..., Report]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))


def batch(count: int) -> torch.Tensor:
    return torch.randn(count, WIDTH)


def mean(module: nn.Module, given: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = module(given).mean()
    return loss


def run(anatomy: Anatomy, **changes: Any) -> Report:
    given = {"model_fn": model, "optimizer_fn": torch.optim.AdamW, "batch_fn": batch, "batch_size": 4}
    return anatomy(**{**given, "loss_fn": mean, "device": "cpu", **changes})


def refused(anatomy: Anatomy, **changes: Any) -> str:
    with pytest.raises(AnatomyError) as raised:
        run(anatomy, **changes)
    return str(raised.value)


def test_a_model_that_is_there_already_stays_as_it_is() -> None:
    mine = model().eval()
    before = deepcopy(mine.state_dict())
    predicted = run(
        predict, model_fn=lambda: mine, batch_fn=lambda count: batch(count).bfloat16(), precision="bf16",
        checkpointing=lambda each: each is mine[0],
    )  # fmt: skip
    assert predicted.parameters == sum(each.numel() for each in mine.parameters())
    assert not mine.training
    assert type(mine[0]) is nn.Linear
    after = mine.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) and after[name].dtype is before[name].dtype for name in after)
    assert all(each.grad is None for each in mine.parameters())


def test_a_model_that_is_there_already_is_predicted_as_one_that_is_made() -> None:
    mine = model()
    found, expected = run(predict, model_fn=lambda: mine).memory, run(predict).memory
    assert replace(found, curve=()) == replace(expected, curve=())  # a curve has times


def test_a_model_of_another_prediction_is_refused() -> None:
    made: list[nn.Module] = []

    def once() -> nn.Module:
        made.append(made[0] if made else model())
        return made[0]

    run(predict, model_fn=once)
    assert "another prediction" in refused(predict, model_fn=once)


@BOTH
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_fn": lambda: nn.Sequential(nn.LazyLinear(1))}, "lazy modules"),
        ({"model_fn": lambda: "bert"}, "a str, not a torch.nn.Module"),
        ({"optimizer_fn": torch.optim.LBFGS}, "LBFGS steps with a closure"),
        ({"optimizer_fn": lambda parameters: None}, "a NoneType, not a torch.optim.Optimizer"),
        ({"batch_size": 0}, "0 is less than 1"),
        ({"loss_fn": lambda module, given: module(given)}, "(4, 1), not one number"),
        ({"loss_fn": lambda module, given: module(given).mean().detach()}, "no way backward"),
        ({"loss_fn": lambda module, given: 1.0}, "a float, not a tensor"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_what_cannot_be_used_is_named(anatomy: Anatomy, changes: dict[str, Any], said: str) -> None:
    assert said in refused(anatomy, **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_fn": lambda: model().to("meta")}, "model_fn makes tensors on meta"),
        ({"batch_fn": lambda count: batch(count).to("meta")}, "batch_fn makes tensors on meta"),
    ],
    ids=["model", "batch"],
)
def test_a_prediction_takes_the_cpus_tensors_only(changes: dict[str, Any], said: str) -> None:
    assert said in refused(predict, **changes)


@dataclass
class Batch:
    words: torch.Tensor
    weight: float = 1.0


@BOTH
def test_a_batch_may_be_a_dataclass(anatomy: Anatomy) -> None:
    found = run(
        anatomy, batch_fn=lambda count: Batch(batch(count)), loss_fn=lambda module, given: mean(module, given.words)
    )
    assert found.memory.peak_components["inputs"] == run(anatomy).memory.peak_components["inputs"] > 0


@contextmanager
def nothing_drawn() -> Iterator[None]:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index] # a tuple
    yield
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    assert after[:2] == before[:2]
    assert torch.equal(after[2], before[2])


def test_a_prediction_draws_and_seeds_nothing() -> None:
    def seeded() -> nn.Module:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        return nn.Sequential(model(), nn.Dropout(0.5))

    with nothing_drawn():
        run(predict, model_fn=seeded)


@BOTH
def test_torch_and_the_environment_are_as_before(anatomy: Anatomy) -> None:
    watched = [
        (torch.autograd, "_engine_run_backward"), (torch.utils, "swap_tensors"), (torch.Tensor, "__deepcopy__"),
        (torch.UntypedStorage, "resize_"), (nn.functional, "has_torch_function"),
    ]  # fmt: skip
    before, environment = [getattr(owner, name) for owner, name in watched], dict(os.environ)
    run(anatomy)
    refused(anatomy, loss_fn=lambda module, given: 1.0)
    assert [getattr(owner, name) for owner, name in watched] == before
    assert dict(os.environ) == environment


def test_autocasts_cache_is_on_whoever_turned_it_off() -> None:
    expected = run(predict, precision="bf16-mixed", device="v100-16gb").memory.peak_bytes
    torch.set_autocast_cache_enabled(False)
    try:
        assert run(predict, precision="bf16-mixed", device="v100-16gb").memory.peak_bytes == expected
        assert not torch.is_autocast_cache_enabled()
    finally:
        torch.set_autocast_cache_enabled(True)


def test_deepspeed_is_as_before_a_prediction_of_zero() -> None:
    script = """
import sys, torch, logging
from test_given import run
from stepfast.torch.anatomy import predict
run(predict, parallel="zero2:2", device="a100-80gb")
from deepspeed.accelerator import real_accelerator
print(real_accelerator.ds_accelerator, logging.getLogger("DeepSpeed").level)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split()[-2] == "None"


@pytest.mark.parametrize("parallel", ["ddp:2", "fsdp2:2", "zero1:2", "zero3:2"])
def test_torch_is_as_before_a_prediction_of_several_ranks(parallel: str) -> None:
    """DeepSpeed would leave a function of its own in the place of nn.functional.linear."""
    owners = (torch, torch.distributed, torch.Tensor, nn, nn.functional, nn.Linear, nn.Module, nn.Parameter)
    before = [(owner, name, value) for owner in owners for name, value in vars(owner).items() if callable(value)]
    run(predict, parallel=parallel)
    assert [(owner, name) for owner, name, value in before if vars(owner).get(name) is not value] == []


def test_what_multiplies_different_dtypes_is_refused() -> None:
    assert "multiplies bfloat16 and float32" in refused(predict, precision="bf16", model_fn=lambda: nn.Linear(WIDTH, 1))
