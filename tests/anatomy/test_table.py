"""A report in a terminal and in a pipe."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from anatomyreports import (
    hostile,
    of_many_modules,
    of_nothing,
    of_one_component,
    of_zero_bytes,
    too_large,
    without_limit,
)
from stepfast.sizes import size_text
from stepfast.torch.anatomy import Report
from stepfast.torch.anatomy.sentences import number_text, ratio_text, seconds_text, share_text
from stepfast.torch.anatomy.table import print_report


def printed(report: Report, *, is_terminal: bool = False, width: int = 80) -> str:
    out = io.StringIO()
    print_report(
        report,
        Console(file=out, force_terminal=is_terminal, width=width, color_system="standard" if is_terminal else None),
    )
    return out.getvalue()


def test_everything_of_a_report_is_said(predicted: Report) -> None:
    text = printed(predicted)
    memory = predicted.memory
    assert text.splitlines()[0] == "Small BERT"
    assert "predicted for small-gpu; 201 k parameters, all of them trained." in text
    assert f"It fits: {size_text(memory.occupied_bytes)} of 6.0 MiB are occupied at most" in text
    assert f"Most is allocated in step {memory.peak_step}, optimizer's step, when {memory.peak_operator}" in text
    for name, size in memory.peak_components.items():
        assert re.search(rf"^{name} .*{re.escape(size_text(size))}", text, re.MULTILINE), name
    assert re.search(r"^ +encoder.layer.0-1 ", text, re.MULTILINE)
    assert "step: at least " in text
    assert "samples/second: at most " in text
    for each in predicted.time.classes:
        assert re.search(
            rf"^{each.kind} +{each.phase} +{each.bound} +{seconds_text(each.seconds)} ", text, re.MULTILINE
        )


def test_measured_times_are_no_bounds(predicted_on_cpu: Report) -> None:
    text = printed(predicted_on_cpu)
    assert "at least" not in text
    assert "times are of the kernels as they ran" in text
    assert "the device has no known limit" in text


def test_what_does_not_fit_says_how_much_is_missing(predicted: Report) -> None:
    report = too_large(predicted)
    assert report.memory.limit_bytes is not None
    needed, limit = report.memory.occupied_bytes, report.memory.limit_bytes
    assert (
        f"It does not fit: {size_text(needed)} are needed, {size_text(needed - limit)} more than the device's "
        f"{size_text(limit)}."
    ) in printed(report)


@pytest.mark.parametrize("is_terminal", [False, True], ids=["pipe", "terminal"])
def test_no_cell_is_cut_however_narrow_it_is(predicted: Report, is_terminal: bool) -> None:
    wide = re.sub(r"\x1b\[[0-9;]*m", "", printed(predicted, is_terminal=is_terminal, width=400))
    narrow = re.sub(r"\x1b\[[0-9;]*m", "", printed(predicted, is_terminal=is_terminal, width=20))
    assert narrow == wide
    assert "…" not in narrow


def test_colours_are_for_terminals_alone(predicted: Report) -> None:
    assert "\x1b[" not in printed(predicted)
    assert "\x1b[" in printed(predicted, is_terminal=True)


@pytest.mark.parametrize("edge", [without_limit, of_one_component, of_nothing, of_zero_bytes, of_many_modules, hostile])
def test_edges_are_printed(predicted: Report, edge: Callable[[Report], Report]) -> None:
    assert "One step" in printed(edge(predicted))


def test_control_characters_and_markup_of_a_report_are_shown_as_they_are(predicted: Report) -> None:
    text = printed(replace(predicted, title="a\x1b[31mb\n[red]c", notes=("[bold]\x07",)))
    assert text.splitlines()[0] == r"a\x1b[31mb\n[red]c"
    assert r"- [bold]\x07" in text


def test_bars_are_ascii_where_the_output_is(predicted: Report) -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    quick = replace(predicted, time=replace(predicted.time, classes=()))  # µs is no ASCII
    print_report(replace(quick, time=replace(quick.time, step_seconds=1.0)), Console(file=out, width=80))
    out.flush()
    assert b"####" in raw.getvalue()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (number_text(0), "0"),
        (number_text(999), "999"),
        (number_text(1000), "1 k"),
        (number_text(335143938), "335 M"),
        (number_text(999_999_999), "1 G"),
        (number_text(4.03e12), "4.03 T"),
        (seconds_text(0), "0 s"),
        (seconds_text(0.3591), "359 ms"),
        (seconds_text(0.99999), "1 s"),
        (seconds_text(57.82), "57.8 s"),
        (seconds_text(2e-10), "0.2 ns"),
        (share_text(0), "0 %"),
        (share_text(0.0001), "< 0.1 %"),
        (share_text(0.0957), "9.6 %"),
        (share_text(1), "100 %"),
        (ratio_text(0.0061), "0.006"),
        (ratio_text(151.19), "151"),
    ],
)
def test_numbers_have_three_digits(text: str, expected: str) -> None:
    assert text == expected
