"""The largest batch that fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from stepfast.errors import AnatomyError
from stepfast.torch.anatomy import DEVICES, Report, predict
from stepfast.torch.anatomy.allocator import reserve
from stepfast.torch.anatomy.fit import largest_batch
from stepfast.torch.anatomy.timeline import Block, Change, Component, Phase, Timeline

MIB = 1 << 20


def report_of(batch_size: int, *, memory_mib: int | None = 512) -> Report:
    device = replace(
        DEVICES["a100-40gb"], context_bytes=0, memory_bytes=None if memory_mib is None else memory_mib * MIB
    )
    return predict(
        lambda: nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU()))),
        torch.optim.AdamW,
        lambda count: torch.randn(count, 1024),
        batch_size=batch_size,
        loss_fn=lambda model, batch: model(batch).sum(),
        device=device,
    )


def test_the_largest_batch_fits_and_one_sample_more_does_not() -> None:
    told: list[tuple[int, bool]] = []
    found = largest_batch(report_of, lambda batch_size, fits: told.append((batch_size, fits)))
    # Each size is told once, as it is tried.
    assert told == [(batch_size, report.memory.fits) for batch_size, report in found.reports.items()]
    assert found.report.memory.fits
    assert not report_of(found.batch_size + 1).memory.fits
    assert found.batch_size > 1000
    assert len(found.reports) <= 24  # of a thousand and more: the line is asked first


def test_where_not_even_one_sample_fits_the_answer_is_none() -> None:
    found = largest_batch(lambda batch_size: report_of(batch_size, memory_mib=64))
    assert found.batch_size == 0
    assert not found.report.memory.fits


def test_a_device_without_a_limit_has_no_largest_batch() -> None:
    with pytest.raises(AnatomyError, match="no known memory"):
        largest_batch(lambda batch_size: report_of(batch_size, memory_mib=None))


def timeline(*sizes: int) -> Timeline:
    """Each block is freed before the next begins."""
    blocks = [Block(size, Component.TEMPORARY, "", "", Phase.FORWARD, 1) for size in sizes]
    changes = [
        Change(index, is_birth, Phase.FORWARD, 1, 0.0) for index in range(len(sizes)) for is_birth in (True, False)
    ]
    return Timeline(blocks=blocks, changes=changes)


def test_a_full_device_gives_back_cached_segments_before_it_fails() -> None:
    growing = timeline(64 * MIB, 66 * MIB)
    assert reserve(growing).peak_reserved_bytes == 130 * MIB
    limited = reserve(growing, limit_bytes=100 * MIB)
    assert limited.failed_at is None
    assert limited.peak_reserved_bytes == 66 * MIB
    assert reserve(growing, limit_bytes=65 * MIB).failed_at == 2
