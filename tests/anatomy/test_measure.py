"""A measurement is the same report as a prediction, of steps that were run."""

from __future__ import annotations

import pytest
import torch
from benchmarks.anatomy.cpumemory import allocator_peak_bytes
from benchmarks.anatomy.plaintraining import train
from torch import nn

from families import FAMILIES
from stepfast.errors import AnatomyError
from stepfast.torch.anatomy import Report, from_json, measure, predict


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> tuple[Report, Report, int]:
    """What is predicted, what is measured, and what the allocator says."""
    family = FAMILIES[request.param]
    arguments = (family.model, torch.optim.AdamW, family.batch)
    return (
        predict(*arguments, batch_size=3, device="cpu"),
        measure(*arguments, batch_size=3, device="cpu"),
        allocator_peak_bytes(lambda: train(family.model, lambda: family.batch(3))),
    )


def test_the_measured_peak_is_the_allocators_and_the_prediction_to_the_byte(pair: tuple[Report, Report, int]) -> None:
    predicted, measured, truth = pair
    assert measured.memory.peak_bytes == predicted.memory.peak_bytes == truth


def test_components_at_the_peak_and_between_steps_are_those_of_the_prediction(pair: tuple[Report, Report, int]) -> None:
    predicted, measured, _ = pair
    assert measured.memory.peak_components == predicted.memory.peak_components
    assert measured.memory.steady_components == predicted.memory.steady_components
    assert measured.memory.component_peaks == predicted.memory.component_peaks


def test_modules_hold_what_was_predicted(pair: tuple[Report, Report, int]) -> None:
    predicted, measured, _ = pair

    def held(report: Report) -> dict[str, int]:
        return {each.name: each.total_bytes for each in report.memory.modules}

    assert held(measured) == held(predicted)


def test_work_is_what_was_predicted_and_time_is_measured(pair: tuple[Report, Report, int]) -> None:
    predicted, measured, _ = pair

    def work(report: Report) -> dict[tuple[str, str], tuple[int, float]]:
        return {(each.kind, each.phase): (each.calls, each.flops) for each in report.time.classes}

    assert work(measured) == work(predicted)
    moved = [sum(each.moved_bytes for each in report.time.classes) for report in (measured, predicted)]
    assert moved[0] == pytest.approx(moved[1], rel=1e-4)  # a number that is kept is a tensor of eight bytes in one only
    assert not measured.time.is_bound
    assert measured.time.step_seconds > 0
    assert measured.time.samples_per_second == pytest.approx(3 / measured.time.step_seconds)


def test_a_measurement_survives_its_file() -> None:
    family = FAMILIES["bert"]
    measured = measure(family.model, torch.optim.AdamW, family.batch, batch_size=2, device="cpu", title="mine")
    assert from_json(measured.to_json()) == measured
    assert (measured.kind, measured.title) == ("measured", "mine")


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16-mixed"},
        {"precision": "bf16"},
        {"accumulation_steps": 3},
        {"clip_norm": 1.0},
        {"checkpointing": lambda module: isinstance(module, nn.Sequential)},
        {"steps": 3},
    ],
    ids=lambda options: next(iter(options)) + str(next(iter(options.values())))[:10],
)
def test_each_way_to_train_is_measured_as_it_is_predicted(options: dict[str, object]) -> None:
    def model() -> nn.Module:
        def block() -> nn.Module:
            return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32))

        return nn.Sequential(block(), nn.Dropout(0.5), block())

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        weights = next(model.parameters())
        result: torch.Tensor = (model(batch.to(weights.dtype)) * 0.5).float().square().mean()
        return result

    arguments = (model, torch.optim.AdamW, lambda: torch.randn(16, 32))
    predicted = predict(*arguments, loss_fn=loss, device="cpu", **options)  # type: ignore[arg-type] # the table's
    measured = measure(*arguments, loss_fn=loss, device="cpu", **options)  # type: ignore[arg-type]
    assert measured.memory.peak_bytes == predicted.memory.peak_bytes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "abacus"}, "none of torch's"),
        ({"device": "meta"}, "meta cannot be measured"),
        ({"steps": 0}, "at least 1"),
        ({"precision": "int3"}, "none of fp32"),
    ],
)
def test_a_wrong_argument_is_refused(options: dict[str, object], says: str) -> None:
    family = FAMILIES["bert"]
    with pytest.raises(AnatomyError, match=says):
        measure(family.model, torch.optim.AdamW, family.batch, batch_size=2, **options)  # type: ignore[arg-type]
