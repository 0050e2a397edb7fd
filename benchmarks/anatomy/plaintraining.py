"""Training as anybody writes it, with nothing of Stepfast's: what predictions and measurements are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn


def train(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[], Mapping[str, torch.Tensor]],
    *,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW,
    cast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    accumulation_steps: int = 1,
    clip_norm: float | None = None,
) -> None:
    """Two steps of a model that computes its own loss."""
    model = make_model().train()
    optimizer = make_optimizer(model.parameters())
    for _ in range(2):
        for _ in range(accumulation_steps):
            batch = make_batch()
            with cast():
                loss = model(**batch).loss
            if accumulation_steps > 1:
                loss = loss / accumulation_steps
            loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
