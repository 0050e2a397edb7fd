"""Where there is a GPU: predictions beside its allocator, and measurements beside both."""

from __future__ import annotations

import gc

import pytest
import torch
from benchmarks.anatomy.models import SUBJECTS, Subject

from stepfast.torch.anatomy import Meter, measure, predict
from stepfast.torch.anatomy.live import device_here, device_use
from stepfast.torch.anatomy.spacing import FIRST_STEP

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NO GPU: predictions for CUDA are not held against its allocator"
)


def allocators_peak_bytes(subject: Subject, batch_size: int, precision: str) -> int:
    """torch.cuda.max_memory_allocated of two plain steps, beyond what there was before."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    source = subject.source()
    assert source.batch is not None
    model = source.model().cuda().train()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        batch = {name: tensor.cuda() for name, tensor in source.batch(batch_size).items()}
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_the_predicted_peak_is_within_five_percent_of_the_allocators(subject: Subject, precision: str) -> None:
    source = subject.source()
    assert source.batch is not None
    predicted = predict(
        source.model, torch.optim.AdamW, source.batch, batch_size=16, device=device_here(), precision=precision
    )
    assert predicted.memory.peak_bytes == pytest.approx(allocators_peak_bytes(subject, 16, precision), rel=0.05)


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_the_measured_peak_is_the_allocators(subject: Subject) -> None:
    source = subject.source()
    assert source.batch is not None
    measured = measure(source.model, torch.optim.AdamW, source.batch, batch_size=16, device="cuda")
    assert measured.memory.peak_bytes == pytest.approx(allocators_peak_bytes(subject, 16, "fp32"), rel=0.01)
    assert measured.memory.reserved_bytes >= measured.memory.peak_bytes


def test_a_training_looked_at_while_it_runs_tells_of_its_gpu() -> None:
    subject = SUBJECTS[0]
    source = subject.source()
    assert source.batch is not None
    model = source.model().cuda().train()
    optimizer = torch.optim.AdamW(model.parameters())
    meter = Meter(model, optimizer)
    for _ in range(FIRST_STEP + 1):
        batch = {name: tensor.cuda() for name, tensor in source.batch(4).items()}
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    report, metrics = meter.report(), meter.metrics()
    meter.close()
    assert report is not None
    assert report.memory.peak_bytes == pytest.approx(allocators_peak_bytes(subject, 4, "fp32"), rel=0.01)
    assert not torch._C._cuda_isHistoryEnabled()
    use = device_use(torch.device("cuda", torch.cuda.current_device()))
    assert use is not None, "NVML knows the device by its UUID"
    assert use.used_bytes >= torch.cuda.memory_reserved()
    assert metrics["device_memory_used_bytes"] >= metrics["memory_reserved_bytes"]
