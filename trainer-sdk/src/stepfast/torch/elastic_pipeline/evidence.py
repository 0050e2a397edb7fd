"""What a freezing rule is shown: gathered over the devices of the first replica, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from stepfast.torch.elastic_pipeline.freezing import Evidence, LayerEvidence
from stepfast.torch.elastic_pipeline.gradients import Gradients
from stepfast.torch.elastic_pipeline.groups import Messages
from stepfast.torch.elastic_pipeline.residence import Residence
from stepfast.torch.elastic_pipeline.shape import Shape


def gather(
    residence: Residence, shape: Shape, gradients: Gradients, optimizer: torch.optim.Optimizer, messages: Messages, *,
    rank: int, epoch: int, metric: float | None,
) -> Evidence:  # fmt: skip
    """Of the steps since it was gathered last; every rank calls it alike."""
    squares = gradients.mean_squares()
    own: list[list[float]] = []
    speaks = rank in shape.ranks_of_replica(0)
    for layer in range(shape.frozen, shape.layers):
        is_ours = speaks and layer in shape.active_of(rank)
        own.append([squares.get(layer, 0.0), *_moments(residence, layer, optimizer)] if is_ours else [0.0] * 4)
    summed = messages.sum([value for values in own for value in values])
    rows = [summed[begin:end] for begin, end in pairwise(range(0, len(summed) + 1, 4))]
    return Evidence(
        epoch=epoch, frozen=shape.frozen, metric=metric, active=tuple(LayerEvidence(
            gradient_norm=square**0.5,
            signal=first / second if second else None,
            noise=noise if second else None,
        ) for square, first, second, noise in rows),
    )  # fmt: skip


def _moments(residence: Residence, layer: int, optimizer: torch.optim.Optimizer) -> Iterator[float]:
    """Σm̂², Σv̂ of Adam's moments over a layer, corrected for their bias, and the share that mere noise has."""
    first = second = 0.0
    noise = 0.0
    states = residence.state(layer)
    betas = {id(p): group.get("betas") for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in residence.trained(layer).items():
        state, beta = states.get(name, {}), betas.get(id(parameter))
        if beta is None or not {"exp_avg", "exp_avg_sq", "step"} <= state.keys():
            continue
        steps = float(state["step"])
        mean = float(state["exp_avg"].double().square().sum()) / (1 - beta[0] ** steps) ** 2
        first += mean
        second += float(state["exp_avg_sq"].double().sum()) / (1 - beta[1] ** steps)
        noise = (1 - beta[0]) / (1 + beta[0])
    yield from (first, second, noise)
