"""On a CPU the prediction is what the allocator says, to the byte."""

from __future__ import annotations

import pytest
import torch
from benchmarks.anatomy.cpumemory import allocator_peak_bytes
from benchmarks.anatomy.estimators import ESTIMATORS
from benchmarks.anatomy.plaintraining import train

from families import FAMILIES
from stepfast.torch.anatomy import predict


@pytest.mark.parametrize("batch_size", [2, 5])
@pytest.mark.parametrize("name", FAMILIES)
def test_predicted_peak_is_the_allocators_to_the_byte_and_no_other_estimate_is(name: str, batch_size: int) -> None:
    family = FAMILIES[name]
    measured = allocator_peak_bytes(lambda: train(family.model, lambda: family.batch(batch_size)))
    predicted = predict(family.model, torch.optim.AdamW, family.batch, batch_size=batch_size, device="cpu")
    assert predicted.memory.peak_bytes == measured
    assert measured not in {estimate(family.model()) for estimate in ESTIMATORS.values()}


def test_a_model_that_is_cast_where_it_is_made_is_predicted_to_the_byte() -> None:
    family = FAMILIES["bert"]

    def model() -> torch.nn.Module:
        return family.model().double()

    predicted = predict(model, torch.optim.AdamW, family.batch, batch_size=2, device="cpu")
    assert predicted.memory.peak_bytes == allocator_peak_bytes(lambda: train(model, lambda: family.batch(2)))
