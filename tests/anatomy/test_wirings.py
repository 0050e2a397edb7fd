"""Predictions and measurements of models that are hard to follow are what the allocator says, to the byte."""

from __future__ import annotations

import pytest
import torch
from benchmarks.anatomy.cpumemory import allocator_peak_bytes
from benchmarks.anatomy.plaintraining import train
from wirings import WIRINGS

from stepfast.torch.anatomy import measure, predict

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")


@pytest.mark.parametrize("name", WIRINGS)
def test_predicted_and_measured_peaks_are_the_allocators_to_the_byte(name: str) -> None:
    wiring = WIRINGS[name]
    expected = allocator_peak_bytes(lambda: train(wiring.model, lambda: wiring.batch(3)))
    predicted = predict(wiring.model, torch.optim.AdamW, wiring.batch, batch_size=3, device="cpu")
    measured = measure(wiring.model, torch.optim.AdamW, wiring.batch, batch_size=3, device="cpu")
    assert (predicted.memory.peak_bytes, measured.memory.peak_bytes) == (expected, expected)
