"""What the cache holds is used only for the weights, the samples and the pipeline that it is of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from gangs import run_gang
from stepfast.torch.elastic_pipeline import ElasticPipeline
from stepfast.torch.elastic_pipeline.cache import RECORD_BYTES, ActivationCache, OwnMemory
from trainings import (
    BATCH,
    SAMPLES,
    Tensors,
    Training,
    blocks,
    data,
    distance,
    loss,
    outcome_of,
    train_alone,
    train_as_rank,
)

OPTIONS: dict[str, Any] = {"length": 1, "micro_batches": 1, "cache": True}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({2: 3, 4: 0, 8: 5}, id="to none and on"),
        pytest.param({2: 5, 4: 2, 8: 6}, id="to fewer and on"),
    ],
)
def test_layers_that_trained_again_are_not_extended_from_what_they_gave(changes: dict[int, int]) -> None:
    training = Training(model=blocks, steps=12, changes=changes, options=OPTIONS)
    expected = train_alone(training)
    for outcome in run_gang(2, train_as_rank, training):
        assert distance(outcome.weights, expected.weights) < 1e-12


UNUSED = Training(model=blocks, steps=12, changes={2: 5, 4: 2, 8: 6}, options=OPTIONS)


def train_unused_for_two() -> Tensors:
    """Where two layers are frozen the cache is not used, as timing would have said."""
    network, optimizer, scheduler = UNUSED.make()
    pipeline = UNUSED.pipeline(network, optimizer)
    pipeline.load_state_dict({**copy.deepcopy(pipeline.state_dict()), "cacheCovers": {2: 0}})
    for _ in pipeline.epochs(12):
        for step in pipeline.steps():
            scheduler.step()
            if step.number in UNUSED.changes:
                pipeline.take(pipeline.shape_for(UNUSED.changes[step.number]))
            if step.number == UNUSED.steps:
                return outcome_of(network, optimizer, [], []).weights
    raise AssertionError("an epoch has steps")


def test_layers_that_trained_while_it_was_not_used_are_not_extended() -> None:
    assert distance(run_gang(1, train_unused_for_two)[0], train_alone(UNUSED).weights) < 1e-12


def made(seed: int) -> tuple[nn.Module, ElasticPipeline]:
    torch.manual_seed(seed)
    network = blocks().double()
    optimizer = torch.optim.AdamW(network.parameters())
    return network, ElasticPipeline(network, optimizer, loss, data=data(), batch_size=BATCH, **OPTIONS)


def go(pipeline: ElasticPipeline, until: int) -> None:
    for _ in pipeline.epochs(9):
        for step in pipeline.steps():
            if step.number == until:
                return


def restored_over_rows() -> float:
    """Weights of another training are loaded where rows of this one's frozen layers are there."""
    _, other = made(2)
    go(other, 3)
    other.take(other.shape_for(5))
    state = copy.deepcopy(other.state_dict())
    network, used = made(1)
    go(used, 1)
    used.take(used.shape_for(3))
    go(used, 4)
    used.load_state_dict(copy.deepcopy(state))
    go(used, 6)
    fresh_network, fresh = made(1)
    fresh.load_state_dict(state)
    go(fresh, 6)
    return distance(network.state_dict(), fresh_network.state_dict())


def test_rows_of_weights_that_a_restore_has_replaced_are_not_extended() -> None:
    assert run_gang(1, restored_over_rows) == [0.0]


def second_in_the_same_memory() -> float:
    """An agent lends memory by a name, under which two pipelines of a process ask."""
    shared = OwnMemory(100_000)
    found = []
    for seeds in ((1, 2), (2,)):
        for seed in seeds:
            network, pipeline = made(seed)
            if len(seeds) > 1:
                pipeline.use_node_memory(lambda name, size: shared)  # type: ignore[arg-type, return-value] # alike
            pipeline.take(pipeline.shape_for(3))
            go(pipeline, 6)
        found.append({name: tensor.clone() for name, tensor in network.state_dict().items()})
    return distance(*found)


def test_rows_of_another_pipeline_are_not_taken() -> None:
    assert run_gang(1, second_in_the_same_memory) == [0.0]


class Texts(Dataset[Any]):
    """Of different lengths."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.arange(3 + index // 8, dtype=torch.float32), torch.tensor([float(index)])


def padded(batch: list[Any]) -> Any:
    inputs = nn.utils.rnn.pad_sequence([one for one, _ in batch], batch_first=True)
    return inputs, torch.stack([other for _, other in batch])


class Words(nn.Module):
    """A vector for each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x if x.dim() > 2 else x.unsqueeze(-1).expand(-1, -1, 4)))


class Mean(nn.Module):
    """Over all words."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x.mean(dim=1))
        return y


class Hidden(Dataset[Any]):
    """Random by a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.rand(5, generator=self.generator), torch.tensor([float(index)])


def train_by_default(samples: Callable[[], Dataset[Any]], collate: Any) -> int:
    """Where it was decided to use the cache; the steps that were trained."""
    model = [Words(), Words(), Words(), Mean()]
    optimizer = torch.optim.AdamW([parameter for module in model for parameter in module.parameters()])
    pipeline = ElasticPipeline(
        model, optimizer, loss, data=samples(), batch_size=BATCH, length=1, micro_batches=1, collate=collate
    )
    pipeline.load_state_dict({**copy.deepcopy(pipeline.state_dict()), "cacheCovers": {2: SAMPLES}})
    pipeline.take(pipeline.shape_for(2))
    for _ in pipeline.epochs(2):
        for _ in pipeline.steps():
            pass
    assert pipeline.evaluate(samples(), loss) > 0  # collated as in training
    return pipeline.step


@pytest.mark.parametrize(("samples", "collate"), [(Texts, padded), (Hidden, None)], ids=["padded", "hidden randomness"])
def test_what_cannot_be_cached_trains_by_default(samples: Callable[[], Dataset[Any]], collate: Any) -> None:
    assert run_gang(1, train_by_default, samples, collate) == [6]


def looked_up(layers: Sequence[Callable[[torch.Tensor], torch.Tensor]], inputs: torch.Tensor, extend: bool) -> Any:
    """What the layers give of 16 samples: the last of them on top of rows, or all from the inputs."""

    def run(begin: int) -> Any:
        def prefix(value: torch.Tensor) -> torch.Tensor:
            for layer in layers[begin:]:
                value = layer(value)
            return value

        return prefix

    numbers = range(16)
    cache = ActivationCache(OwnMemory(16 * (RECORD_BYTES + layers[0](inputs)[0].nbytes)), 16)
    if extend:
        cache.begin(1, layers[0], lambda asked: inputs[list(asked)])
        cache.lookup(numbers, inputs)
    cache.begin(2, run(0), lambda asked: inputs[list(asked)], extend=run(1) if extend else None)
    return cache.lookup(numbers, inputs)


def test_rows_extended_have_the_bits_of_rows_computed_where_channels_are_last() -> None:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 16, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch's
    second = nn.Conv2d(16, 16, 3, padding=1)
    inputs = torch.randn(16, 3, 20, 20)
    assert torch.equal(looked_up([first, second], inputs, True), looked_up([first, second], inputs, False))


def test_rows_extended_have_the_bits_of_rows_computed_where_dimensions_are_turned() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    layers = [
        lambda x: first(x).transpose(1, 2),
        lambda x: second(torch.softmax(x, dim=-1)) + x.sum(dim=-1, keepdim=True),
    ]
    inputs = torch.randn(16, 64, 64)
    assert torch.equal(looked_up(layers, inputs, True), looked_up(layers, inputs, False))
