"""Predictions and measurements of models that are hard to follow are what the allocator says, to the byte."""

from __future__ import annotations

import pytest
import torch
from architectures import ARCHITECTURES
from benchmarks.anatomy.cpumemory import allocator_peak_bytes
from benchmarks.anatomy.plaintraining import train
from wirings import WIRINGS

from families import Family
from stepfast.torch.anatomy import measure, predict

BATCH_SIZE = 3


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize(
    "model", [pytest.param(model, id=name) for name, model in {**WIRINGS, **ARCHITECTURES}.items()]
)
def test_predicted_and_measured_peaks_are_the_allocators_to_the_byte(model: Family) -> None:
    expected = allocator_peak_bytes(lambda: train(model.model, lambda: model.batch(BATCH_SIZE)))
    predicted = predict(model.model, torch.optim.AdamW, model.batch, batch_size=BATCH_SIZE, device="cpu")
    measured = measure(model.model, torch.optim.AdamW, model.batch, batch_size=BATCH_SIZE, device="cpu")
    assert (predicted.memory.peak_bytes, measured.memory.peak_bytes) == (expected, expected)
