"""Where there is a GPU: an elastic pipeline of one device on it, beside plain torch on the host."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from trainings import Training, blocks, distance, outcome_of, train_alone, train_to

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU: the elastic pipeline is not run on one")


@pytest.fixture(autouse=True)
def gang() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("cache", [True, False, None])
def test_a_training_on_the_gpu_is_the_training_on_the_host(cache: bool | None) -> None:
    training = Training(
        model=blocks, steps=12, max_gradient_norm=0.5, changes={2: 3, 5: 5, 9: 2}, options={"length": 1, "cache": cache}
    )
    expected = train_alone(training)
    network, optimizer, scheduler = training.make()
    pipeline = training.pipeline(network, optimizer)
    losses, _ = train_to(pipeline, scheduler, training, 6)
    pipeline.load_state_dict(copy.deepcopy(pipeline.state_dict()))
    losses += train_to(pipeline, scheduler, training, training.steps)[0]
    outcome = outcome_of(network, optimizer, losses, [])
    assert all(tensor.is_cuda for tensor in outcome.weights.values())
    assert losses == pytest.approx(expected.losses, rel=0, abs=1e-9)
    weights = {name: tensor.cpu() for name, tensor in outcome.weights.items()}
    assert distance(weights, expected.weights) < 1e-9
