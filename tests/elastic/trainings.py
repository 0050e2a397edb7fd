"""Small trainings in float64: by one process with plain torch, and by a gang with an ElasticPipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from stepfast.torch.elastic_pipeline import ElasticPipeline

WIDTH = 6
SAMPLES = 44
BATCH = 16


class Block(nn.Module):
    """A residual one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))


def model(blocks: int = 8, seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(blocks))).double()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, WIDTH, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, torch.sin(inputs.sum(dim=1, keepdim=True)).expand(-1, WIDTH).contiguous())


def optimizer(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(network.parameters(), lr=0.01, weight_decay=0.1)


loss = nn.functional.mse_loss
