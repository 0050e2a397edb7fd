"""On a CPU the prediction is what the allocator says, to the byte."""

from __future__ import annotations

import pytest
import torch
from benchmarks.anatomy.cpumemory import allocator_peak_bytes
from benchmarks.anatomy.estimators import ESTIMATORS

from families import FAMILIES, Family
from stepfast.torch.anatomy import predict


def train(family: Family, batch_size: int, *, steps: int = 2) -> None:
    model = family.model().train()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        batch = family.batch(batch_size)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("batch_size", [2, 5])
@pytest.mark.parametrize("name", FAMILIES)
def test_predicted_peak_is_the_allocators_to_the_byte(name: str, batch_size: int) -> None:
    family = FAMILIES[name]
    predicted = predict(family.model, torch.optim.AdamW, family.batch, batch_size=batch_size, device="cpu")
    assert predicted.memory.peak_bytes == allocator_peak_bytes(lambda: train(family, batch_size))


@pytest.mark.parametrize("batch_size", [2, 5])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_other_estimate_comes_nearer(name: str, batch_size: int) -> None:
    family = FAMILIES[name]
    measured = allocator_peak_bytes(lambda: train(family, batch_size))
    predicted = predict(family.model, torch.optim.AdamW, family.batch, batch_size=batch_size, device="cpu")
    others = {each: abs(estimate(family.model()) - measured) for each, estimate in ESTIMATORS.items()}
    assert abs(predicted.memory.peak_bytes - measured) < min(others.values())
