"""Training as anybody writes it, with nothing of Stepfast's: what predictions and measurements are held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn


def train(make_model: Callable[[], nn.Module], make_batch: Callable[[], Mapping[str, torch.Tensor]]) -> None:
    """Two steps with AdamW of a model that computes its own loss."""
    model = make_model().train()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        batch = make_batch()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
