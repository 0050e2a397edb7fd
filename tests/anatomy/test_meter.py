"""A training looked at while it runs."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from accelerate import Accelerator
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from families import FAMILIES
from stepfast.torch.anatomy import Meter, Report, predict
from stepfast.torch.anatomy.spacing import FIRST_STEP, steps_between

FAMILY = FAMILIES["gpt"]


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        batch = FAMILY.batch(4)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = FAMILY.model().train()
    return model, torch.optim.AdamW(model.parameters())


def test_a_sampled_steps_peak_is_the_one_that_was_predicted(
    training: tuple[torch.nn.Module, torch.optim.Optimizer],
) -> None:
    meter = Meter(*training, samples_per_step=4)
    assert meter.report() is None
    train(*training, FIRST_STEP + 2)
    report = meter.report()
    meter.close()
    assert report is not None
    predicted = predict(FAMILY.model, torch.optim.AdamW, FAMILY.batch, batch_size=4, device="cpu")
    assert report.memory.peak_bytes == predicted.memory.peak_bytes
    assert report.memory.peak_components == predicted.memory.peak_components
    assert report.time.flops_per_step == predicted.time.flops_per_step


def test_metrics_are_numbers_of_a_closed_set(training: tuple[torch.nn.Module, torch.optim.Optimizer]) -> None:
    meter = Meter(*training, samples_per_step=4)
    train(*training, FIRST_STEP + 2)
    metrics = meter.metrics()
    meter.close()
    assert metrics.keys() == {
        "step_seconds", "samples_per_second", "goodput_ratio", "memory_peak_bytes", "memory_reserved_bytes",
    }  # fmt: skip
    assert metrics["samples_per_second"] == pytest.approx(4 / metrics["step_seconds"])
    assert 0 < metrics["goodput_ratio"] <= 1


def test_time_that_a_save_took_is_no_goodput(training: tuple[torch.nn.Module, torch.optim.Optimizer]) -> None:
    began = time.monotonic()
    told, untold = (Meter(*training, is_sampling=False) for _ in range(2))
    train(*training, 2)
    stall = time.monotonic()
    other = FAMILY.model()
    train(other, torch.optim.AdamW(other.parameters()), 5)
    stall = time.monotonic() - stall
    told.lost(stall)
    train(*training, 1)
    whole = time.monotonic() - began
    found = [meter.metrics()["goodput_ratio"] * whole for meter in (untold, told)]
    assert found[0] - found[1] == pytest.approx(stall, rel=0.05)
    told.close()
    untold.close()


def test_a_closed_meter_leaves_nothing_behind(training: tuple[torch.nn.Module, torch.optim.Optimizer]) -> None:
    model, optimizer = training
    resize, backward = torch.UntypedStorage.resize_, torch.autograd.backward
    meter = Meter(model, optimizer)
    train(model, optimizer, FIRST_STEP)
    model(**FAMILY.batch(4)).loss.backward()  # a sample is under way
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is not None
    meter.close()
    assert torch.UntypedStorage.resize_ is resize
    assert torch.autograd.backward is backward
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    train(model, optimizer, 2)
    assert meter.report() is None


def test_what_is_done_between_steps_is_not_watched(training: tuple[torch.nn.Module, torch.optim.Optimizer]) -> None:
    """Data loaders start processes there, which would inherit the recorder and the profiler; others evaluate."""
    model, optimizer = training
    meter = Meter(model, optimizer)
    train(model, optimizer, FIRST_STEP)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch._C._autograd._profiler_enabled()
    model.eval()
    with torch.no_grad():
        model(**FAMILY.batch(4))
    model.train()
    assert torch._C._len_torch_dispatch_stack() == 0
    train(model, optimizer, 1)
    report = meter.report()
    meter.close()
    assert report is not None
    predicted = predict(FAMILY.model, torch.optim.AdamW, FAMILY.batch, batch_size=4, device="cpu")
    assert report.time.flops_per_step == predicted.time.flops_per_step


def test_a_profiler_of_the_users_own_gets_all_of_its_events(
    training: tuple[torch.nn.Module, torch.optim.Optimizer],
) -> None:
    model, optimizer = training
    meter = Meter(model, optimizer)
    with profile(activities=[ProfilerActivity.CPU]) as session:
        train(model, optimizer, FIRST_STEP + 2)
    assert sum(event.name == "Optimizer.step#AdamW.step" for event in session.events()) == FIRST_STEP + 2
    assert meter.report() is None
    train(model, optimizer, 1)
    assert meter.report() is not None
    meter.close()


def test_samples_are_counted_in_what_the_model_is_given(
    training: tuple[torch.nn.Module, torch.optim.Optimizer],
) -> None:
    model, optimizer = training
    meter = Meter(model, optimizer)
    for _ in range(FIRST_STEP + 1):
        for _ in range(2):  # accumulated
            model(**FAMILY.batch(3)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    report, metrics = meter.report(), meter.metrics()
    meter.close()
    assert report is not None
    assert report.time.samples_per_step == 6
    assert metrics["samples_per_second"] == pytest.approx(6 / metrics["step_seconds"])


def test_a_report_says_nothing_that_was_not_seen(training: tuple[torch.nn.Module, torch.optim.Optimizer]) -> None:
    model, optimizer = training
    meter = Meter(model, optimizer)
    for _ in range(FIRST_STEP + 1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**FAMILY.batch(4)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    report = meter.report()
    meter.close()
    assert report is not None
    assert report.settings == {"samples": "4", "device": "cpu"}


def test_phases_are_found_where_the_loss_is_not_the_models_own() -> None:
    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 8))

    def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.softmax(model(batch), -1).square().mean()
        return result

    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters())
    meter = Meter(trained, optimizer)
    for _ in range(FIRST_STEP + 1):
        loss_of(trained, torch.randn(4, 8)).backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    report = meter.report()
    meter.close()
    assert report is not None
    predicted = predict(
        model, torch.optim.AdamW, lambda: torch.randn(4, 8), loss_fn=loss_of, clip_norm=1.0, device="cpu"
    )

    def work(report: Report) -> dict[tuple[str, str], float]:
        return {(each.kind, each.phase): each.flops for each in report.time.classes}

    assert work(report) == work(predicted)


def test_a_meter_without_samples_has_its_clock(training: tuple[torch.nn.Module, torch.optim.Optimizer]) -> None:
    meter = Meter(*training, is_sampling=False)
    train(*training, FIRST_STEP + 2)
    assert meter.report() is None
    assert meter.metrics().keys() == {"step_seconds", "goodput_ratio"}
    meter.close()


def test_an_optimizer_around_another_is_followed() -> None:
    accelerator = Accelerator(cpu=True)
    model = FAMILY.model().train()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    meter = Meter(model, optimizer)
    train(model, optimizer, FIRST_STEP + 1)
    report = meter.report()
    meter.close()
    assert report is not None
    assert report.memory.steady_components["optimizer"] > 0


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Whether anything was compiled is known of the process as a whole."""
    yield
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_is_compiled_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(model, backend="aot_eager")

    def step() -> None:
        compiled(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    before = dict(counters["frames"])
    assert before["ok"] > 0
    meter = Meter(model, optimizer)
    for _ in range(FIRST_STEP + 3):
        step()
    meter.close()
    assert meter.report() is not None
    assert dict(counters["frames"]) == before


def test_a_sample_that_fails_does_not_end_training(
    training: tuple[torch.nn.Module, torch.optim.Optimizer], caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = training
    meter = Meter(model, optimizer)
    model.parameters = None  # type: ignore[method-assign, assignment] # no meter can understand that
    train(model, optimizer, FIRST_STEP + 3)
    assert meter.report() is None
    assert caplog.text.count("is not measured any more") == 1
    assert meter.metrics()["step_seconds"] > 0
    meter.close()


@pytest.mark.parametrize(
    ("extra_seconds", "step_seconds", "steps"),
    [(1.0, 0.1, 2000), (0.0, 0.1, 1), (0.25, 50.0, 1), (2.0, 1.0, 400), (1.0, 0.0, 1)],
)
def test_samples_are_so_far_apart_that_they_cost_half_a_hundredth(
    extra_seconds: float, step_seconds: float, steps: int
) -> None:
    assert steps_between(extra_seconds, step_seconds) == steps
