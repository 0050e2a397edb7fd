"""A model as layers that stages can be made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stepfast.torch.elastic_pipeline import CannotSplit, Layer, split
from trainings import WIDTH, Block, Branching, First, Masked


def run(layers: list[Layer], value: Any) -> Any:
    for layer in layers:
        value = layer.module(value)
    return value


def names(layers: list[Layer]) -> list[str]:
    return [layer.names[own] for layer in layers for own, _ in layer.module.named_parameters()]


@pytest.mark.parametrize("is_training", [True, False])
def test_layers_of_a_traced_model_give_what_it_gives(is_training: bool) -> None:
    model = Branching().train(is_training)
    layers = split(model)
    inputs = torch.randn(3, WIDTH)
    assert torch.equal(run(layers, inputs), model(inputs))
    assert len(layers) == 7  # stem, four blocks, what uses a weight twice, head
    assert sorted(names(layers)) == sorted(name for name, _ in model.named_parameters())
    assert all(module.training is is_training for module in model.modules())


def test_layers_share_the_models_own_parameters() -> None:
    model = Branching()
    assert {id(p) for layer in split(model) for p in layer.module.parameters()} == {id(p) for p in model.parameters()}


def test_sequentials_are_opened_and_what_has_no_parameters_joins_a_neighbour() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2), nn.Softmax(dim=1))
    layers = split(model)
    assert [list(layer.names.values()) for layer in layers] == [["1.0.weight", "1.0.bias"], ["2.weight", "2.bias"]]
    inputs = torch.randn(3, 2, 2)
    assert torch.equal(run(layers, inputs), model(inputs))


def test_modules_of_a_list_are_layers() -> None:
    modules = [Masked(), First()]
    assert names(split(modules)) == ["0.linear.weight", "0.linear.bias", "1.linear.weight", "1.linear.bias"]


class Tied(nn.Module):
    """One weight in its first and last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.last(self.middle(self.first(x))))
        return y


def test_what_shares_a_parameter_is_one_layer() -> None:
    assert [len(layer.names) for layer in split(Tied())][-1] == 2
    assert len(split(Tied())) == 2


class Deciding(nn.Module):
    """Looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) if x.sum() > 0 else x
        return y


class TwoInputs(nn.Module):
    """Takes two."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


class OwnDropout(nn.Module):
    """Looks at its own mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.linear(x), 0.5, training=self.training)


def shared() -> list[nn.Module]:
    first, second = Block(), Block()
    second.inner = first.inner
    return [first, second]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        pytest.param(Deciding(), "give the list of its layers instead", id="control flow"),
        pytest.param(TwoInputs(), "it must take one", id="two inputs"),
        pytest.param(OwnDropout(), "there is nn.Dropout", id="its own mode"),
        pytest.param(shared(), "are one parameter: put their modules into one layer", id="shared in a list"),
        pytest.param(nn.Sequential(nn.ReLU()), "no parameters", id="nothing to train"),
        pytest.param([nn.ReLU()], "no parameters", id="nothing to train, in a list"),
    ],
)
def test_what_cannot_be_split_is_told_why(model: Any, reason: str) -> None:
    with pytest.raises(CannotSplit, match=reason):
        split(model)
