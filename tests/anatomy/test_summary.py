"""The document's own lines: of a run of Trainer, of a GPU, of a report."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from nvmldouble import Driver
from stepfast.errors import AnatomyError
from stepfast.torch.anatomy import Report, print_gpu_utilization, print_summary, summary


def test_occupied_memory_is_printed_as_the_document_does(driver: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    driver.used = [(1343 << 20) + 77, 0]
    print_gpu_utilization()
    print_gpu_utilization(1)
    assert capsys.readouterr().out == "GPU memory occupied: 1343 MB.\nGPU memory occupied: 0 MB.\n"


def test_run_of_trainer_is_printed_as_the_document_does(driver: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    driver.used[0] = 14949 << 20
    print_summary(SimpleNamespace(metrics={"train_runtime": 57.8196, "train_samples_per_second": 8.8552}))
    assert capsys.readouterr().out == "Time: 57.82\nSamples/second: 8.86\nGPU memory occupied: 14949 MB.\n"


@pytest.mark.parametrize("result", [SimpleNamespace(metrics={"train_runtime": 1.0}), SimpleNamespace()])
def test_result_without_its_times_is_refused(driver: Driver, result: SimpleNamespace) -> None:
    with pytest.raises(AnatomyError, match="hand over what Trainer"):
        print_summary(result)


def test_report_gives_the_same_lines(predicted: Report, capsys: pytest.CaptureFixture[str]) -> None:
    timed = replace(predicted, time=replace(predicted.time, step_seconds=0.5, samples_per_step=4))
    occupied = predicted.memory.occupied_bytes >> 20
    assert summary(timed) == f"Time: 0.50\nSamples/second: 8.00\nGPU memory occupied: {occupied} MB."
    assert summary(timed, samples=512).startswith("Time: 64.00\nSamples/second: 8.00\n")
    print_summary(timed)
    assert capsys.readouterr().out == summary(timed) + "\n"


def test_report_of_a_cpu_speaks_of_no_gpu(predicted_on_cpu: Report) -> None:
    assert summary(predicted_on_cpu).splitlines()[-1] == "CPU memory occupied: 1 MB."


def test_report_without_a_batch_size_has_no_rate(predicted: Report) -> None:
    unknown = replace(predicted, time=replace(predicted.time, samples_per_step=None))
    assert "Samples/second" not in summary(unknown)
    with pytest.raises(AnatomyError, match="does not know its batch size"):
        summary(unknown, samples=512)
